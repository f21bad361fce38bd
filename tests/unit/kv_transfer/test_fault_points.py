"""Fault points: free when off, counted, taken anew when the file changes."""

from pathlib import Path

import pytest

from twopool.kv_transfer.fault_points import ACTIONS, Fault, FaultPoints
from twopool.protocol.errors import ConfigError, TransferError


def test_lines() -> None:
    assert Fault.parse("read=late:0.5*2") == Fault("read", "late", 0.5, 2)
    assert Fault.parse("fetching=1.5") == Fault("fetching", "delay", 1.5, None)
    for action in ACTIONS:
        assert Fault.parse(f"p={action}") == Fault("p", action)
    for line in ("read=explode", "read=late:x", "read=drop*y"):
        with pytest.raises(ConfigError, match="fault point"):
            Fault.parse(line)


async def test_off_is_nothing(tmp_path: Path) -> None:
    for points in (FaultPoints(None), FaultPoints(tmp_path / "missing")):
        assert points.take("read") is None
        assert await points.reached("read")
        assert points.num_happened == 0


async def test_counts_start_anew_with_the_file(tmp_path: Path) -> None:
    file = tmp_path / "faults"
    points = FaultPoints(file)
    file.write_text("read=corrupt*2\nasking=drop*1\npinned=refuse\n")
    taken = [points.take("read") for _ in range(3)]
    assert [fault is not None for fault in taken] == [True, True, False]
    assert not await points.reached("asking") and await points.reached("asking")
    with pytest.raises(TransferError, match="pinned"):
        await points.reached("pinned")
    assert points.num_happened == 4
    file.write_text("read=corrupt*1\n")
    assert points.take("read") is not None and points.take("read") is None
    assert points.take("pinned") is None
