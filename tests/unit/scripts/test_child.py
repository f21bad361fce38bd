"""A child's output and its end, in the words a user sees."""

import sys

import pytest

from twopool.protocol.processes import describe_exit
from twopool.scripts.child import Child, ChildExitedError, ChildSpec, Listening, Ready


async def run(script: str) -> tuple[Child, list[str]]:
    lines: list[str] = []
    spec = ChildSpec(name="decode-0", argv=(sys.executable, "-P", "-c", script))
    child = await Child.start(spec, lambda _, line: lines.append(line))
    await child.exited()
    return child, lines


async def test_announcements_are_typed_and_the_rest_is_log() -> None:
    child, lines = await run(
        """if True:
        print("hello")
        print('{"event": "other"}')
        print("{no json")
        print('{"event":"listening","role":"router","http":"http://127.0.0.1:80","control":"127.0.0.1:81"}')
        print('{"event":"ready","role":"decode","worker_id":"decode-1","peer_address":"tcp://127.0.0.1:1"}')
        """
    )
    assert await child.up() == Listening(role="router", http="http://127.0.0.1:80", control="127.0.0.1:81")
    assert lines[:3] == ["hello", '{"event": "other"}', "{no json"]
    assert len(lines) == 4  # a second announcement is no announcement


async def test_fields_of_later_versions_are_no_obstacle() -> None:
    child, _ = await run(
        """print('{"event":"ready","role":"decode","worker_id":"d","peer_address":"tcp://h:1","new":[1]}')"""
    )
    assert await child.up() == Ready(role="decode", worker_id="d", peer_address="tcp://h:1")


async def test_output_of_any_shape_is_read() -> None:
    child, lines = await run(
        r"""if True:
        import sys
        err = sys.stderr.buffer
        err.write(b"x" * 1_000_000 + b"\n")
        err.write(b"  1 %\r 50 %\r100 %\n")
        err.write(b"\xff\xfe\r\n\n")
        err.write(b"no newline at the end")
        """
    )
    assert "".join(lines).startswith("x" * 1_000_000)
    assert max(map(len, lines)) <= 16 * 1024
    assert lines[-4:] == ["100 %", "\ufffd\ufffd", "", "no newline at the end"]
    assert child.returncode == 0


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("import sys; sys.exit('twopool: error: no such model')", "decode-0: no such model"),
        ("import sys; sys.exit('twopool: error: no such model\\nlibrary: leak')", "decode-0: no such model"),
        ("import sys; sys.exit('no such thing')", "ended with exit status 1; the last it said:\n  no such thing"),
        ("import sys; sys.exit(7)", "ended with exit status 7 without a word"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "ended with signal SIGSEGV without a word"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
    ],
)
async def test_a_death_is_told_in_words(script: str, words: str) -> None:
    child, _ = await run(script)
    with pytest.raises(ChildExitedError) as caught:
        await child.up()
    assert words in caught.value.message
    with pytest.raises(ChildExitedError, match="decode-0"):
        await child.watch()


async def test_only_the_tail_of_a_long_log_is_told() -> None:
    child, lines = await run("for i in range(1000): print('line', i)")
    assert len(lines) == 1000
    message = child.death().message
    assert "line 999" in message and "line 979" not in message


async def test_what_a_child_leaves_running_does_not_hold_its_end_up() -> None:
    child, _ = await run(
        """if True:
        import subprocess, sys
        code = "import time; time.sleep(2)"
        subprocess.Popen([sys.executable, "-c", code])
        """
    )
    assert child.returncode == 0


async def test_a_program_that_does_not_exist() -> None:
    with pytest.raises(ChildExitedError, match="decode-0 cannot be started: No such file"):
        await Child.start(ChildSpec(name="decode-0", argv=("/nonexistent",)), lambda *_: None)


@pytest.mark.parametrize(
    ("returncode", "words"),
    [(0, "exit status 0"), (2, "exit status 2"), (-15, "signal SIGTERM"), (-40, "signal 40"), (None, "no exit status")],
)
def test_describe_exit(returncode: int | None, words: str) -> None:
    assert describe_exit(returncode) == words
