"""What ``twopool up`` will start: its own flags, and each child's command line made from everybody's.

A flag that router and workers both have goes to all of them, except those that are about one process's address.
"""

import argparse
import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twopool.protocol import config as protocol_config
from twopool.protocol.config import RouterConfig, WorkerConfig, config_class, flag, flags_of, from_namespace
from twopool.protocol.endpoints import bracketed, parse_tcp_address
from twopool.protocol.errors import ConfigError
from twopool.protocol.messages import Role
from twopool.scripts.child import ChildSpec
from twopool.scripts.cluster_file import Pool, read_cluster_file
from twopool.scripts.placement import CpuShare, computes_on_cpu, share_cpus

# -P: the current folder may hold modules whose names shadow a library's.
LAUNCHER = (sys.executable, "-P", "-m", "twopool.scripts.cli")

_ROUTER_ONLY = frozenset({"host", "port", "control_port"})
_REFUSED = {
    "router": "the workers that `twopool up` starts use its own router",
    "worker_id": "`twopool up` names its workers itself",
    "advertise_host": "`twopool up` runs on one machine; start each process by its own command to span several",
    "node_rank": "`twopool up` starts node 0; start the others by the worker's own command on their hosts",
    **dict.fromkeys(
        ("nnodes", "master_addr", "master_port"),
        "a worker on several hosts is a pool of its own in a --file, with fields of that name",
    ),
}
_FILES = ("prefill", "decode", "prefill_tp", "decode_tp", "tensor_parallel_size")
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


@dataclass(frozen=True, kw_only=True)
class UpConfig:
    """The flags of ``twopool up`` beyond the router's and the workers'."""

    prefill: int = flag(1, "prefill workers to start; 0 lets the decode workers prefill for themselves")
    decode: int = flag(1, "decode workers to start")
    prefill_tp: int | None = flag(None, "ranks of each prefill worker (default: --tensor-parallel-size)", parse=int)
    decode_tp: int | None = flag(None, "ranks of each decode worker (default: --tensor-parallel-size)", parse=int)
    file: Path | None = flag(
        None, "YAML file of pools that differ in more than that, see docs/cluster.example.yaml", parse=Path
    )
    pin: bool = flag(True, "on CPU, give each worker cores of its own where there are enough")
    startup_timeout_s: float = flag(600.0, "seconds until everything must be ready")

    def __post_init__(self) -> None:
        if self.prefill < 0:
            raise ConfigError(f"--prefill {self.prefill}: must not be negative", param="--prefill")
        if self.decode < 1:
            raise ConfigError(f"--decode {self.decode}: at least one decode worker is needed", param="--decode")
        for name, value in (("--prefill-tp", self.prefill_tp), ("--decode-tp", self.decode_tp)):
            if value is not None and value < 1:
                raise ConfigError(f"{name} {value}: must be positive", param=name)
        if not self.startup_timeout_s > 0:
            raise ConfigError(f"--startup-timeout-s {self.startup_timeout_s}: must be positive")


@dataclass(frozen=True, kw_only=True)
class WorkerPlan:
    """One worker to start."""

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

    def worker_spec(self, worker: WorkerPlan) -> ChildSpec:
        """The worker's command line; it has to be told ``router_line``."""
        argv = [*self.launcher, worker.role, *worker.flags, "--router-on-stdin", *_tied_to_us()]
        if worker.share is not None and worker.share.cpus is not None:
            argv.append("--cpus=" + ",".join(map(str, worker.share.cpus)))
        return ChildSpec(name=worker.name, argv=tuple(argv), is_told=True)


