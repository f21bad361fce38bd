"""What the engine accepts, and how a request becomes sequences."""

import math

import numpy as np

from twopool.engine.block_pool import Reservation
from twopool.engine.prompt_logprobs import PromptScores
from twopool.engine.requests import EngineRequest
from twopool.engine.scheduler import SchedulerConfig, blocks_for
from twopool.engine.sequence import ChoiceOutput, RequestState, Sequence
from twopool.protocol.errors import ContextLengthError, InvalidRequestError
from twopool.protocol.ids import ChoiceIndex
from twopool.protocol.messages import MAX_PROMPT_LOGPROBS_BYTES, prompt_logprobs_bytes, unpack_ids
from twopool.protocol.token_hash import HashChain, TokenIds


def check_request(request: EngineRequest, config: SchedulerConfig, max_len: int) -> None:
    """Raises ``InvalidRequestError`` or ``ContextLengthError`` for what cannot be computed, in words."""
    if not len(request.prompt_ids):
        raise InvalidRequestError("The prompt has no tokens.", param="prompt")
    choices = [state.choice for state in request.choices]
    if not choices or len(set(choices)) != len(choices):
        raise InvalidRequestError(f"Choices {choices}: expected at least one, each once.", param="n")
    outputs = [_output_ids(state.output_ids) for state in request.choices]
    if request.prefill_only and any(not np.array_equal(output, outputs[0]) for output in outputs):
        raise InvalidRequestError("A prefill serves only choices with equal outputs.", param="n")
    _check_ids(request.prompt_ids, config.vocab_size)
    for output in outputs:
        _check_ids(output, config.vocab_size)
        num_tokens = len(request.prompt_ids) + len(output)
        if num_tokens >= max_len:
            raise ContextLengthError(
                f"{num_tokens} tokens leave no room for another: this model's context length is {max_len} tokens here.",
                param="prompt",
            )
        if len(output) >= request.sampling.max_tokens:
            raise InvalidRequestError(
                f"A choice has {len(output)} of at most {request.sampling.max_tokens} tokens already.",
                param="max_tokens",
            )
    num_top = request.sampling.prompt_logprobs
    if num_top is not None:
        size = prompt_logprobs_bytes(len(request.prompt_ids), num_top)
        if size > MAX_PROMPT_LOGPROBS_BYTES:
            raise InvalidRequestError(
                f"{size} bytes of prompt log-probabilities are too many.", param="prompt_logprobs"
            )
    _check_finite(request)


def make_state(
    request: EngineRequest, *, arrival: int, number: int, max_len: int, reservation: Reservation | None
) -> RequestState:
    outputs = {}
    num_top = request.sampling.prompt_logprobs
    is_new = not any(state.output_ids for state in request.choices)
    for state in request.choices:
        output_ids = unpack_ids(state.output_ids).tolist()
        outputs[state.choice] = ChoiceOutput(state.choice, output_ids, len(output_ids))
    return RequestState(
        key=request.key,
        arrival=arrival,
        number=number,
        num_prompt=len(request.prompt_ids),
        sampling=request.sampling,
        salt=request.salt,
        prefill_only=request.prefill_only,
        outputs=outputs,
        reservation=reservation,
        max_len=max_len,
        prompt_scores=PromptScores(len(request.prompt_ids), num_top) if num_top is not None and is_new else None,
    )


def make_sequences(state: RequestState, request: EngineRequest) -> list[Sequence]:
    """One sequence for all choices without output (of a prefill: for all choices), and one each for the others."""
    groups: list[tuple[tuple[ChoiceIndex, ...], bytes]] = []
    shared = tuple(one.choice for one in request.choices if request.prefill_only or not one.output_ids)
    if shared:
        groups.append((shared, request.choices[0].output_ids if request.prefill_only else b""))
    groups += [((one.choice,), one.output_ids) for one in request.choices if one.choice not in shared]
    sequences = []
    for choices, output_ids in groups:
        token_ids = np.concatenate((request.prompt_ids, unpack_ids(output_ids)), dtype=np.int32)
        sequences.append(Sequence(state, choices, token_ids, HashChain(state.salt)))
    return sequences


def blocks_to_reserve(sequences: list[Sequence], num_held: int, block_size: int, num_blocks: int) -> int:
    """Blocks that ``sequences`` of one request need to start, beyond ``num_held``: all tokens they have, a growth block
    for each choice that will be decoded here, and never more than the whole pool, which is enough for any one of them.
    """
    state = sequences[0].request
    tokens = sum(blocks_for(sequence.num_tokens, block_size) for sequence in sequences)
    growth = 0 if state.prefill_only else len(state.outputs)
    return min(tokens + growth, num_blocks) - num_held


def _output_ids(data: bytes) -> TokenIds:
    try:
        return unpack_ids(data)
    except ValueError as error:
        raise InvalidRequestError(f"Output ids cannot be read: {error}") from error


def _check_ids(token_ids: TokenIds, vocab_size: int) -> None:
    if len(token_ids) and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < vocab_size:
        low, high = int(token_ids.min()), int(token_ids.max())
        raise InvalidRequestError(
            f"Token id {low if low < 0 else high} is not in the model's vocabulary of {vocab_size}.", param="prompt"
        )


def _check_finite(request: EngineRequest) -> None:
    """NaN passes the bounds of a message's fields."""
    sampling = request.sampling
    fields = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    for name in fields:
        if not math.isfinite(getattr(sampling, name)):
            raise InvalidRequestError(f"{name} must be a finite number.", param=name)
    if not all(math.isfinite(value) for _, value in sampling.logit_bias):
        raise InvalidRequestError("logit_bias values must be finite numbers.", param="logit_bias")
