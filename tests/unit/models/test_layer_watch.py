"""Every layer is told of once and in order, during the step where there is time, at its end at the latest."""

import time

import pytest

from twopool.models.layer_watch import LayerWatch


def test_layers_are_told_of_in_order() -> None:
    told: list[int] = []
    with LayerWatch(6, told.append) as watch:
        watch.layers_done.value = 3
        deadline_s = time.monotonic() + 5
        while len(told) < 3 and time.monotonic() < deadline_s:
            time.sleep(0.001)
        assert told == [1, 2, 3]
    assert told == [1, 2, 3, 4, 5, 6]


def test_a_step_that_fails_tells_no_more() -> None:
    told: list[int] = []
    with pytest.raises(RuntimeError, match="step"), LayerWatch(6, told.append):
        raise RuntimeError("step")
    assert told == []
