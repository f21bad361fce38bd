"""One step after another on a thread: results, errors, and steps that follow without being asked for."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any, cast

import pytest

from twopool.engine.step import FollowUp, StepPlan, StepResult, ThreadExecutor


class Computer:
    """Plans are numbers; the result of one is the number itself. Each waits to be let go."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.allowed = threading.Semaphore(0)

    def __call__(self, plan: StepPlan) -> StepResult:
        number = cast(int, plan)
        self.begun.append(number)
        assert self.allowed.acquire(timeout=10)
        if number < 0:
            raise RuntimeError(f"no {number}")
        return cast(StepResult, number)


@pytest.fixture
def computer() -> Computer:
    return Computer()


@pytest.fixture
def executor(computer: Computer) -> Iterator[ThreadExecutor]:
    made = ThreadExecutor(computer)
    yield made
    computer.allowed.release(100)
    made.close()


def plan(number: int) -> StepPlan:
    return cast(StepPlan, number)


def follow_up(number: int | None) -> FollowUp:
    return FollowUp(lambda _: None if number is None else plan(number))


async def result_of(awaitable: Any) -> int:
    return cast(int, await asyncio.wait_for(awaitable, 10))


async def test_what_follows_starts_before_anybody_hears_of_the_step_before(
    executor: ThreadExecutor, computer: Computer
) -> None:
    first, second = follow_up(2), follow_up(3)
    computing = executor.execute(plan(1))
    executor.follow(first)
    computer.allowed.release()
    assert await result_of(computing) == 1
    assert first.started is not None
    assert first.started[0] == plan(2)
    executor.follow(second)
    computer.allowed.release(2)
    assert await result_of(first.started[1]) == 2
    assert second.started is not None
    assert await result_of(second.started[1]) == 3
    assert computer.begun == [1, 2, 3]


async def test_nothing_follows_where_no_plan_is_made(executor: ThreadExecutor, computer: Computer) -> None:
    nothing = follow_up(None)
    computing = executor.execute(plan(1))
    executor.follow(nothing)
    computer.allowed.release(2)
    assert await result_of(computing) == 1
    assert nothing.started is None
    assert await result_of(executor.execute(plan(5))) == 5
    assert computer.begun == [1, 5]


async def test_what_comes_after_the_step_is_too_late(executor: ThreadExecutor, computer: Computer) -> None:
    late = follow_up(2)
    computer.allowed.release(2)
    assert await result_of(executor.execute(plan(1))) == 1
    executor.follow(late)
    assert await result_of(executor.execute(plan(5))) == 5
    assert late.started is None
    assert computer.begun == [1, 5]


async def test_nothing_follows_a_step_that_failed(executor: ThreadExecutor, computer: Computer) -> None:
    after = follow_up(2)
    computing = executor.execute(plan(-1))
    executor.follow(after)
    computer.allowed.release(2)
    with pytest.raises(RuntimeError, match="no -1"):
        await result_of(computing)
    assert after.started is None
    assert await result_of(executor.execute(plan(5))) == 5


async def test_a_step_whose_successor_cannot_be_planned_fails(executor: ThreadExecutor, computer: Computer) -> None:
    def make(_: StepResult) -> StepPlan | None:
        raise KeyError("on purpose")

    computing = executor.execute(plan(1))
    executor.follow(FollowUp(make))
    computer.allowed.release(2)
    with pytest.raises(KeyError):
        await result_of(computing)
    assert await result_of(executor.execute(plan(5))) == 5


async def test_closing_waits_for_what_follows(executor: ThreadExecutor, computer: Computer) -> None:
    after = follow_up(2)
    executor.execute(plan(1))
    executor.follow(after)
    computer.allowed.release(2)
    executor.close()
    assert computer.begun == [1, 2]
    executor.close()
