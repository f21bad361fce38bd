"""``twopool up`` with fake processes: it starts, watches and stops them, and leaves none behind."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import psutil
import pytest

from twopool.scripts import up
from twopool.scripts.status import StatusView
from twopool.scripts.up_plan import UpPlan

MakePlan = Callable[..., UpPlan]


class ScreenLike(Protocol):
    view: StatusView

    @property
    def out(self) -> str: ...
    @property
    def err(self) -> str: ...


@pytest.fixture(autouse=True)
def no_process_left() -> Iterator[None]:
    yield
    assert psutil.Process().children(recursive=True) == []


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - the condition is another process's output
            await asyncio.sleep(0.01)


async def test_serves_until_sigterm_then_stops_cleanly(fake_plan: MakePlan, screen: ScreenLike) -> None:
    plan = fake_plan("--prefill=2", "--decode=1", "--model=m", "--served-model-name=a,b")
    running = asyncio.create_task(up.serve(plan, screen.view))
    await until(lambda: "curl" in screen.out)
    assert len(psutil.Process().children()) == 4
    os.kill(os.getpid(), signal.SIGTERM)
    assert await running == 0
    for name in ("router", "prefill-0", "prefill-1", "decode-0"):
        assert f"│ {name} " in screen.out
    assert "Serving a at http://127.0.0.1:" in screen.out
    assert "[router] a line that is no announcement" in screen.err
    assert "error" not in screen.err


async def test_the_router_drains_before_the_workers_are_told(fake_plan: MakePlan, screen: ScreenLike) -> None:
    plan = fake_plan(behaviour={"router": {"linger_s": 0.5}})
    running = asyncio.create_task(up.serve(plan, screen.view))
    await until(lambda: "curl" in screen.out)
    children = psutil.Process().children()
    router = next(child for child in children if "router" in child.cmdline())
    os.kill(os.getpid(), signal.SIGINT)
    await until(lambda: not router.is_running() or router.status() == psutil.STATUS_ZOMBIE)
    assert await running == 0
    assert "error" not in screen.err


@pytest.mark.parametrize(("status", "how"), [(3, "exit status 3"), (-9, "signal SIGKILL")])
async def test_a_dead_worker_is_named_and_the_rest_stopped(
    fake_plan: MakePlan, screen: ScreenLike, tmp_path: Path, status: int, how: str
) -> None:
    go = tmp_path / "go"
    decode: dict[str, Any] = {"say": ["first words", "last words"]}
    if status > 0:
        decode |= {"exit": status, "when": str(go)}
    running = asyncio.create_task(up.serve(fake_plan(behaviour={"decode-0": decode}), screen.view))
    await until(lambda: "curl" in screen.out)
    if status > 0:
        go.touch()
    else:
        next(child for child in psutil.Process().children() if "decode" in child.cmdline()).kill()
    assert await running == 1
    assert f"ended with {how}; the last it said:\n  first words\n  last words\n" in screen.err
    assert "twopool: error: decode-0 (pid" in screen.err
    assert screen.err.count("twopool: error:") == 1


@pytest.mark.parametrize("process", ["router", "prefill-0", "decode-0"])
async def test_a_failed_start_is_one_sentence(fake_plan: MakePlan, screen: ScreenLike, process: str) -> None:
    sentence = "port 8000 on 127.0.0.1 is in use"
    plan = fake_plan(behaviour={process: {"error": sentence}})
    assert await up.serve(plan, screen.view) == 1
    assert f"twopool: error: {process}: {sentence}\n" in screen.err
    assert "curl" not in screen.out


async def test_a_start_that_takes_too_long_names_the_slow(fake_plan: MakePlan, screen: ScreenLike) -> None:
    plan = fake_plan("--startup-timeout-s=1", behaviour={"prefill-0": {"silent": True}})
    assert await up.serve(plan, screen.view) == 1
    assert "twopool: error: prefill-0 not up within --startup-timeout-s 1\n" in screen.err


async def test_announced_workers_are_not_yet_ready(fake_plan: MakePlan, screen: ScreenLike) -> None:
    plan = fake_plan("--startup-timeout-s=1", behaviour={"router": {"not_ready": True}})
    assert await up.serve(plan, screen.view) == 1
    assert "twopool: error: the router not ready within --startup-timeout-s 1\n" in screen.err
    assert "curl" not in screen.out


async def test_who_ignores_sigterm_is_killed_after_the_limit(
    fake_plan: MakePlan, screen: ScreenLike, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(up, "_DRAIN_GRACE_S", 0.1)
    plan = fake_plan("--drain-timeout-s=0.1", behaviour={"decode-0": {"stubborn": True}})
    running = asyncio.create_task(up.serve(plan, screen.view))
    await until(lambda: "curl" in screen.out)
    os.kill(os.getpid(), signal.SIGTERM)
    assert await running == 1
    assert "twopool: error: decode-0 did not stop within 0.2 s and was killed\n" in screen.err


async def test_a_second_signal_kills_at_once(fake_plan: MakePlan, screen: ScreenLike) -> None:
    stubborn = {name: {"stubborn": True} for name in ("router", "prefill-0", "decode-0")}
    plan = fake_plan("--drain-timeout-s=1000", behaviour=stubborn)
    running = asyncio.create_task(up.serve(plan, screen.view))
    await until(lambda: "curl" in screen.out)
    os.kill(os.getpid(), signal.SIGINT)
    await until(lambda: "draining" in screen.out)
    os.kill(os.getpid(), signal.SIGINT)
    assert await running == 1
    for name in stubborn:
        assert f"twopool: error: {name} was killed: a second signal asked for haste\n" in screen.err
    assert "did not stop within" not in screen.err


async def test_a_signal_while_it_starts_stops_it(fake_plan: MakePlan, screen: ScreenLike) -> None:
    plan = fake_plan(behaviour={"decode-0": {"silent": True}})
    running = asyncio.create_task(up.serve(plan, screen.view))
    await until(lambda: "prefill-0 ready" in screen.out)
    os.kill(os.getpid(), signal.SIGTERM)
    assert await running == 0


async def test_handlers_are_gone_afterwards(fake_plan: MakePlan, screen: ScreenLike) -> None:
    before = signal.getsignal(signal.SIGTERM)
    assert await up.serve(fake_plan(behaviour={"router": {"error": "no"}}), screen.view) == 1
    assert signal.getsignal(signal.SIGTERM) == before


async def test_the_children_of_a_killed_supervisor_die() -> None:
    behaviour = {name: {"stubborn": True} for name in ("router", "prefill-0", "decode-0")}
    script = f"""if True:
        import argparse, asyncio, json, sys
        from twopool.scripts import up, up_plan
        from twopool.scripts.status import StatusView
        parser = argparse.ArgumentParser(conflict_handler="resolve")
        up_plan.add_flags(parser)
        launcher = (sys.executable, "-P", {str(Path(__file__).with_name("fake_role.py"))!r}, {json.dumps(behaviour)!r})
        plan = up_plan.make_plan(parser.parse_args(["--port=0"]), cluster_key=None, launcher=launcher)
        asyncio.run(up.serve(plan, StatusView(log_format="text")))
    """
    supervisor = subprocess.Popen([sys.executable, "-P", "-u", "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert supervisor.stdout is not None
        for line in supervisor.stdout:
            if line.startswith("curl"):
                break
        children = psutil.Process(supervisor.pid).children()
        assert len(children) == 3
        supervisor.kill()
        _, alive = psutil.wait_procs(children, timeout=10)
        assert alive == []
    finally:
        supervisor.kill()
        supervisor.communicate()


def test_a_missing_model_is_reported_before_anything_starts(
    parse_up: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from twopool.scripts.cli import main

    monkeypatch.setattr(up, "serve", None)  # would fail if it were called
    assert main(["up", "--model=/nonexistent/model"]) == 1
    assert capsys.readouterr().err.startswith("twopool: error: ")
    assert main(["up", "--decode=0"]) == 2
    assert capsys.readouterr().err == "twopool: error: --decode 0: at least one decode worker is needed\n"
