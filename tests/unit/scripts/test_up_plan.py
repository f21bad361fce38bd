"""The command lines of ``twopool up``'s children, read back by the parsers that will read them."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from twopool.protocol import config as protocol_config
from twopool.protocol.config import DecodeConfig, PrefillConfig, RouterConfig, from_namespace
from twopool.protocol.errors import ConfigError
from twopool.scripts import cli
from twopool.scripts.child import ChildSpec
from twopool.scripts.up_plan import UpPlan, make_plan, reachable, router_line

ParseUp = Callable[..., argparse.Namespace]


@pytest.fixture
def plan(parse_up: ParseUp) -> Callable[..., UpPlan]:
    def make(*argv: str, cpus: tuple[int, ...] = (0, 1), key: Path | None = None) -> UpPlan:
        return make_plan(parse_up(*argv), cluster_key=key, launcher=("twopool",), cpus=cpus)

    return make


def read_back(spec: ChildSpec, config: type[Any]) -> tuple[Any, argparse.Namespace]:
    """What the child's own parser makes of its command line."""
    assert spec.argv[0] == "twopool"
    arguments = cli.build_parser().parse_args(spec.argv[1:])
    return from_namespace(config, arguments), arguments


def workers(plan: UpPlan) -> list[tuple[Any, argparse.Namespace]]:
    kinds = {"prefill": PrefillConfig, "decode": DecodeConfig}
    return [read_back(plan.worker_spec(worker), kinds[worker.role]) for worker in plan.workers]


def test_defaults(plan: Callable[..., UpPlan]) -> None:
    made = plan("--device=cpu")
    router, _ = read_back(made.router_spec, RouterConfig)
    assert router == RouterConfig(control_port=0)
    (prefill, prefill_process), (decode, decode_process) = workers(made)
    assert prefill == PrefillConfig(device="cpu", worker_id="prefill-0", num_threads=1)
    assert decode == DecodeConfig(device="cpu", worker_id="decode-0", num_threads=1)
    assert (prefill_process.cpus, decode_process.cpus) == ({0}, {1})
    assert prefill_process.die_with_parent is not None


def test_shared_flags_go_to_all_and_addresses_to_the_router(plan: Callable[..., UpPlan], tmp_path: Path) -> None:
    made = plan(
        *("--host=127.0.0.2", "--port=9000", "--control-port=9001", "--model=some/model", "--served-model-name=a,b"),
        *("--dtype=float32", "--no-enable-prefix-caching", "--max-model-len=100", "--drain-timeout-s=1.5"),
        *("--fault-points=faults", "--ucx-tls=^shm", f"--api-key-file={tmp_path}", "--log-format=json"),
        *("--ucx=UCX_NET_DEVICES=a:1,b:1", "--ucx", "UCX_IB_SL=3"),
        "--kv-cache-memory=1000000",
    )
    router, _ = read_back(made.router_spec, RouterConfig)
    assert router == RouterConfig(
        host="127.0.0.2",
        port=9000,
        control_port=9001,
        model="some/model",
        served_model_name=("a", "b"),
        max_model_len=100,
        drain_timeout_s=1.5,
        api_key_file=tmp_path,
        log_format="json",
    )
    for config, _ in workers(made):
        assert (config.host, config.port, config.model, config.dtype) == ("127.0.0.1", 0, "some/model", "float32")
        assert (config.max_model_len, config.enable_prefix_caching, config.ucx_tls) == (100, False, "^shm")
        assert config.ucx_settings == {"UCX_NET_DEVICES": "a:1,b:1", "UCX_IB_SL": "3", "UCX_TLS": "^shm"}
        assert config.fault_points == Path("faults")
        assert (config.log_format, config.kv_cache_memory, config.drain_timeout_s) == ("json", 1000000, 1.5)


