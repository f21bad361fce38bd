"""The flags of the transfer benchmarks that say what is underneath: the worker's own, by their names."""

import argparse

from twopool.protocol.config import WorkerConfig


def add_link_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nixl-backend", default=WorkerConfig.nixl_backend, help="NIXL plugin (default: UCX)")
    parser.add_argument("--ucx-tls", help="UCX_TLS of all processes (default: UCX chooses)")
    parser.add_argument(
        "--kv-same-host",
        choices=("map", "nixl"),
        default=WorkerConfig.kv_same_host,
        help="one host: copy from the mapped pool (map, not with --ucx-tls) or leave it to NIXL (default: map)",
    )


def link_flags(args: argparse.Namespace) -> list[str]:
    """The same flags for another process: the source, or ``twopool up``."""
    flags = [f"--nixl-backend={args.nixl_backend}", f"--kv-same-host={args.kv_same_host}"]
    if args.ucx_tls is not None:
        flags.append(f"--ucx-tls={args.ucx_tls}")
    return flags


def maps_same_host(args: argparse.Namespace) -> bool:
    """As a worker with these flags would."""
    config = WorkerConfig(nixl_backend=args.nixl_backend, ucx_tls=args.ucx_tls, kv_same_host=args.kv_same_host)
    return config.maps_same_host
