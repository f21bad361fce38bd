"""Where the router's HTTP half and its worker half meet.

The HTTP half turns a client's request into ``RoutedRequest``s (one for each prompt) and receives each one's tokens
through a ``TokenSink``; the worker half, the ``Dispatcher``, finds workers for them, survives their loss and hands
over every token exactly once and in order. Everything here is called on the router's event loop.
"""

from array import array
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from twopool.protocol.errors import TwopoolError
from twopool.protocol.ids import Attempt, ChoiceIndex, RequestId
from twopool.protocol.messages import SamplingParams, TokenDelta
from twopool.protocol.token_hash import TokenIds
from twopool.router.registry import Worker
from twopool.router.timings import Grant


class RoutedRequest(msgspec.Struct, frozen=True):
    """One prompt and how to continue it.

    ``prompt_ids`` is ``[num_prompt_tokens]`` int32. ``sampling`` is complete (seed and EOS ids included). ``salt``
    separates tenants' prefix caches. ``timeout_s`` counts from ``arrived_s``, a ``time.monotonic()`` stamp.
    """

    request_id: RequestId
    prompt_ids: TokenIds
    sampling: SamplingParams
    salt: bytes
    timeout_s: float
    arrived_s: float


class TokenLane(Protocol):
    """The short way of nearly every token of a request with one choice; see ``router.token_lane``.

    While it is open, a token of ``worker``'s ``attempt`` that comes alone, with nothing else to tell, is appended to
    ``output_ids`` (the same array as the dispatcher's) in place of a call of ``TokenSink.on_tokens``, and the lane
    handed to ``mark`` unless ``is_marked``.
    """

    worker: Worker | None
    attempt: Attempt
    output_ids: "array[int]"
    is_marked: bool
    mark: Callable[[Any], None]

    def open(self, worker: Worker, attempt: Attempt, output_ids: "array[int]") -> None: ...


class TokenSink(Protocol):
    """Receives what becomes of one ``RoutedRequest``."""

    def on_tokens(self, delta: TokenDelta) -> None:
        """Accepted tokens of one choice: ``delta.index`` is exactly the next one of that choice.

        ``delta.finish_reason`` ends the choice. ``delta.prefill`` and ``delta.handover`` ride at most once.
        """

    def lane(self) -> TokenLane | None:
        """The short way for the next tokens, closed, where there is one now."""

    def close_lane(self) -> None:
        """What came the short way is taken before whatever follows, and nothing more comes that way. Idempotent."""

    def on_granted(self, grant: Grant) -> None:
        """An attempt is on its way to its workers; once for each attempt, before its tokens."""

    def on_error(self, error: TwopoolError) -> None:
        """The request is over without an answer; nothing follows."""


class Dispatcher(Protocol):
    """The worker half. A request is over for it when every choice had a finish reason or ``finish_choice``."""

    def submit(self, request: RoutedRequest, sink: TokenSink) -> None:
        """Take over ``request``; ``sink`` is never called before this returns.

        Raises ``OverloadedError`` or ``UnavailableError`` at once, and then never calls ``sink``.
        """

    def cancel(self, request_id: RequestId) -> None:
        """The client left: stop everywhere, call the sink no more. Idempotent; unknown ids are ignored."""

    def finish_choice(self, request_id: RequestId, choice: ChoiceIndex) -> None:
        """The router matched a stop string: no more tokens of ``choice`` are delivered. Safe inside ``on_tokens``."""

    def is_ready(self) -> bool:
        """Whether a request could be served now: a usable pair, or a decode worker that may prefill."""

    def ready_reason(self) -> str:
        """Why ``is_ready`` says what it says, for people."""

    @property
    def max_model_len(self) -> int | None:
        """The smallest over the workers; ``None`` while there are none."""

    @property
    def vocab_size(self) -> int | None:
        """The workers' logits width; ``None`` while there are none."""

    def stacks(self) -> dict[str, dict[str, Any]]:
        """What answers may come from now, by the fingerprints that they would have (``router.stack``)."""
