"""Deployments of fake processes."""

import argparse
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from twopool.scripts import up_plan
from twopool.scripts.status import StatusView

FAKE_ROLE = Path(__file__).with_name("fake_role.py")


class Screen:
    """A status view whose output can be read."""

    def __init__(self, log_format: str = "text") -> None:
        self._stdout, self._stderr = io.StringIO(), io.StringIO()
        self.view = StatusView(log_format=log_format, stdout=self._stdout, stderr=self._stderr)

    @property
    def out(self) -> str:
        return self._stdout.getvalue()

    @property
    def err(self) -> str:
        return self._stderr.getvalue()


@pytest.fixture
def screen() -> Screen:
    return Screen()


@pytest.fixture
def parse_up() -> Callable[..., argparse.Namespace]:
    def parse(*argv: str) -> argparse.Namespace:
        parser = argparse.ArgumentParser(conflict_handler="resolve")
        up_plan.add_flags(parser)
        return parser.parse_args(argv)

    return parse


@pytest.fixture
def fake_plan(parse_up: Callable[..., argparse.Namespace]) -> Callable[..., up_plan.UpPlan]:
    """``fake_plan(flags..., behaviour={...})``: a plan whose processes are ``fake_role.py``."""

    def plan(*argv: str, behaviour: dict[str, Any] | None = None) -> up_plan.UpPlan:
        launcher = (sys.executable, "-P", str(FAKE_ROLE), json.dumps(behaviour or {}))
        return up_plan.make_plan(parse_up("--port=0", *argv), cluster_key=None, launcher=launcher)

    return plan
