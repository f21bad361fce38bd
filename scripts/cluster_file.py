"""What ``twopool up -f FILE`` reads: the pools of a deployment, in YAML.

::

    router:                  # flags of `twopool router`, without the dashes
      port: 8000
    workers:                 # flags of every worker
      model: smollm2-135m-instruct
      dtype: bfloat16
    pools:
      - role: prefill        # prefill or decode
        count: 2             # workers (default: 1)
        tp: 2                # ranks of each (default: 1)
        device: cuda:0       # cpu, cuda, or cuda:N: the pool's ranks take GPUs one after the other from N on
        block_size: 64
        flags:               # any other flag of these workers
          max_num_batched_tokens: 2048
      - role: prefill
        tp: 16
        nnodes: 2            # a worker on several hosts (default: 1): this one is node 0
        master_addr: 10.0.0.1
        master_port: 29500
      - role: decode
        device: cpu
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from twopool.protocol import config as protocol_config
from twopool.protocol.config import RouterConfig, WorkerConfig
from twopool.protocol.errors import ConfigError
from twopool.protocol.messages import MAX_PEERS, MAX_RANKS, Role

MAX_FILE_BYTES = 1024 * 1024

_Value = bool | int | float | str | list[str | int]
_Flags = dict[Annotated[str, Meta(min_length=1, max_length=64)], _Value]


class Pool(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Workers that are alike. ``flags`` are theirs beyond the fields."""

    role: Role
    count: Annotated[int, Meta(ge=1, le=MAX_PEERS)] = 1
    tp: Annotated[int, Meta(ge=1, le=MAX_RANKS)] = 1
    device: str | None = None
    block_size: int | None = None
    nnodes: Annotated[int, Meta(ge=1, le=MAX_RANKS)] = 1
    master_addr: str | None = None
    master_port: int | None = None
    flags: _Flags = {}


class ClusterFile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file."""

    pools: Annotated[tuple[Pool, ...], Meta(min_length=1, max_length=MAX_PEERS)]
    router: _Flags = {}
    workers: _Flags = {}


class Deployment(Struct, frozen=True, kw_only=True):
    """The file as values of configuration fields, by name: the router's, and those of each pool beside the pool."""

    router: dict[str, Any]
    pools: tuple[tuple[Pool, dict[str, Any]], ...]


_OWN = {
    "tensor_parallel_size": "tp",
    **{name: name for name in ("device", "block_size", "nnodes", "master_addr", "master_port")},
}
"""Flags that have a field of their own in a pool."""


def read_cluster_file(path: Path, refused: Mapping[str, str]) -> Deployment:
    """Raises ``ConfigError`` that names the file and the field. ``refused``: fields that are not to be set, and why."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"--file {path}: cannot be read: {error.strerror}", param="--file") from error
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"--file {path}: {len(data)} bytes are too many", param="--file")
    try:
        cluster = msgspec.yaml.decode(data, type=ClusterFile)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:  # a field that is wrong comes as `$.pools[0].tp`
        raise ConfigError(f"--file {path}: {_words(error)}", param="--file") from error
    router = _values(path, "router", RouterConfig, cluster.router, refused)
    workers = _values(path, "workers", WorkerConfig, cluster.workers, refused)
    pools = []
    for number, pool in enumerate(cluster.pools):
        where = f"pools[{number}].flags"
        for name, field in _OWN.items():
            if {name, name.replace("_", "-")} & set(pool.flags):
                raise ConfigError(f"--file {path}: {where}.{name}: say `{field}` beside `role` instead", param="--file")
        if pool.nnodes > 1 and pool.count > 1:
            raise ConfigError(
                f"--file {path}: pools[{number}].count {pool.count}: a worker of {pool.nnodes} nodes has a pool of its "
                "own, as its nodes meet at an address of their own",
                param="--file",
            )
        own = {name: getattr(pool, field) for name, field in _OWN.items()}
        given = {name: value for name, value in own.items() if value is not None}
        pools.append((pool, {**workers, **_values(path, where, WorkerConfig, pool.flags, refused), **given}))
    return Deployment(router=router, pools=tuple(pools))


def _values(path: Path, where: str, config: type, flags: _Flags, refused: Mapping[str, str]) -> dict[str, Any]:
    """The flags' values as the command line would give them."""
    parser = _Parser(allow_abbrev=False, add_help=False)
    protocol_config.add_flags(parser, config)
    values: dict[str, Any] = {}
    for name, value in flags.items():
        if reason := refused.get(name.replace("-", "_")):
            raise ConfigError(f"--file {path}: {where}.{name}: {reason}", param="--file")
        flag = "--" + name.replace("_", "-")
        if flag not in parser._option_string_actions or flag.startswith("--no-"):
            raise ConfigError(f"--file {path}: {where}.{name}: there is no such flag", param="--file")
        is_switch = isinstance(parser._option_string_actions[flag], argparse.BooleanOptionalAction)
        if is_switch != isinstance(value, bool):
            expected = "true or false" if is_switch else "a value, not true or false"
            raise ConfigError(f"--file {path}: {where}.{name}: expected {expected}, got {value!r}", param="--file")
        argv = [flag if value else f"--no-{flag.removeprefix('--')}"] if is_switch else _given(parser, flag, value)
        try:
            values |= vars(parser.parse_args(argv))
        except ValueError as error:
            raise ConfigError(f"--file {path}: {where}.{name}: {error}", param="--file") from error
    return values


def _given(parser: "_Parser", flag: str, value: _Value) -> list[str]:
    """A list is one flag for each item where the flag may be repeated, else its items with commas between them."""
    items = value if isinstance(value, list) else [str(value)]
    if isinstance(parser._option_string_actions[flag], argparse._AppendAction):
        return [f"{flag}={item}" for item in items]
    return [f"{flag}={','.join(map(str, items))}"]


class _Parser(argparse.ArgumentParser):
    """Raises ``ValueError`` where argparse would end the process."""

    def error(self, message: str) -> Any:
        raise ValueError(message)


def _words(error: Exception) -> str:
    """``$.pools[0].tp`` becomes ``pools[0].tp``."""
    text, separator, place = str(error).partition(" - at `$")
    return f"{place.removesuffix('`').removeprefix('.') or 'the file'}: {text}" if separator else text
