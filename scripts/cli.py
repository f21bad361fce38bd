"""The ``twopool`` command.

  twopool router | prefill | decode    one process of a deployment, in the foreground until SIGTERM
  twopool up                           router and workers of one machine, started, watched and stopped together
  twopool model fetch NAME             put a model into the cache ahead of its use
  twopool keygen FILE                  the secret that processes on several hosts share
  twopool version

Exit status: 0 after a clean stop, 1 when something failed, 2 when the command line is wrong. Heavy modules are imported
by the command that needs them: the router's process never loads torch.
"""

import argparse
import gc
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

from twopool.protocol.config import DecodeConfig, PrefillConfig, RouterConfig, add_flags, from_namespace
from twopool.protocol.errors import ConfigError, TwopoolError
from twopool.scripts import process_control, up, up_plan

_HELP = {
    "router": "serve the OpenAI API and pair requests with workers",
    "prefill": "run a prefill worker",
    "decode": "run a decode worker",
    "up": "start, watch and stop a router with prefill and decode workers on this machine",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (default: the process's own); returns the exit status."""
    arguments = build_parser().parse_args(argv)
    try:
        return _run(arguments)
    except ConfigError as error:
        print(f"twopool: error: {error.message}", file=sys.stderr)
        return 2
    except TwopoolError as error:
        print(f"twopool: error: {error.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # before a process has installed its own handlers, while it loads
        return 130


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(
        prog="twopool", description="Disaggregated LLM serving: prefill and decode in pools of their own."
    )
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for role, config in (("router", RouterConfig), ("prefill", PrefillConfig), ("decode", DecodeConfig)):
        role_parser = commands.add_parser(role, help=_HELP[role], description=_HELP[role], allow_abbrev=False)
        add_flags(role_parser, config)
        process_control.add_flags(role_parser)
    up_parser = commands.add_parser(
        "up", help=_HELP["up"], description=_HELP["up"], allow_abbrev=False, conflict_handler="resolve"
    )
    up_plan.add_flags(up_parser)

    model = commands.add_parser("model", help="manage the model cache").add_subparsers(
        dest="action", required=True, metavar="ACTION"
    )
    fetch = model.add_parser("fetch", help="fetch a model into the cache and print its folder")
    fetch.add_argument("name", help="a known name, such as smollm2-135m-instruct, or a hub id")
    keygen = commands.add_parser("keygen", help="write a new cluster secret, for processes on several hosts")
    keygen.add_argument("file", type=Path, help="the file to write; it must not exist")
    commands.add_parser("version", help="print the version")
    return parser


def _run(arguments: argparse.Namespace) -> int:
    match arguments.command:
        case "up":
            return up.run(arguments)
        case "model":
            from twopool.models.store import fetch_model

            print(fetch_model(arguments.name))
            return 0
        case "keygen":
            from twopool.protocol.security import generate_cluster_key

            generate_cluster_key(arguments.file)
            print(f"Wrote {arguments.file}. Copy it to every host of the cluster and keep it secret.", file=sys.stderr)
            return 0
        case "version":
            print(_version())
            return 0
        case _:
            process_control.apply(arguments)
            return _run_role(arguments)


def _run_role(arguments: argparse.Namespace) -> int:
    """Validate the flags, find the model, then hand over to the role until it is told to stop."""
    from twopool.models.store import resolve_model

    match arguments.command:
        case "router":
            router_config = from_namespace(RouterConfig, arguments)
            with _loading_libraries():
                from twopool.router.process import run_router

            return run_router(router_config, resolve_model(router_config.model))
        case "prefill":
            prefill_config = from_namespace(PrefillConfig, arguments).with_environment(os.environ)
            prefill_folder = resolve_model(prefill_config.model)  # a wrong name should not wait for torch's import
            with _loading_libraries():
                from twopool.prefill.process import run_prefill

            return run_prefill(process_control.with_router(prefill_config, arguments), prefill_folder)
        case _:
            decode_config = from_namespace(DecodeConfig, arguments).with_environment(os.environ)
            decode_folder = resolve_model(decode_config.model)
            with _loading_libraries():
                from twopool.decode.process import run_decode

            return run_decode(process_control.with_router(decode_config, arguments), decode_folder)


@contextmanager
def _loading_libraries() -> Iterator[None]:
    """Most objects of an import stay for good: the collector would look at them again and again, now and later."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _version() -> str:
    return f"twopool {metadata.version('twopool')} (Python {platform.python_version()}, {platform.platform()})"


if __name__ == "__main__":
    sys.exit(main())
