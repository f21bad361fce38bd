"""What ``twopool up`` will start: its own flags, and each child's command line made from everybody's.

A flag that router and workers both have goes to all of them, except those that are about one process's address.
"""

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twopool.protocol import config as protocol_config
from twopool.protocol.config import (
    DecodeConfig,
    PrefillConfig,
    RouterConfig,
    WorkerConfig,
    flag,
    flags_of,
    from_namespace,
)
from twopool.protocol.endpoints import bracketed, parse_tcp_address
from twopool.protocol.errors import ConfigError
from twopool.scripts.child import ChildSpec
from twopool.scripts.placement import CpuShare, computes_on_cpu, share_cpus

# -P: the current folder may hold modules whose names shadow a library's.
LAUNCHER = (sys.executable, "-P", "-m", "twopool.scripts.cli")

_ROUTER_ONLY = frozenset({"host", "port", "control_port"})
_REFUSED = {
    "router": "the workers that `twopool up` starts use its own router",
    "worker_id": "`twopool up` names its workers itself",
    "advertise_host": "`twopool up` runs on one machine; start each process by its own command to span several",
}
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


@dataclass(frozen=True, kw_only=True)
class UpConfig:
    """The flags of ``twopool up`` beyond the router's and the workers'."""

    prefill: int = flag(1, "prefill workers to start; 0 lets the decode workers prefill for themselves")
    decode: int = flag(1, "decode workers to start")
    pin: bool = flag(True, "on CPU, give each worker cores of its own where there are enough")
    startup_timeout_s: float = flag(600.0, "seconds until everything must be ready")

    def __post_init__(self) -> None:
        if self.prefill < 0:
            raise ConfigError(f"--prefill {self.prefill}: must not be negative", param="--prefill")
        if self.decode < 1:
            raise ConfigError(f"--decode {self.decode}: at least one decode worker is needed", param="--decode")
        if not self.startup_timeout_s > 0:
            raise ConfigError(f"--startup-timeout-s {self.startup_timeout_s}: must be positive")


@dataclass(frozen=True, kw_only=True)
class WorkerPlan:
    """One worker to start once the router's control address is known."""

    name: str
    role: str
    share: CpuShare | None
    flags: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class UpPlan:
    """Everything to start, validated."""

    up: UpConfig
    router: RouterConfig
    router_spec: ChildSpec
    workers: tuple[WorkerPlan, ...]
    launcher: tuple[str, ...]
    drain_timeout_s: float

    def worker_spec(self, worker: WorkerPlan, control: str) -> ChildSpec:
        """The worker's command line, given the control addresses that the router printed."""
        controls = ",".join(reachable(address) for address in control.split(","))
        argv = [*self.launcher, worker.role, *worker.flags, f"--router={controls}", *_tied_to_us()]
        if worker.share is not None and worker.share.cpus is not None:
            argv.append("--cpus=" + ",".join(map(str, worker.share.cpus)))
        return ChildSpec(name=worker.name, argv=tuple(argv))


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of ``twopool up``: its own, the workers' and the router's; the router's help wins where both have one.

    ``parser`` must have been made with ``conflict_handler="resolve"``.
    """
    protocol_config.add_flags(parser, UpConfig)
    protocol_config.add_flags(parser, WorkerConfig)
    protocol_config.add_flags(parser, RouterConfig)
    for name in _REFUSED:  # known, so that the reason can be given
        parser.add_argument("--" + name.replace("_", "-"), default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    parser.add_argument(
        "--control-port", type=int, default=argparse.SUPPRESS, help="ZeroMQ port of the router (default: a free one)"
    )


def make_plan(
    arguments: argparse.Namespace,
    *,
    cluster_key: Path | None,
    launcher: Sequence[str] = LAUNCHER,
    cpus: Iterable[int] | None = None,
) -> UpPlan:
    """Validate all flags and lay out the children; raises ``ConfigError``. ``cpus``: default, this process's."""
    given = dict(vars(arguments))
    for name, reason in _REFUSED.items():
        if name in given:
            param = "--" + name.replace("_", "-")
            raise ConfigError(f"{param} {given[name]}: {reason}", param=param)
    if cluster_key is not None:
        given["cluster_key"] = cluster_key
    given.setdefault("control_port", 0)
    up = from_namespace(UpConfig, argparse.Namespace(**given))
    given.setdefault("min_prefill", up.prefill)
    given.setdefault("min_decode", up.decode)
    router = from_namespace(RouterConfig, argparse.Namespace(**given))
    for_workers = {name: value for name, value in given.items() if name not in _ROUTER_ONLY}
    worker = from_namespace(WorkerConfig, argparse.Namespace(**for_workers))
    return UpPlan(
        up=up,
        router=router,
        router_spec=ChildSpec(
            name="router", argv=(*launcher, "router", *flags_of(RouterConfig, given), *_tied_to_us())
        ),
        workers=_plan_workers(up, worker, for_workers, os.sched_getaffinity(0) if cpus is None else cpus),
        launcher=tuple(launcher),
        drain_timeout_s=router.drain_timeout_s,
    )


def reachable(address: str) -> str:
    """``host:port`` as this machine reaches it: a wildcard address becomes loopback."""
    host, port = parse_tcp_address(address, param="control address")
    return f"{bracketed(_WILDCARDS.get(host, host))}:{port}"


def _plan_workers(
    up: UpConfig, worker: WorkerConfig, given: dict[str, Any], cpus: Iterable[int]
) -> tuple[WorkerPlan, ...]:
    roles = ["prefill"] * up.prefill + ["decode"] * up.decode
    names = [f"prefill-{i}" for i in range(up.prefill)] + [f"decode-{i}" for i in range(up.decode)]
    shares: Sequence[CpuShare | None] = [None] * len(roles)
    if computes_on_cpu(worker.device):
        shares = share_cpus(sorted(cpus), len(roles), pin=up.pin)
    plans = []
    for name, role, share in zip(names, roles, shares, strict=True):
        own = {**given, "worker_id": name}
        if share is not None and worker.num_threads == 0:
            own["num_threads"] = share.num_threads
        config = PrefillConfig if role == "prefill" else DecodeConfig
        plans.append(WorkerPlan(name=name, role=role, share=share, flags=flags_of(config, own)))
    return tuple(plans)


def _tied_to_us() -> tuple[str, ...]:
    return (f"--die-with-parent={os.getpid()}",)
