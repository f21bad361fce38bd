"""Writes docs/configuration.md from the configuration dataclasses: ``python -m twopool.scripts.configuration_docs``."""

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from twopool.protocol.config import LinkConfig, RouterConfig, WorkerConfig
from twopool.scripts.up_plan import UpConfig

_INTRO = """\
# Configuration

Every process takes its configuration from command-line flags, once, at its start; a wrong value ends in one sentence
that names the flag. Flags spell as in `vllm serve` where vLLM has them. This file is written by
`python -m twopool.scripts.configuration_docs`; a test compares the two.

`scripts/launch_router.py`, `scripts/launch_prefill.py` and `scripts/launch_decode.py` take the flags of
`twopool router`, `twopool prefill` and `twopool decode`.
"""

_UP = """\
`twopool up` also takes the flags of the router and of the workers and hands each to every process that has it, with
these differences. `--host` and `--port` are the router's; the workers listen on loopback. The control port is a free
one unless `--control-port` is given. `--num-threads` defaults to an equal share of the CPUs. `--router`, `--worker-id`
and `--advertise-host` are refused: `up` sets them. On a `--host` that is not loopback without `--cluster-key`, it makes
a key that lives as long as the deployment.
"""

_ENVIRONMENT = """\
## Environment

| variable | read by | meaning |
|---|---|---|
| `TWOPOOL_CACHE` | every process | the model cache (default: `$XDG_CACHE_HOME/twopool`, else `~/.cache/twopool`) |
| `TWOPOOL_VENV` | `scripts/quickstart`, `test`, `check` | folder of the virtual environment (default: `.venv`) |
| `PYTHON` | `scripts/quickstart`, `test`, `check` | the Python to make it with (default: `python3`) |
"""

_SECTIONS: tuple[tuple[str, str, type, type | None], ...] = (
    ("`twopool router`", "The HTTP API and the pairing of requests with workers.\n", RouterConfig, LinkConfig),
    (
        "`twopool prefill` and `twopool decode`",
        "Both kinds of worker take the same flags; one that concerns one kind only says so.\n",
        WorkerConfig,
        LinkConfig,
    ),
    ("Every process", "How it reaches and is reached by others, and its log.\n", LinkConfig, None),
    ("`twopool up`", _UP, UpConfig, None),
)


def render() -> str:
    """The whole text of docs/configuration.md."""
    parts = [_INTRO]
    for title, text, config, base in _SECTIONS:
        rows = "\n".join(_rows(config, base))
        parts.append(f"## {title}\n\n{text}\n| flag | default | meaning |\n|---|---|---|\n{rows}\n")
    parts.append(_ENVIRONMENT)
    return "\n".join(parts)


def _rows(config: type, base: type | None) -> Iterator[str]:
    inherited = {item.name for item in dataclasses.fields(base)} if base else set()
    for item in dataclasses.fields(config):
        if item.name in inherited:
            continue
        name = item.name.replace("_", "-")
        flag = f"`--{name}`, `--no-{name}`" if isinstance(item.default, bool) else f"`--{name}`"
        choices = item.metadata["choices"]
        one_of = f" ({', '.join(f'`{choice}`' for choice in choices)})" if choices else ""
        yield f"| {flag} | {_default(item.default)} | {_escape(item.metadata['help'])}{one_of} |"


def _default(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None or value == ():
        return ""
    return f"`{','.join(value) if isinstance(value, tuple) else value}`"


def _escape(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    target = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"
    target.write_text(render(), encoding="utf-8")
    print(f"wrote {target}", file=sys.stderr)
