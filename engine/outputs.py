"""From drawn tokens to deltas: the rules that end a choice, log-probabilities, resending."""

from twopool.engine.sequence import ChoiceOutput, RequestState
from twopool.kernels.sampling import Draws
from twopool.protocol.ids import ChoiceIndex
from twopool.protocol.messages import TokenDelta, TokenLogprobs


class DrawnTokens:
    """The draws of a step as Python values, each array converted once."""

    def __init__(self, draws: Draws) -> None:
        self.token_ids: list[int] = draws.token_ids.tolist()
        self.bad: list[bool] = draws.bad.tolist()
        self._logprobs: list[float] = [] if draws.logprobs is None else draws.logprobs.tolist()
        self._top_ids = draws.top_ids
        self._top_logprobs = draws.top_logprobs

    def logprobs(self, index: int, num_top: int) -> TokenLogprobs:
        """Log-probabilities of draw ``index``, with its ``num_top`` most likely tokens."""
        if not num_top or self._top_ids is None or self._top_logprobs is None:
            return TokenLogprobs(self._logprobs[index])
        return TokenLogprobs(
            self._logprobs[index],
            tuple(self._top_ids[index, :num_top].tolist()),
            tuple(self._top_logprobs[index, :num_top].tolist()),
        )


def record_token(state: RequestState, choice: ChoiceIndex, drawn: DrawnTokens, index: int) -> TokenDelta:
    """Append draw ``index`` to a choice's output, end the choice where a rule says so, and tell of both."""
    output = state.outputs[choice]
    token = drawn.token_ids[index]
    output.output_ids.append(token)
    num_outputs = len(output.output_ids)
    # Before min_tokens stop ids cannot be drawn: the sampler masks them.
    if token in state.stop_ids:
        output.finish_reason, output.stop_token_id = "stop", token
    elif state.grammar is not None and state.grammar.is_complete(choice, output.output_ids):
        output.finish_reason = "stop"
    elif num_outputs >= state.sampling.max_tokens or state.num_prompt + num_outputs >= state.max_len:
        output.finish_reason = "length"
    logprobs = None
    if state.sampling.logprobs is not None:
        logprobs = (drawn.logprobs(index, state.sampling.logprobs),)
        output.logprobs.extend(logprobs)
    return TokenDelta(
        state.key.request_id,
        state.key.attempt,
        choice,
        num_outputs - 1,
        (token,),
        output.finish_reason,
        output.stop_token_id,
        logprobs,
    )


def adopt_delta(state: RequestState, delta: TokenDelta) -> None:
    """Take over what the prefill said about one choice; raises ``ValueError`` where it does not continue the ids."""
    output = state.outputs.get(delta.choice)
    if output is None or output.ended or delta.index != len(output.output_ids):
        raise ValueError(f"a token of choice {delta.choice} at index {delta.index} does not continue {state.key}")
    if delta.prompt_logprobs is not None:
        state.prompt_logprobs = delta.prompt_logprobs
    output.output_ids.extend(delta.token_ids)
    output.logprobs.extend(delta.logprobs or ())
    output.finish_reason = delta.finish_reason
    output.stop_token_id = delta.stop_token_id


def resend(state: RequestState, choice: ChoiceIndex, from_index: int) -> TokenDelta | None:
    """All of a choice's tokens from ``from_index`` on, and how it ended; None when there is nothing to say.

    Where log-probabilities were asked for, those of tokens that came with the request are not known here: the delta
    starts after them.
    """
    output = state.outputs.get(choice)
    if output is None or from_index < 0:
        return None
    asked = state.sampling.logprobs is not None
    start = max(from_index, output.base) if asked else from_index
    count = len(output.output_ids)
    if start > count or (start == count and output.finish_reason is None):
        return None
    return TokenDelta(
        state.key.request_id,
        state.key.attempt,
        choice,
        start,
        tuple(output.output_ids[start:]),
        output.finish_reason,
        output.stop_token_id,
        _logprobs_from(output, start) if asked else None,
        prompt_logprobs=state.prompt_logprobs if start == 0 and choice == next(iter(state.outputs)) else None,
    )


def _logprobs_from(output: ChoiceOutput, start: int) -> tuple[TokenLogprobs, ...]:
    return tuple(output.logprobs[start - output.base :])
