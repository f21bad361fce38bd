"""How much to ask of a worker that said ``Busy``, and whether to ask a failing one at all.

Both are pure functions of what happened and of the clock reading passed in (``time.monotonic`` seconds).
"""

from twopool.protocol.ids import RequestId

_BUSY_BACKOFF_S = 0.02
_MAX_BUSY_BACKOFF_S = 0.1
_MAX_PROBES_LOG2 = 16

_FAULTS_TO_OPEN = 3
_COOL_DOWN_S = 1.0
_MAX_COOL_DOWN_S = 10.0


class AdmissionWindow:
    """The number of attempts a worker is given at once, learnt from its ``Busy`` answers.

    Without a ``Busy`` there is no limit. After one, the limit is what the worker had then: nothing more for a short
    pause, then one more, two, four ... as pauses pass without another ``Busy``, so that neither a flood of grants
    meets a full worker nor a worker that has room again waits for long. Whatever ends makes room at once.
    """

    def __init__(self) -> None:
        self._limit: int | None = None
        self._busy_s = 0.0
        self._pause_s = _BUSY_BACKOFF_S

    def is_open(self, num_attempts: int, now_s: float) -> bool:
        """Whether a worker that has ``num_attempts`` may be given one more."""
        if self._limit is None or num_attempts < self._limit:
            return True
        pauses = int((now_s - self._busy_s) / self._pause_s)
        return pauses > 0 and num_attempts < self._limit + (1 << min(pauses - 1, _MAX_PROBES_LOG2))

    def on_busy(self, num_attempts: int, now_s: float) -> None:
        """The worker refused an attempt while it kept ``num_attempts`` others."""
        if self._limit is not None and now_s - self._busy_s < self._pause_s:
            # A burst of refusals of grants that were already on their way: the last tells how many fitted.
            num_attempts = min(num_attempts, self._limit)
        elif self._limit is not None:
            self._pause_s = min(2 * self._pause_s, _MAX_BUSY_BACKOFF_S)
        self._limit = num_attempts
        self._busy_s = now_s

    def on_room(self, num_attempts: int) -> None:
        """Something ended there, leaving ``num_attempts``: one more may be tried without a pause."""
        if self._limit is not None:
            self._limit = max(self._limit, num_attempts + 1)
            self._pause_s = _BUSY_BACKOFF_S


class Breaker:
    """Keeps work away from a worker that several requests in a row found faulty.

    After three faults of different requests with no success between, the worker is left alone for a cool-down; then
    one probe a cool-down is let through until one succeeds. A single request that fails wherever it goes (one whose
    logits are NaN, say) counts once, so it cannot take a worker out of service.
    """

    def __init__(self) -> None:
        self._num_faults = 0
        self._last_request: RequestId | None = None
        self._closed_until_s = 0.0
        self._cool_down_s = _COOL_DOWN_S

    @property
    def is_tripped(self) -> bool:
        """Whether the worker is out of service or on probation."""
        return self._num_faults >= _FAULTS_TO_OPEN

    def allows(self, now_s: float) -> bool:
        return not self.is_tripped or now_s >= self._closed_until_s

    def on_grant(self, now_s: float) -> None:
        """An attempt was given to the worker: on probation it is the only one for a cool-down."""
        if self.is_tripped:
            self._closed_until_s = now_s + self._cool_down_s

    def on_fault(self, request_id: RequestId, now_s: float) -> None:
        if request_id == self._last_request:
            return
        self._last_request = request_id
        if self.is_tripped:
            self._cool_down_s = min(2 * self._cool_down_s, _MAX_COOL_DOWN_S)
        self._num_faults += 1
        self._closed_until_s = now_s + self._cool_down_s

    def on_success(self) -> None:
        self._num_faults = 0
        self._last_request = None
        self._cool_down_s = _COOL_DOWN_S
