"""Whether a node of a worker fits the others. Pure functions.

A node is one start of the worker's command, as a rule on a host of its own. Node 0 is the worker: its first rank leads.
"""

import dataclasses
from collections.abc import Sequence
from importlib import metadata
from typing import Annotated, Final

from msgspec import Meta, Struct

from twopool.protocol.config import WorkerConfig
from twopool.protocol.messages import PROTOCOL_VERSION, Role

_OWN: Final = frozenset(
    {
        *("node_rank", "node_timeout_s", "master_addr", "master_port"),
        *("model", "device", "num_threads", "cluster_key", "fault_points"),
        *("router", "host", "port", "advertise_host", "log_level", "log_format"),
    }
)
"""What every node may say in its own words: where things are on its host, and what only node 0 reads."""

_MAY_BE_LEFT_OUT: Final = "--worker-id"
"""Node 0 gives itself a name when it is given none."""


class Fact(Struct, frozen=True, array_like=True):
    """Something all nodes have to agree on."""

    name: Annotated[str, Meta(max_length=64)]
    value: Annotated[str, Meta(max_length=8192)]


def node_facts(config: WorkerConfig, role: Role, *, model: str, device: str) -> tuple[Fact, ...]:
    """What this node has. ``model``: a fingerprint; ``device``: the kind computed on."""
    facts = {
        "twopool": metadata.version("twopool"),
        "protocol": str(PROTOCOL_VERSION),
        "torch": metadata.version("torch"),
        "role": role,
        "model fingerprint": model,
        "device": device,
    }
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if item.name not in _OWN and not (item.name == "worker_id" and value is None):
            facts["--" + item.name.replace("_", "-")] = str(value)
    return tuple(Fact(name, value) for name, value in facts.items())


def differences(node: int, ours: Sequence[Fact], theirs: Sequence[Fact]) -> str | None:
    """In what ``node`` differs from node 0, with both sides' values; ``None``: in nothing."""
    here = {fact.name: fact.value for fact in ours}
    there = {fact.name: fact.value for fact in theirs}
    if _MAY_BE_LEFT_OUT not in there:
        here.pop(_MAY_BE_LEFT_OUT, None)
    named = [
        f"{name} is {there.get(name, 'unknown')} on node {node}, {here.get(name, 'unknown')} on node 0"
        for name in {**here, **there}
        if here.get(name) != there.get(name)
    ]
    return "; ".join(named) or None


def listed(nodes: Sequence[int]) -> str:
    """``"node 1"`` or ``"nodes 1, 2"``."""
    return f"node{'s' if len(nodes) > 1 else ''} {', '.join(map(str, nodes))}"
