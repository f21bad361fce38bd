"""Requests of a serving benchmark: when each is sent, what it asks, and what came of it.

Open loop: requests leave at their times whatever becomes of those before, as users do. The client is plain asyncio and
httptools: one connection a request, no pool to wait for. Bodies are made in a thread a few seconds before they leave:
all those of a long trace would take tens of seconds and most of a gigabyte.
"""

import asyncio
import csv
import gzip
import json
import random
import ssl
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httptools
import msgspec

MOONCAKE_BLOCK = 512
"""Tokens that one entry of a Mooncake trace's ``hash_ids`` stands for."""

BUILD_AHEAD_S = 5.0
"""How long before it leaves a request's body is made."""

_TEXT = (
    "the of and to in is that for it as was with be by on not he his but at are this have from or had an they which "
    "one you were her all she there would their we him been has when who will more no if out so said what up its about "
    "into than them can only other new some time could these two may then do first any my now such like our over man"
)
_WORDS = _TEXT.split()


@dataclass(frozen=True)
class Planned:
    """One request to send ``at_s`` after the start. ``prefix_ids`` name blocks of shared text, in order."""

    at_s: float
    num_input: int
    num_output: int
    prefix_ids: tuple[int, ...] = ()
    prefix_block: int = MOONCAKE_BLOCK


@dataclass
class Outcome:
    """What became of a request; times in seconds. ``itl_s`` are the gaps between its events that carry text."""

    at_s: float
    late_s: float = 0.0
    ttft_s: float | None = None
    e2e_s: float | None = None
    itl_s: list[float] = field(default_factory=list)
    num_input: int = 0
    num_output: int = 0
    error: str | None = None

    @property
    def tpot_s(self) -> float | None:
        if self.ttft_s is None or self.e2e_s is None or self.num_output < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.num_output - 1)


def arrivals(rate: float, count: int, kind: str, seed: int) -> list[float]:
    """``count`` times at ``rate`` a second: ``constant`` or ``poisson``; ``inf`` sends all at once."""
    if rate == float("inf"):
        return [0.0] * count
    if kind == "constant":
        return [index / rate for index in range(count)]
    draw = random.Random(seed)
    times, now = [], 0.0
    for _ in range(count):
        times.append(now)
        now += draw.expovariate(rate)
    return times


def read_trace(path: Path, *, limit: int | None = None, speed: float = 1.0) -> list[Planned]:
    """A Mooncake trace (``.jsonl``) or an Azure LLM trace (``.csv``), also with ``.gz``.

    Raises ``ValueError`` naming the line.
    """
    is_packed = path.suffix == ".gz"
    read = _mooncake if (path.stem if is_packed else path.name).endswith(".jsonl") else _azure
    planned = []
    with gzip.open(path, "rt", encoding="utf-8") if is_packed else path.open(encoding="utf-8", newline="") as lines:
        for item in read(lines, path):
            planned.append(item)
            if limit is not None and len(planned) == limit:
                break
    if not planned:
        raise ValueError(f"{path}: no requests")
    start_s = min(item.at_s for item in planned)
    return [
        Planned((item.at_s - start_s) / speed, item.num_input, item.num_output, item.prefix_ids) for item in planned
    ]


def prompt_text(planned: Planned, seed: int) -> str:
    """About ``num_input`` tokens of common words, shared blocks first, then words of this request alone."""
    words: list[str] = []
    for prefix_id in planned.prefix_ids:
        words += random.Random(f"block {prefix_id}").choices(_WORDS, k=planned.prefix_block)
    words = words[: planned.num_input]
    words += random.Random(f"request {seed}").choices(_WORDS, k=max(0, planned.num_input - len(words)))
    return " ".join(words)


@dataclass(frozen=True)
class Target:
    """Where requests go. ``extra`` are further fields of every body."""

    base_url: str
    model: str
    chat: bool
    api_key: str | None
    timeout_s: float
    extra: dict[str, Any]

    @property
    def path(self) -> str:
        prefix = urlsplit(self.base_url).path.rstrip("/")
        return f"{prefix}/chat/completions" if self.chat else f"{prefix}/completions"

    def body(self, prompt: str, num_output: int) -> bytes:
        fields: dict[str, Any] = {"model": self.model, "max_tokens": num_output, "stream": True}
        fields["stream_options"] = {"include_usage": True}
        what = {"messages": [{"role": "user", "content": prompt}]} if self.chat else {"prompt": prompt}
        return json.dumps(fields | what | self.extra).encode()


async def run_load(
    target: Target, planned: list[Planned], *, seed: int, on_done: Callable[[Outcome], None]
) -> list[Outcome]:
    """Send everything at its time; returns when all have ended, in the order of ``planned``.

    The time begins when the bodies of the first ``BUILD_AHEAD_S`` are made.
    """
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(1, "bodies") as builder:

        def built(index: int) -> "asyncio.Future[bytes]":
            return loop.run_in_executor(builder, _body, target, planned[index], seed * 1_000_003 + index)

        order = sorted(range(len(planned)), key=lambda index: planned[index].at_s)
        first = {index: built(index) for index in order if planned[index].at_s < BUILD_AHEAD_S}
        await asyncio.gather(*first.values())
        start_s = time.perf_counter()
        tasks: dict[int, asyncio.Task[Outcome]] = {}
        async with asyncio.TaskGroup() as group:
            for index in order:
                item = planned[index]
                body = first.pop(index, None)
                if body is None:
                    await _sleep_until(start_s + item.at_s - BUILD_AHEAD_S)
                    body = built(index)
                tasks[index] = group.create_task(_one(target, item, body, start_s, on_done))
        return [tasks[index].result() for index in range(len(planned))]


