"""The flags of the transfer benchmarks that say what is underneath: the worker's own, by their names."""

import argparse
import os
from importlib.metadata import version

import torch

from twopool.kv_transfer.ucx import in_words
from twopool.protocol.config import WorkerConfig
from twopool.protocol.errors import ConfigError


def add_link_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nixl-backend", default=WorkerConfig.nixl_backend, help="NIXL plugin (default: UCX)")
    parser.add_argument("--ucx-tls", help="UCX_TLS of all processes (default: the environment's, or UCX chooses)")
    parser.add_argument(
        "--ucx", action="append", default=[], metavar="NAME=VALUE", help="another setting of UCX, repeatable"
    )
    parser.add_argument(
        "--kv-same-host",
        choices=("map", "nixl"),
        default=WorkerConfig.kv_same_host,
        help="one host: copy from the mapped pool (map, not where UCX_TLS is set or another backend) or leave it to "
        "NIXL (default: map)",
    )


def add_device_flags(parser: argparse.ArgumentParser, *, starts_source: bool) -> None:
    parser.add_argument("--device", default="cpu", help="memory of this process's pools: cpu, cuda, cuda:N")
    if starts_source:
        parser.add_argument("--source-device", help="memory of the source's pools (default: --device)")


def positive(text: str) -> int:
    """The type of a flag that counts something."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number


def memory_device(name: str, flag: str) -> torch.device:
    """What ``flag`` says; raises ``ConfigError`` where this machine has none such."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"{flag} {name}: no such device: {error}", param=flag) from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"{flag} {name}: pools are in the memory of cpu or cuda", param=flag)
    num_gpus = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= num_gpus:
        raise ConfigError(f"{flag} {name}: torch sees {num_gpus} GPUs here", param=flag)
    return device


def link_flags(args: argparse.Namespace) -> list[str]:
    """The same flags for another process: the source, or ``twopool up``."""
    flags = [f"--nixl-backend={args.nixl_backend}", f"--kv-same-host={args.kv_same_host}"]
    if args.ucx_tls is not None:
        flags.append(f"--ucx-tls={args.ucx_tls}")
    return flags + [f"--ucx={setting}" for setting in args.ucx]


def link_config(args: argparse.Namespace) -> WorkerConfig:
    """What a worker with these flags would do in this environment; raises ``ConfigError``."""
    config = WorkerConfig(
        nixl_backend=args.nixl_backend, ucx_tls=args.ucx_tls, ucx=tuple(args.ucx), kv_same_host=args.kv_same_host
    )
    return config.with_environment(os.environ)


def link_in_words(args: argparse.Namespace) -> str:
    """What READs go through, with every setting of UCX and NIXL that is in force."""
    config = link_config(args)
    same_host = "mapped if in host memory, whatever UCX is told" if config.maps_same_host else "by NIXL"
    words = in_words(config.ucx_settings, os.environ)
    return f"nixl {version('nixl')}, backend {config.nixl_backend}; {words}; pools of this host: {same_host}"
