"""Fingerprints: of the pair that served, the same for the same kinds of workers, and of all that had a part."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from twopool.protocol.ids import WorkerId
from twopool.protocol.messages import Generate
from twopool.router.model_info import ModelInfo
from twopool.router.stack import combined
from twopool.router.timings import Grant
from twopool_testing.fake_dispatcher import FakeDispatcher, FakeRequest
from twopool_testing.http_server import MODEL, running_server
from twopool_testing.mock_control import MockCluster, MockWorker

pytestmark = pytest.mark.usefixtures("no_defects")
SIDE = {"dtype": "float32", "kernels": "torch", "tensor_parallel_size": 1}


def mixed() -> tuple[MockCluster, MockWorker, dict[WorkerId, MockWorker]]:
    """One prefill worker, two decode workers of different kinds."""
    cluster = MockCluster()
    prefill, decode = cluster.pair()
    other = cluster.worker("d1", "decode", dtype="bfloat16").register()
    other.heartbeat(prefill)
    return cluster, prefill, {decode.worker_id: decode, other.worker_id: other}


def test_the_fingerprint_is_the_pairs() -> None:
    cluster, _, _ = mixed()
    of_worker: dict[WorkerId, str] = {}
    for _ in range(4):
        [grant] = cluster.submit()[1].grants
        [fingerprint] = grant.fingerprints
        assert of_worker.setdefault(grant.decode, fingerprint) == fingerprint
    stacks = cluster.dispatcher.stacks()
    assert stacks[of_worker[WorkerId("d0")]]["decode"] == SIDE
    assert stacks[of_worker[WorkerId("d1")]]["decode"] == {**SIDE, "dtype": "bfloat16"}
    assert {stack["model_hash"] for stack in stacks.values()} == {"abc"}
    assert len(stacks) == 2
    json.dumps(stacks)


@pytest.mark.parametrize("change", [{"dtype": "float16"}, {"kernel_backend": "native"}, {"tp_size": 2}])
def test_whatever_decides_about_numbers_changes_it(change: dict[str, Any]) -> None:
    fingerprints: set[str] = set()
    for info in ({}, change, {"max_num_seqs": 4}):
        cluster = MockCluster()
        cluster.pair(**info)
        fingerprints |= cluster.submit()[1].grants[0].fingerprints
    assert len(fingerprints) == 2


def test_a_decode_worker_that_prefills_for_itself_is_both_sides() -> None:
    alone = MockCluster()
    alone.worker("d0", "decode", local_prefill=True).register().heartbeat()
    [grant] = alone.submit()[1].grants
    assert grant.prefill is None
    [stack] = alone.dispatcher.stacks().values()
    assert (stack["prefill"], stack["decode"]) == (SIDE, SIDE)
    pair = MockCluster()
    pair.pair()
    assert pair.submit()[1].grants[0].fingerprints == grant.fingerprints == pair.dispatcher.stacks().keys()


def test_without_workers_there_is_nothing_to_name() -> None:
    assert MockCluster().dispatcher.stacks() == {}


@pytest.mark.parametrize("has_tokens", [False, True])
def test_only_who_gave_tokens_has_a_part(has_tokens: bool) -> None:
    """A worker that is lost leaves its name behind if the answer goes on from its tokens, else not."""
    cluster, _, decodes = mixed()
    _, sink = cluster.submit()
    [first] = sink.grants
    lost = decodes[first.decode]
    generate = lost.take_of(Generate)[0]
    if has_tokens:
        lost.tokens(generate, 0, 2)
    lost.die()
    second = sink.grants[1]
    assert second.decode != first.decode
    assert (first.fingerprints < second.fingerprints) is has_tokens
    assert len(second.fingerprints) == 1 + has_tokens


def test_a_fingerprint_of_several() -> None:
    assert combined([]) is None
    assert combined(["fp_a", "fp_a"]) == "fp_a"
    both = combined(["fp_a", "fp_b"])
    assert both == combined(["fp_b", "fp_a", "fp_b"]) and both not in ("fp_a", "fp_b", None)


async def test_events_after_a_re_pairing_name_all_so_far(tiny_model: ModelInfo) -> None:
    token_text = tiny_model.tokenizer.table.token_text
    body = {"model": MODEL, "prompt": "a", "max_tokens": 9, "stream": True}
    async with running_server(tiny_model, FakeDispatcher()) as server:
        client = server.client
        request = client.build_request("POST", "/v1/completions", json=body)
        asking = asyncio.ensure_future(client.send(request, stream=True))
        fake = await server.dispatcher.request()
        _grant(fake, "fp_a")
        fake.send(0, [60])
        response = await asking
        lines = response.aiter_lines()
        events = [await _event(lines)]
        for token_id in (60, 60, 61, 61, 61):
            if len(events) == 3:
                fake.close_lane()
                _grant(fake, "fp_a", "fp_b", attempt=1)
            fake.send(0, [token_id])
            events.append(await _event(lines))
        assert fake.lane is not None, "a stream has its short way back after the move"
        fake.send(0, [62], "length")
        async for line in lines:
            if line.startswith("data: {"):
                events.append(json.loads(line.removeprefix("data: ")))
        await response.aclose()
    both = combined(["fp_a", "fp_b"])
    assert response.headers["x-system-fingerprint"] == "fp_a"
    said = [(event["system_fingerprint"], event["choices"][0]["text"]) for event in events]
    assert said[:6] == [("fp_a", token_text(60))] * 3 + [(both, token_text(61))] * 3
    assert {name for name, _ in said[6:]} == {both}
    assert "".join(text for _, text in said[6:]) == token_text(62)


async def test_a_plain_answer_names_all(tiny_model: ModelInfo) -> None:
    async with running_server(tiny_model, FakeDispatcher()) as server:
        asking = asyncio.ensure_future(server.complete(["a", "b"], max_tokens=9))
        fakes = [await server.dispatcher.request(number) for number in range(2)]
        _grant(fakes[0], "fp_a")
        _grant(fakes[1], "fp_b")
        _grant(fakes[1], "fp_c", attempt=1)
        for fake in fakes:
            fake.send(0, [60], "length")
        response = await asking
    assert response.json()["system_fingerprint"] == combined(["fp_a", "fp_c"])
    assert response.headers["x-system-fingerprint"] == combined(["fp_a", "fp_c"])


async def _event(lines: AsyncIterator[str]) -> Any:
    async for line in lines:
        if line:
            return json.loads(line.removeprefix("data: "))
    raise AssertionError("the stream is over")


def _grant(fake: FakeRequest, *fingerprints: str, attempt: int = 0) -> None:
    grant = Grant(
        attempt=attempt,
        decode=WorkerId(f"d{attempt}"),
        prefill=None,
        queued_s=0.0,
        retried_s=0.0,
        at_s=time.monotonic(),
        fingerprints=frozenset(fingerprints),
    )
    fake.sink.on_granted(grant)
