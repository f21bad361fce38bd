"""READs through staging memory: the same bytes as straight ones, in fewer ranges, and only where that pays."""

import numpy as np
import pytest
import torch

from twopool.kv_transfer.agent import Post, PreparedList
from twopool.kv_transfer.gathering import GatheringAgent
from twopool.kv_transfer.layout import Index, StridedList
from twopool.kv_transfer.local import LocalAgent, LocalFabric
from twopool.protocol.errors import TransferError
from twopool.protocol.geometry import KvGeometry
from twopool.protocol.ids import Epoch
from twopool.protocol.messages import RankPool

LENGTH = 32
COUNT = 128
DENSE = StridedList(0, LENGTH, LENGTH, COUNT)
GEOMETRY = KvGeometry(
    num_blocks=4, block_size=16, num_layers=1, num_kv_heads=1, num_kv_heads_local=1, head_dim=4, dtype="float32"
)


class Inner(LocalAgent):
    """Notes what is posted; fails or stays unfinished as told."""

    def __init__(self, *, name: str, pool: torch.Tensor, fabric: LocalFabric) -> None:
        super().__init__(name=name, pool=pool, fabric=fabric)
        self.posted: list[tuple[Index, Index]] = []
        self.polls_to_go = 0
        self.failure: TransferError | None = None

    @property
    def num_registered(self) -> int:
        return len(self._memory)

    def post(self, *, local: PreparedList, local_index: Index, remote: PreparedList, remote_index: Index) -> Post:
        if self.failure is not None:
            raise self.failure
        self.posted.append((local_index, remote_index))
        super().post(local=local, local_index=local_index, remote=remote, remote_index=remote_index)
        return Waiting(self)


class Waiting:
    def __init__(self, agent: Inner) -> None:
        self._agent = agent

    def poll(self) -> bool:
        self._agent.polls_to_go -= 1
        return self._agent.polls_to_go < 0

    def release(self) -> None:
        pass


class Scene:
    def __init__(self) -> None:
        fabric = LocalFabric()
        self.source = torch.randint(0, 255, (COUNT, LENGTH), dtype=torch.uint8)
        self.pool = torch.zeros(COUNT, LENGTH, dtype=torch.uint8)
        LocalAgent(name="source", pool=self.source.view(-1), fabric=fabric)
        self.inner = Inner(name="reader", pool=self.pool.view(-1), fabric=fabric)
        self.agent = GatheringAgent(self.inner)
        described = RankPool(geometry=GEOMETRY, base_address=0, canary_block=3, agent_metadata=b"source")
        self.peer = self.agent.add_peer(described, Epoch(1))
        self.described = described

    def post(
        self,
        local_index: list[int],
        remote_index: list[int],
        *,
        local: StridedList = DENSE,
        remote: StridedList = DENSE,
    ) -> Post:
        return self.agent.post(
            local=self.agent.prepare_local(self.pool.data_ptr(), local),
            local_index=np.array(local_index, dtype=np.int32),
            remote=self.agent.prepare_remote(self.peer, self.described, remote),
            remote_index=np.array(remote_index, dtype=np.int32),
        )


def spread(count: int) -> list[int]:
    """``count`` places of which no two are next to each other."""
    return [2 * place + 1 for place in range(count)]


def test_what_lies_side_by_side_over_there_is_read_as_one_and_spread_here() -> None:
    scene = Scene()
    scene.inner.polls_to_go = 2
    post = scene.post(spread(40), list(range(50, 90)))
    assert not post.poll() and not scene.pool.any()
    assert not post.poll() and not scene.pool.any(), "nothing is in its place before all of it has landed"
    assert post.poll()
    post.release()
    expected = torch.zeros_like(scene.pool)
    expected[spread(40)] = scene.source[50:90]
    assert torch.equal(scene.pool, expected)
    ((local_index, remote_index),) = scene.inner.posted
    assert local_index.tolist() == list(range(40)) and remote_index.tolist() == list(range(50, 90))


def test_staging_memory_is_used_again_and_never_by_two_at_once() -> None:
    scene = Scene()
    scene.inner.polls_to_go = 1
    first, second = scene.post(spread(20), list(range(20))), scene.post(spread(60)[40:], list(range(20, 40)))
    assert scene.inner.num_registered == 3, "the pool and a piece of memory for each"
    assert not first.poll() and first.poll() and second.poll()
    assert torch.equal(scene.pool[spread(20)], scene.source[:20])
    assert torch.equal(scene.pool[spread(60)[40:]], scene.source[20:40])
    first.release()
    second.release()
    scene.inner.failure = TransferError("cable cut")
    with pytest.raises(TransferError, match="cable cut"):
        scene.post(spread(20), list(range(20)))
    scene.inner.failure = None
    for _ in range(3):
        post = scene.post(spread(20), list(range(20)))
        assert post.poll()
        post.release()
    assert scene.inner.num_registered == 3


@pytest.mark.parametrize(
    ("local_index", "remote_index"),
    [
        pytest.param(list(range(30, 60)), list(range(30)), id="adjacent on both sides"),
        pytest.param(spread(30), spread(30), id="adjacent on none"),
        pytest.param(spread(30), [place // 3 * 6 + place % 3 for place in range(30)], id="three a range"),
        pytest.param([7], [3], id="one run"),
    ],
)
def test_what_gains_too_little_is_read_straight(local_index: list[int], remote_index: list[int]) -> None:
    scene = Scene()
    assert scene.post(local_index, remote_index).poll()
    assert torch.equal(scene.pool[local_index], scene.source[remote_index])
    assert scene.inner.posted[0][0].tolist() == local_index and scene.inner.num_registered == 1


def test_runs_with_gaps_between_them_are_read_straight() -> None:
    scene = Scene()
    gaps = StridedList(0, LENGTH // 2, LENGTH, COUNT)
    assert scene.post(spread(30), list(range(30)), local=gaps, remote=gaps).poll()
    half = slice(0, LENGTH // 2)
    assert torch.equal(scene.pool[spread(30), half], scene.source[:30, half]) and scene.inner.num_registered == 1
