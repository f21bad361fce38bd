"""Waiting for what callbacks bring about."""

import asyncio
from collections.abc import Callable


async def until(condition: Callable[[], object], timeout_s: float = 5.0) -> None:
    """Let the loop run until ``condition`` holds; raises ``TimeoutError`` after ``timeout_s``."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - what is waited for is plain state that callbacks change
            await asyncio.sleep(0.005)