def test_every_flag_of_router_and_workers_passes_through(parse_up: ParseUp) -> None:
    known = vars(parse_up())  # defaults stay out
    assert known == {}
    parser = argparse.ArgumentParser(conflict_handler="resolve")
    protocol_config.add_flags(parser, RouterConfig)
    protocol_config.add_flags(parser, DecodeConfig)
    for action in parser._actions[1:]:
        value = [] if action.nargs == 0 else ["auto" if action.choices and "auto" in action.choices else "1"]
        if action.choices and value == ["1"]:
            value = [next(iter(action.choices))]
        assert action.dest in vars(parse_up(action.option_strings[0], *value))


def test_workers_counts_and_shares(plan: Callable[..., UpPlan]) -> None:
    made = plan("--prefill=2", "--decode=1", "--device=cpu", cpus=(4, 5, 6, 7, 8, 9, 10))
    assert [worker.name for worker in made.workers] == ["prefill-0", "prefill-1", "decode-0"]
    assert [(process.cpus, config.num_threads) for config, process in workers(made)] == [
        ({4, 5}, 2),
        ({6, 7}, 2),
        ({8, 9}, 2),
    ]


def test_degrees_of_each_side(plan: Callable[..., UpPlan]) -> None:
    made = plan("--prefill=2", "--decode=1", "--prefill-tp=2", "--device=cpu", cpus=tuple(range(10)))
    assert [(config.tensor_parallel_size, config.num_threads, process.cpus) for config, process in workers(made)] == [
        (2, 2, {0, 1, 2, 3}),
        (2, 2, {4, 5, 6, 7}),
        (1, 2, {8, 9}),
    ]
    made = plan("--tensor-parallel-size=3", "--decode-tp=1", "--device=cpu")
    assert [config.tensor_parallel_size for config, _ in workers(made)] == [3, 1]


def test_aggregated(plan: Callable[..., UpPlan]) -> None:
    ((config, process),) = workers(plan("--prefill=0", "--device=cpu"))
    assert config.worker_id == "decode-0"
    assert (config.num_threads, process.cpus) == (2, {0, 1})


def test_threads_of_the_user_win_and_pinning_can_be_off(plan: Callable[..., UpPlan]) -> None:
    for config, process in workers(plan("--num-threads=3", "--no-pin", "--device=cpu")):
        assert (config.num_threads, process.cpus) == (3, None)
    for config, process in workers(plan("--device=cuda")):
        assert (config.num_threads, process.cpus) == (0, None)


def test_a_key_reaches_every_process(plan: Callable[..., UpPlan], tmp_path: Path) -> None:
    key = tmp_path / "key"
    made = plan("--host=0.0.0.0", key=key)
    assert read_back(made.router_spec, RouterConfig)[0].cluster_key == key
    assert {config.cluster_key for config, _ in workers(made)} == {key}


def test_a_worker_is_told_an_address_that_it_can_reach() -> None:
    assert router_line("0.0.0.0:7,127.0.0.1:8") == "127.0.0.1:7,127.0.0.1:8"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--router=h:1",), "--router h:1: the workers that `twopool up` starts use its own router"),
        (("--worker-id=me",), "--worker-id me: "),
        (("--advertise-host=h",), "--advertise-host h: "),
        (("--nnodes=2",), "--nnodes 2: a worker on several hosts is a pool"),
        (("--node-rank=1",), "--node-rank 1: `twopool up` starts node 0"),
        (("--prefill=-1",), "--prefill -1: "),
        (("--decode=0",), "--decode 0: "),
        (("--decode-tp=0",), "--decode-tp 0: "),
        (("--startup-timeout-s=0",), "--startup-timeout-s 0"),
        (("--host=0.0.0.0",), "--host 0.0.0.0: "),
        (("--port=70000",), "--port 70000: "),
        (("--block-size=7",), "--block-size 7: "),
    ],
)
def test_wrong_flags_name_themselves(plan: Callable[..., UpPlan], argv: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(*argv)
    assert caught.value.message.startswith(words)


@pytest.mark.parametrize(
    ("address", "expected"),
    [("0.0.0.0:1", "127.0.0.1:1"), ("[::]:1", "[::1]:1"), ("10.0.0.5:1", "10.0.0.5:1"), ("[::1]:8", "[::1]:8")],
)
def test_reachable(address: str, expected: str) -> None:
    assert reachable(address) == expected
