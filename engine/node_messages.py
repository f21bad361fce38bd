"""What node 0 of a worker and its other nodes say to each other, over one authenticated connection a node.

First they meet: ``JoinNode``, then ``StartRanks`` or ``NodeRefused``. From then on a node carries its ranks' three
connections: what the leader writes into one comes out of it on the node, and the other way round.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from twopool.engine.nodes import Fact
from twopool.engine.rank_messages import MeetingPlace
from twopool.protocol.ids import WorkerId
from twopool.protocol.messages import MAX_RANKS

Channel = Literal["life", "control", "steps"]
CHANNELS: tuple[Channel, ...] = ("life", "control", "steps")

_Rank = Annotated[int, Meta(ge=0, le=MAX_RANKS - 1)]
_Text = Annotated[str, Meta(max_length=8192)]
_Bytes = Annotated[bytes, Meta(max_length=1024 * 1024)]


class RankBytes(Struct, frozen=True, tag="bytes"):
    """Bytes of one of a rank's connections, in order; either way."""

    rank: _Rank
    channel: Channel
    data: _Bytes


class ChannelEnded(Struct, frozen=True, tag="channel_ended"):
    """No more will come over it, and nothing is read from it; either way."""

    rank: _Rank
    channel: Channel


# --- node → node 0


class JoinNode(Struct, frozen=True, kw_only=True, tag="join"):
    """Here is node ``node`` on ``host``, with these facts."""

    node: Annotated[int, Meta(ge=0, le=2**31 - 1)]
    host: _Text
    facts: Annotated[tuple[Fact, ...], Meta(max_length=256)]


class RankEnded(Struct, frozen=True, kw_only=True, tag="rank_ended"):
    """The rank's process ended with ``status``, as ``subprocess`` numbers it."""

    rank: _Rank
    status: int


class StopWorker(Struct, frozen=True, kw_only=True, tag="stop"):
    """The node was told to stop: the worker is to drain."""


class NodeFailed(Struct, frozen=True, kw_only=True, tag="node_failed"):
    """The node cannot go on."""

    reason: _Text


NodeToLeader = JoinNode | RankBytes | ChannelEnded | RankEnded | StopWorker | NodeFailed


# --- node 0 → node


class NodeRefused(Struct, frozen=True, kw_only=True, tag="refused"):
    """The node does not fit, or its place is taken."""

    reason: _Text


class StartRanks(Struct, frozen=True, kw_only=True, tag="start"):
    """All nodes are there: start your ranks, which meet those of the others at ``meeting``."""

    worker_id: WorkerId
    meeting: MeetingPlace


class KillRanks(Struct, frozen=True, kw_only=True, tag="kill"):
    """They did not go by themselves."""


class WorkerServes(Struct, frozen=True, kw_only=True, tag="serves"):
    """The worker is registered with a router."""


class WorkerEnds(Struct, frozen=True, kw_only=True, tag="ends"):
    """The last word: ``reason`` where something went wrong."""

    reason: _Text | None


LeaderToNode = NodeRefused | StartRanks | RankBytes | ChannelEnded | KillRanks | WorkerServes | WorkerEnds
