"""A client that leaves: every party that has something of its request drops it in less than 50 ms, in any state.

From the closing of the client's socket to the line in which a party says so; all clocks are this machine's. One that
looked now and then, instead of being told, would be late in most rounds: so several in a row have to be in time. A busy
machine gets more rounds to show them.
"""

import json
import random
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from twopool_testing.cluster import Cluster, running_cluster, wait_for
from twopool_testing.http_server import raw_request

pytestmark = pytest.mark.e2e

LIMIT_S = 0.05
IN_A_ROW = 8
MAX_ROUNDS = 60
LOGS = ("--log-level", "debug", "--log-format", "json")
WORKER_FLAGS = (
    *("--max-num-batched-tokens", "32", "--block-size", "16", "--kv-cache-memory", str(32 * 1024 * 1024)),
    *LOGS,
)
SAYS = {"router": "cancelled: ", "decode-0": "dropped", "prefill-0": "released: "}


@dataclass(frozen=True)
class State:
    """What a request is in when its client leaves: whom it is held by, and who has something of it."""

    holder: str
    holds: dict[str, float]
    num_prompt: int
    num_events: int
    parties: tuple[str, ...]
    stream: bool = True


STATES = {
    # 40 chunks of at least 10 ms.
    "prefilling": State("prefill-0", {"running": 0.01}, 1280, 0, ("router", "decode-0", "prefill-0")),
    "prefilling for a plain answer": State(
        "prefill-0", {"running": 0.01}, 1280, 0, ("router", "decode-0", "prefill-0"), stream=False
    ),
    # The first token is the prefill worker's; its KV stays pinned until the decode worker has read it.
    "transferring": State("decode-0", {"fetching": 2.0}, 100, 1, ("router", "decode-0", "prefill-0")),
    "streaming": State("decode-0", {"running": 0.01}, 100, 5, ("router", "decode-0")),
}


@pytest.fixture(scope="module")
def logging_pair(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("disconnects")
    with running_cluster(tiny_model, folder, worker_flags=WORKER_FLAGS, router_flags=LOGS) as cluster:
        yield cluster


@pytest.mark.parametrize("name", STATES)
def test_everybody_knows_at_once(logging_pair: Cluster, name: str) -> None:
    state = STATES[name]
    logging_pair.hold(state.holder, **state.holds)
    generated = logging_pair.settled_metric("twopool_worker_generated_tokens_total")
    rounds: list[dict[str, float]] = []
    num_received = 0
    while len(rounds) < IN_A_ROW or not all(max(each.values()) < LIMIT_S for each in rounds[-IN_A_ROW:]):
        assert len(rounds) < MAX_ROUNDS, rounds
        http_id = f"{name.replace(' ', '-')}-{len(rounds)}"
        left_s, num_events = ask_and_leave(logging_pair, state, http_id)
        num_received += num_events
        rounds.append({party: at_s - left_s for party, at_s in dropped(logging_pair, state, http_id).items()})
    in_vain = logging_pair.settled_metric("twopool_worker_generated_tokens_total") - generated - num_received
    assert in_vain < 10 * len(rounds), "a request goes on for nobody"
    logging_pair.hold(state.holder)
    logging_pair.assert_balanced()


def ask_and_leave(cluster: Cluster, state: State, http_id: str) -> tuple[float, int]:
    """When (``time.time()``), and with how many events received."""
    prompt = random.SystemRandom().choices(range(3, 360), k=state.num_prompt)
    body = {"prompt": prompt, "max_tokens": 400, "ignore_eos": True, "stream": state.stream}
    url = cluster.client.base_url
    received = b""
    with socket.create_connection((url.host, url.port)) as client:
        client.sendall(raw_request(body, "/v1/completions", f"x-request-id: {http_id}\r\n"))
        if not state.num_events:
            time.sleep(0.1)
        while received.count(b"\ndata: ") < state.num_events:
            part = client.recv(65536)
            assert part, received
            received += part
        return time.time(), received.count(b"\ndata: ")


def dropped(cluster: Cluster, state: State, http_id: str) -> dict[str, float]:
    """When each party said that it has nothing of the request any more."""
    stamps: dict[str, float] = {}
    request_id = ""

    def all_said() -> bool:
        nonlocal request_id
        for party in state.parties:
            for line in lines_of(cluster.folder / f"{party}.log"):
                is_it = line.get("http_id") == http_id if party == "router" else line.get("request_id") == request_id
                if is_it and str(line["message"]).startswith(SAYS[party]):
                    stamps.setdefault(party, float(str(line["time"])))
                    request_id = str(line["request_id"])
        return len(stamps) == len(state.parties)

    wait_for(all_said, 10, lambda: f"all to drop {http_id}: {stamps}")
    return stamps


def lines_of(log: Path) -> list[dict[str, object]]:
    text = log.read_text(errors="replace")
    whole = text[: text.rfind("\n") + 1]
    return [json.loads(line) for line in whole.splitlines() if line.startswith("{")]
