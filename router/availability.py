"""Whether the registered workers can serve a request, and in words why not."""

from collections.abc import Callable

from twopool.protocol.config import RouterConfig
from twopool.protocol.errors import ContextLengthError, UnavailableError
from twopool.router.pairing import Need, can_serve
from twopool.router.registry import WorkerRegistry

RETRY_AFTER_S = 2


class Availability:
    """Readiness of the pools, and the check every new request passes."""

    def __init__(self, workers: WorkerRegistry, config: RouterConfig, clock: Callable[[], float]) -> None:
        self._workers = workers
        self._config = config
        self._clock = clock
        self._has_served = False
        self._pools_complete = config.min_prefill == 0 and config.min_decode == 0
        self.draining = False

    @property
    def max_model_len(self) -> int | None:
        """The smallest of the workers' limits and the configured one; ``None`` while there are no workers."""
        ours, theirs = self._config.max_model_len, self._workers.max_model_len
        return theirs if theirs is None or ours is None else min(ours, theirs)

    def workers_changed(self) -> None:
        """Workers came, went or shook hands."""
        self._pools_complete = self._pools_complete or self._are_pools_complete()
        if not self._workers.decodes:
            self._has_served = False
        elif self.readiness()[0]:
            self._has_served = True

    def readiness(self) -> tuple[bool, str]:
        """Whether the router should be sent traffic, and why, for people."""
        now = self._clock()
        decodes = [c for c in self._workers.decodes if c.serves(0, now)]
        prefills = [c for c in self._workers.prefills if c.serves(0, now)]
        if self.draining:
            return False, "the router is shutting down"
        if not self._pools_complete:
            return False, (
                f"waiting for workers: {len(prefills)} of {self._config.min_prefill} prefill and "
                f"{len(decodes)} of {self._config.min_decode} decode are here"
            )
        if not decodes:
            return False, "no decode worker is ready"
        if any(prefill.ref in decode.sources for decode in decodes for prefill in prefills):
            return True, "a prefill and a decode worker are ready and have shaken hands"
        # While the pools start, a decode worker alone is not ready once a prefill worker is there. After it has been,
        # a prefill worker that joins does not take the router out of service until hands are shaken.
        if any(c.local_prefill for c in decodes) and (self._has_served or not self._workers.prefills):
            return True, "decode workers are ready and prefill for themselves"
        if not prefills:
            return False, "no prefill worker is ready, and decode workers do not prefill for themselves"
        return False, "no prefill and decode worker have shaken hands yet"

    def unavailable(self) -> UnavailableError:
        ready, reason = self.readiness()
        return UnavailableError("no worker can serve the request now" if ready else reason, retry_after_s=RETRY_AFTER_S)

    def _are_pools_complete(self) -> bool:
        """Whether as many workers as the configuration waits for are here; asked until it is once so."""
        enough_prefills = len(self._workers.prefills) >= self._config.min_prefill
        return enough_prefills and len(self._workers.decodes) >= self._config.min_decode

    def check(self, need: Need) -> None:
        """Raises ``ContextLengthError`` or ``UnavailableError`` unless some workers, given room, serve ``need``."""
        if self.draining or not self._pools_complete:
            raise self.unavailable()
        num_prompt_tokens = need.num_tokens - 1
        limit = self.max_model_len
        if limit is not None and need.num_tokens > limit:
            raise ContextLengthError(
                f"the prompt has {num_prompt_tokens} tokens; prompt and output together may have {limit}",
                param="prompt",
            )
        if can_serve(self._workers.decodes, self._workers.prefills, need, self._clock()):
            return
        room = self._room()
        if room is not None and need.num_tokens > room:
            raise ContextLengthError(
                f"the prompt has {num_prompt_tokens} tokens; the workers' KV cache holds {room}", param="prompt"
            )
        raise self.unavailable()

    def _room(self) -> int | None:
        """Tokens the largest prompt plus one may have for the workers' pools; ``None`` without decode workers."""
        decodes, prefills = self._workers.decodes, self._workers.prefills
        room = max((c.pool_tokens for c in decodes), default=None)
        if room is None or not prefills:
            return room
        local = max((c.pool_tokens for c in decodes if c.local_prefill), default=0)
        return max(local, min(room, max(c.pool_tokens for c in prefills)))
