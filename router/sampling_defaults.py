"""From a request body and the model's defaults to complete ``SamplingParams``, every value checked."""

import math

from twopool.protocol.errors import InvalidRequestError
from twopool.protocol.ids import new_seed
from twopool.protocol.messages import (
    MAX_BIAS_ENTRIES,
    MAX_CHOICES,
    MAX_LOGPROBS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)
from twopool.router.model_info import SamplingDefaults
from twopool.router.schema import ChatBody, CompletionBody, GenerationBody

MAX_STOPS = 64
MAX_STOP_CHARS = 1024
_INT32_MAX = 2**31 - 1


def sampling_params(
    body: GenerationBody,
    *,
    defaults: SamplingDefaults,
    eos_token_ids: tuple[int, ...],
    vocab_size: int,
    max_tokens: int,
    grammar: str | None = None,
) -> SamplingParams:
    """Complete parameters; draws the seed where the client gave none. Raises ``InvalidRequestError``."""
    min_tokens = int_in_range("min_tokens", body.min_tokens, 0, _INT32_MAX, default=0)
    if min_tokens > max_tokens:
        raise InvalidRequestError(
            f"min_tokens: {min_tokens} is more than the {max_tokens} tokens that may be generated", param="min_tokens"
        )
    return SamplingParams(
        n=num_drawn(body),
        temperature=float_in_range("temperature", body.temperature, 0, 2, default=defaults.temperature),
        top_k=_top_k(body.top_k, defaults.top_k),
        top_p=float_in_range("top_p", body.top_p, 0, 1, default=defaults.top_p),
        min_p=float_in_range("min_p", body.min_p, 0, 1, default=defaults.min_p),
        repetition_penalty=_repetition_penalty(body.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=float_in_range("presence_penalty", body.presence_penalty, -2, 2, default=0.0),
        frequency_penalty=float_in_range("frequency_penalty", body.frequency_penalty, -2, 2, default=0.0),
        logit_bias=_logit_bias(body.logit_bias, vocab_size),
        seed=_seed(body.seed),
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        eos_token_ids=() if body.ignore_eos else eos_token_ids,
        stop_token_ids=_stop_token_ids(body.stop_token_ids, vocab_size),
        logprobs=_drawn_logprobs(body),
        grammar=grammar,
        prompt_logprobs=num_prompt_logprobs(body),
    )


def num_choices(body: GenerationBody) -> int:
    """How many choices of each prompt the answer has."""
    return int_in_range("n", body.n, 1, MAX_CHOICES, default=1)


def num_drawn(body: GenerationBody) -> int:
    """How many choices of each prompt are generated: ``best_of``, of which the likeliest are shown."""
    n = num_choices(body)
    drawn = int_in_range("best_of", body.best_of, 1, MAX_CHOICES, default=n)
    if drawn < n:
        raise InvalidRequestError(f"best_of: {drawn} is less than n ({n})", param="best_of")
    if drawn > n and body.stream:
        message = "best_of: more than n cannot be streamed, for only the end tells the best"
        raise InvalidRequestError(message, param="best_of")
    return drawn


def is_ranked(body: GenerationBody) -> bool:
    """Whether the choices shown are the likeliest of more."""
    return num_drawn(body) > num_choices(body)


def num_logprobs(body: GenerationBody) -> int | None:
    """Alternatives to report for each token; ``None`` reports nothing."""
    if isinstance(body, ChatBody):
        top = int_in_range("top_logprobs", body.top_logprobs, 0, MAX_LOGPROBS, default=0)
        if not body.logprobs:
            if top:
                raise InvalidRequestError("top_logprobs: needs logprobs to be true", param="top_logprobs")
            return None
        return top
    if isinstance(body, CompletionBody) and body.logprobs is not None:
        return int_in_range("logprobs", body.logprobs, 0, MAX_LOGPROBS, default=0)
    return None


def num_prompt_logprobs(body: GenerationBody) -> int | None:
    """Alternatives to learn for each prompt token: asked for as such, or because the prompt is echoed with its own."""
    asked = (
        []
        if body.prompt_logprobs is None
        else [int_in_range("prompt_logprobs", body.prompt_logprobs, 0, MAX_LOGPROBS, default=0)]
    )
    if asked and body.stream:
        raise InvalidRequestError("prompt_logprobs: not available in streams", param="prompt_logprobs")
    echoed = num_logprobs(body) if body.echo else None
    return max([*asked, *([] if echoed is None else [echoed])], default=None)


def stop_strings(body: GenerationBody) -> tuple[str, ...]:
    """The stop strings, each once."""
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(stops) > MAX_STOPS:
        raise InvalidRequestError(f"stop: at most {MAX_STOPS} strings, got {len(stops)}", param="stop")
    for stop in stops:
        if not stop:
            raise InvalidRequestError("stop: an empty string would stop at once", param="stop")
        if len(stop) > MAX_STOP_CHARS:
            raise InvalidRequestError(f"stop: at most {MAX_STOP_CHARS} characters a string", param="stop")
    return tuple(dict.fromkeys(stops))


def int_in_range(name: str, value: int | None, low: int, high: int, *, default: int) -> int:
    if value is None:
        return default
    if not low <= value <= high:
        raise InvalidRequestError(f"{name}: {value} is not between {low} and {high}", param=name)
    return value


def float_in_range(name: str, value: float | None, low: float, high: float, *, default: float) -> float:
    if value is None:
        return default
    if not low <= value <= high:  # also refuses NaN
        raise InvalidRequestError(f"{name}: {value} is not between {low} and {high}", param=name)
    return value


def _drawn_logprobs(body: GenerationBody) -> int | None:
    """What the workers are to report: ranking needs each token's own at least."""
    asked = num_logprobs(body)
    return 0 if asked is None and is_ranked(body) else asked


def _top_k(value: int | None, default: int) -> int:
    """0 and -1 both turn it off."""
    if value is None:
        return default
    if value < -1:
        raise InvalidRequestError(f"top_k: {value} is neither -1, 0 nor positive", param="top_k")
    return min(max(value, 0), _INT32_MAX)


def _repetition_penalty(value: float | None, default: float) -> float:
    if value is None:
        return default
    if not 0 < value <= 100:
        raise InvalidRequestError(f"repetition_penalty: {value} is not in (0, 100]", param="repetition_penalty")
    return value


def _seed(value: int | None) -> int:
    if value is None:
        return new_seed()
    return int_in_range("seed", value, -(2**63), 2**63 - 1, default=0)


def _logit_bias(bias: dict[str, float] | None, vocab_size: int) -> tuple[tuple[int, float], ...]:
    if not bias:
        return ()
    if len(bias) > MAX_BIAS_ENTRIES:
        raise InvalidRequestError(f"logit_bias: at most {MAX_BIAS_ENTRIES} entries", param="logit_bias")
    return tuple(sorted(_bias_entry(key, value, vocab_size) for key, value in bias.items()))


def _bias_entry(key: str, value: float, vocab_size: int) -> tuple[int, float]:
    if not (key.isascii() and key.isdecimal() and len(key) <= 10 and str(int(key)) == key and int(key) < vocab_size):
        shown = key if len(key) <= 32 else key[:32] + "..."
        raise InvalidRequestError(f"logit_bias: {shown!r} is no token id below {vocab_size}", param="logit_bias")
    if not (math.isfinite(value) and -100 <= value <= 100):
        raise InvalidRequestError(f"logit_bias: {value} is not between -100 and 100", param="logit_bias")
    return int(key), value


def _stop_token_ids(ids: list[int] | None, vocab_size: int) -> tuple[int, ...]:
    if not ids:
        return ()
    given = tuple(dict.fromkeys(ids))
    if len(given) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequestError(f"stop_token_ids: at most {MAX_STOP_TOKEN_IDS}", param="stop_token_ids")
    for token_id in given:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequestError(
                f"stop_token_ids: {token_id} is no token id below {vocab_size}", param="stop_token_ids"
            )
    return given
