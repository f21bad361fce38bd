"""Tells of layers that a native step completes while it runs."""

import ctypes
import threading
from collections.abc import Callable
from types import TracebackType

LOOK_INTERVAL_S = 0.0005
"""A thread that sleeps costs the step nothing worth naming; half a millisecond is short beside a group of layers."""


class LayerWatch:
    """While entered, calls ``on_layer(n)`` on a thread of its own for each ``n`` up to what ``layers_done`` holds.

    On leaving without an error, every layer has been told of.
    """

    def __init__(self, num_layers: int, on_layer: Callable[[int], None]) -> None:
        self.layers_done = ctypes.c_int32(0)
        self._num_layers = num_layers
        self._on_layer = on_layer
        self._num_told = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="layer-watch", daemon=True)

    def __enter__(self) -> "LayerWatch":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        if error is None:
            self._tell(self._num_layers)

    def _watch(self) -> None:
        while not self._over.wait(LOOK_INTERVAL_S):
            self._tell(self.layers_done.value)

    def _tell(self, num_done: int) -> None:
        while self._num_told < num_done:
            self._num_told += 1
            self._on_layer(self._num_told)