async def _one(
    target: Target, item: Planned, body: "asyncio.Future[bytes]", start_s: float, on_done: Callable[[Outcome], None]
) -> Outcome:
    bodies = [await body]
    del body
    await _sleep_until(start_s + item.at_s)
    outcome = Outcome(item.at_s, late_s=time.perf_counter() - start_s - item.at_s)
    try:
        async with asyncio.timeout(target.timeout_s):
            await _exchange(target, bodies, outcome)
    except TimeoutError:
        outcome.error = "timeout"
    except (OSError, ValueError, httptools.HttpParserError, msgspec.DecodeError) as error:
        outcome.error = f"{type(error).__name__}: {error}"
    on_done(outcome)
    return outcome


async def _sleep_until(when_s: float) -> None:
    """``when_s`` is a ``time.perf_counter()`` stamp; returns at once when it is past."""
    left_s = when_s - time.perf_counter()
    if left_s > 0:
        await asyncio.sleep(left_s)


def _body(target: Target, item: Planned, seed: int) -> bytes:
    return target.body(prompt_text(item, seed), item.num_output)


async def _exchange(target: Target, bodies: list[bytes], outcome: Outcome) -> None:
    """Takes the one body out of ``bodies``: requests that wait for long answers need not hold theirs."""
    url = urlsplit(target.base_url)
    tls = ssl.create_default_context() if url.scheme == "https" else None
    port = url.port or (443 if tls else 80)
    key = f"authorization: Bearer {target.api_key}\r\n" if target.api_key else ""
    head = f"POST {target.path} HTTP/1.1\r\nhost: {url.netloc}\r\ncontent-type: application/json\r\n{key}"
    sent_s = time.perf_counter()
    reader, writer = await asyncio.open_connection(url.hostname, port, ssl=tls)
    try:
        body = bodies.pop()
        writer.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
        del body
        answer = _Answer(outcome, sent_s)
        parser = httptools.HttpResponseParser(answer)
        answer.parser = parser
        while not answer.is_complete:
            data = await reader.read(1 << 16)
            if not data:
                break
            parser.feed_data(data)
        answer.close()
    finally:
        writer.close()


class _Answer:
    """Callbacks of the HTTP parser, and the events of the body."""

    parser: Any

    def __init__(self, outcome: Outcome, sent_s: float) -> None:
        self.is_complete = False
        self._outcome = outcome
        self._sent_s = sent_s
        self._last_s: float | None = None
        self._rest = b""
        self._num_events = 0
        self._num_reported: int | None = None
        self._done = False

    def on_body(self, data: bytes) -> None:
        *events, self._rest = (self._rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            self._on_event(event)

    def on_message_complete(self) -> None:
        self.is_complete = True

    def close(self) -> None:
        """Settle the outcome at the end of the connection."""
        outcome, status = self._outcome, self.parser.get_status_code()
        if status != 200:
            outcome.error = f"status {status}: {self._rest[:200].decode(errors='replace')}"
        elif outcome.error is None and not (self._done or self.is_complete):
            outcome.error = "the stream was cut"
        elif outcome.error is None and not self._num_events and not self._num_reported:
            outcome.error = "an answer without a token"
        outcome.num_output = self._num_events if self._num_reported is None else self._num_reported
        if outcome.error is None:
            outcome.e2e_s = (self._last_s or time.perf_counter()) - self._sent_s

    def _on_event(self, event: bytes) -> None:
        payload = event.removeprefix(b"data:").strip()
        if payload == b"[DONE]":
            self._done = True
            return
        if not event.startswith(b"data:"):
            return
        chunk = msgspec.json.decode(payload)
        if "error" in chunk:
            self._outcome.error = str(chunk["error"])
        usage = chunk.get("usage")
        if usage:
            self._outcome.num_input = usage["prompt_tokens"]
            self._num_reported = usage["completion_tokens"]
        if any(_has_text(choice) for choice in chunk.get("choices", ())):
            now = time.perf_counter()
            self._num_events += 1
            if self._last_s is None:
                self._outcome.ttft_s = now - self._sent_s
            else:
                self._outcome.itl_s.append(now - self._last_s)
            self._last_s = now


def _has_text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    return bool(choice.get("text") or any(delta.get(k) for k in ("content", "reasoning_content", "tool_calls")))


def _mooncake(lines: Any, path: Path) -> Iterator[Planned]:
    for number, line in enumerate(lines, 1):
        try:
            item = json.loads(line)
            ids = tuple(item.get("hash_ids", ()))
            yield Planned(item["timestamp"] / 1e3, max(1, item["input_length"]), max(1, item["output_length"]), ids)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: not a Mooncake request: {error!r}") from error


def _azure(lines: Any, path: Path) -> Iterator[Planned]:
    for number, row in enumerate(csv.DictReader(lines), 2):
        try:
            # Seven digits of a second's fraction are one more than datetime reads.
            stamp = datetime.fromisoformat(row["TIMESTAMP"].strip()[:26]).timestamp()
            yield Planned(stamp, max(1, int(row["ContextTokens"])), max(1, int(row["GeneratedTokens"])))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: not an Azure request: {error!r}") from error