def router_line(control: str) -> str:
    """What a worker is told once the router has printed its control addresses."""
    return ",".join(reachable(address) for address in control.split(","))


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of ``twopool up``: its own, the workers' and the router's; the router's help wins where both have one.

    ``parser`` must have been made with ``conflict_handler="resolve"``.
    """
    protocol_config.add_flags(parser, UpConfig)
    protocol_config.add_flags(parser, WorkerConfig)
    protocol_config.add_flags(parser, RouterConfig)
    for name in _REFUSED:  # known, so that the reason can be given
        parser.add_argument("--" + name.replace("_", "-"), default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    parser.add_argument("-f", dest="file", type=Path, default=argparse.SUPPRESS, help="short for --file")
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
    is_key_new = cluster_key is not None and given.get("cluster_key") is None
    if cluster_key is not None:
        given["cluster_key"] = cluster_key
    up = from_namespace(UpConfig, argparse.Namespace(**given))
    for_workers = {name: value for name, value in given.items() if name not in _ROUTER_ONLY}
    if up.file is None:
        pools = _pools_of_flags(up, for_workers)
    else:
        _refuse_counts(given)
        deployment = read_cluster_file(up.file, _REFUSED)
        given = {**deployment.router, **given}
        pools = [(pool, {**values, **for_workers}) for pool, values in deployment.pools]
        if "model" not in given and "model" in pools[0][1]:
            given["model"] = pools[0][1]["model"]
    if is_key_new and any(pool.nnodes > 1 for pool, _ in pools):
        raise ConfigError(
            f"--file {up.file}: a pool with nnodes needs a --cluster-key that its other nodes have, too",
            param="--cluster-key",
        )
    given.setdefault("control_port", 0)
    for role in ("prefill", "decode"):
        given.setdefault(f"min_{role}", sum(pool.count for pool, _ in pools if pool.role == role))
    if not given["min_decode"] and not any(pool.role == "decode" for pool, _ in pools):
        raise ConfigError(f"--file {up.file}: at least one pool of decode workers is needed", param="--file")
    router = from_namespace(RouterConfig, argparse.Namespace(**given))
    return UpPlan(
        up=up,
        router=router,
        router_spec=ChildSpec(
            name="router", argv=(*launcher, "router", *flags_of(RouterConfig, given), *_tied_to_us())
        ),
        workers=_plan_workers(up, pools, os.sched_getaffinity(0) if cpus is None else cpus),
        launcher=tuple(launcher),
        drain_timeout_s=router.drain_timeout_s,
    )


def reachable(address: str) -> str:
    """``host:port`` as this machine reaches it: a wildcard address becomes loopback."""
    host, port = parse_tcp_address(address, param="control address")
    return f"{bracketed(_WILDCARDS.get(host, host))}:{port}"


def _pools_of_flags(up: UpConfig, given: dict[str, Any]) -> list[tuple[Pool, dict[str, Any]]]:
    """One pool a role."""
    pools: list[tuple[Pool, dict[str, Any]]] = []
    roles: tuple[tuple[Role, int, int | None], ...] = (
        ("prefill", up.prefill, up.prefill_tp),
        ("decode", up.decode, up.decode_tp),
    )
    for role, count, degree in roles:
        if count:
            own = given if degree is None else {**given, "tensor_parallel_size": degree}
            pools.append((Pool(role=role, count=count), own))
    return pools


def _refuse_counts(given: Mapping[str, Any]) -> None:
    for name in _FILES:
        if name in given:
            param = "--" + name.replace("_", "-")
            raise ConfigError(f"{param} {given[name]}: with --file, the pools say that", param=param)


def _plan_workers(
    up: UpConfig, pools: Sequence[tuple[Pool, dict[str, Any]]], cpus: Iterable[int]
) -> tuple[WorkerPlan, ...]:
    workers: list[tuple[str, Role, dict[str, Any], WorkerConfig]] = []
    numbers: Counter[str] = Counter()
    for pool, given in pools:
        for index in range(pool.count):
            name = f"{pool.role}-{numbers[pool.role]}"
            numbers[pool.role] += 1
            own = {**given, "worker_id": name}
            config = from_namespace(config_class(pool.role), argparse.Namespace(**own))
            own["device"] = _device_of(config, index)
            workers.append((name, pool.role, own, config))
    on_cpu = [computes_on_cpu(config.device) for *_, config in workers]
    ranks = [len(config.local_ranks) for (*_, config), is_cpu in zip(workers, on_cpu, strict=True) if is_cpu]
    shares = iter(share_cpus(sorted(cpus), ranks, pin=up.pin) if ranks else ())
    plans = []
    for (name, role, own, config), is_cpu in zip(workers, on_cpu, strict=True):
        share = next(shares) if is_cpu else None
        if share is not None and config.num_threads == 0:
            own["num_threads"] = share.num_threads
        plans.append(WorkerPlan(name=name, role=role, share=share, flags=flags_of(config_class(role), own)))
    return tuple(plans)


def _device_of(config: WorkerConfig, index: int) -> str:
    """Where worker ``index`` of a pool computes: a pool on ``cuda:N`` takes the GPUs from there on, a rank each."""
    kind, separator, first = config.device.partition(":")
    if not separator or not first.isdecimal():
        return config.device
    return f"{kind}:{int(first) + index * len(config.local_ranks)}"


def _tied_to_us() -> tuple[str, ...]:
    return (f"--die-with-parent={os.getpid()}",)
