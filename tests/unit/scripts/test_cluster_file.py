"""``twopool up -f``: what the file says reaches the children, and what is wrong in it is named."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from twopool.protocol.config import DecodeConfig, PrefillConfig, RouterConfig, WorkerConfig, from_namespace
from twopool.protocol.errors import ConfigError
from twopool.scripts import cli
from twopool.scripts.child import ChildSpec
from twopool.scripts.up_plan import UpPlan, make_plan

EXAMPLE = Path(__file__).parents[3] / "docs" / "cluster.example.yaml"
PlanOf = Callable[..., UpPlan]


@pytest.fixture
def plan_of(parse_up: Callable[..., Any], tmp_path: Path) -> PlanOf:
    """``plan_of(text, flags...)``."""

    def plan(text: str, *argv: str) -> UpPlan:
        path = tmp_path / "cluster.yaml"
        path.write_text(text)
        return make_plan(parse_up("-f", str(path), *argv), cluster_key=None, launcher=("twopool",), cpus=range(8))

    return plan


def read_back(spec: ChildSpec, config: type[Any]) -> tuple[Any, Any]:
    arguments = cli.build_parser().parse_args(spec.argv[1:])
    return from_namespace(config, arguments), arguments


def workers(plan: UpPlan) -> list[tuple[WorkerConfig, Any]]:
    kinds = {"prefill": PrefillConfig, "decode": DecodeConfig}
    return [read_back(plan.worker_spec(worker), kinds[worker.role]) for worker in plan.workers]


def test_the_example(plan_of: PlanOf) -> None:
    made = plan_of(EXAMPLE.read_text())
    router, _ = read_back(made.router_spec, RouterConfig)
    assert (router.port, router.model, router.min_prefill, router.min_decode) == (8000, "smollm2-135m-instruct", 2, 1)
    (first, first_process), (second, second_process), (decode, decode_process) = workers(made)
    assert [one.worker_id for one in (first, second, decode)] == ["prefill-0", "prefill-1", "decode-0"]
    for prefill in (first, second):
        assert (prefill.tensor_parallel_size, prefill.block_size, prefill.dtype) == (2, 32, "bfloat16")
        assert (prefill.max_num_batched_tokens, prefill.kv_layer_groups, prefill.num_threads) == (1024, 2, 1)
    assert (decode.tensor_parallel_size, decode.block_size, decode.max_num_seqs) == (1, 16, 32)
    assert decode.kv_cache_memory == 512 * 1024**2
    assert [process.cpus for process in (first_process, second_process, decode_process)] == [{0, 1}, {2, 3}, {4}]


def test_the_command_line_counts(plan_of: PlanOf) -> None:
    made = plan_of(
        "workers: {dtype: float32, device: cpu}\npools: [{role: decode, count: 2}]", "--dtype=float16", "--port=9"
    )
    assert read_back(made.router_spec, RouterConfig)[0].port == 9
    assert [(config.dtype, config.device) for config, _ in workers(made)] == [("float16", "cpu")] * 2
    assert read_back(made.router_spec, RouterConfig)[0].min_prefill == 0


def test_values_of_every_kind(plan_of: PlanOf) -> None:
    text = """
router: {served-model-name: [a, b], max_queue_wait_s: 1.5}
workers: {enable-prefix-caching: false, gpu_memory_utilization: 0.5, local_prefill: true, ucx-tls: tcp}
pools: [{role: decode, device: cpu, flags: {ucx: ['UCX_NET_DEVICES=a,b', UCX_IB_SL=3]}}]
"""
    made = plan_of(text)
    router, _ = read_back(made.router_spec, RouterConfig)
    assert (router.served_model_name, router.max_queue_wait_s) == (("a", "b"), 1.5)
    ((config, _),) = workers(made)
    assert (config.enable_prefix_caching, config.local_prefill, config.ucx_tls) == (False, True, "tcp")
    assert config.ucx == ("UCX_NET_DEVICES=a,b", "UCX_IB_SL=3")


def test_ranks_take_gpus_in_turn(plan_of: PlanOf) -> None:
    """And the CPUs are for those who compute on them."""
    text = "pools: [{role: prefill, count: 2, tp: 2, device: 'cuda:1'}, {role: decode, tp: 2, device: cpu}]"
    made = plan_of(text)
    assert [(config.device, process.cpus) for config, process in workers(made)] == [
        ("cuda:1", None),
        ("cuda:3", None),
        ("cpu", {0, 1, 2, 3, 4, 5, 6, 7}),
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("pools: [", "cluster.yaml: "),
        ("[]", "Expected `object`, got `array`"),
        ("router: {}", "missing required field `pools`"),
        ("pools: []", "pools: Expected `array` of length >= 1"),
        ("pools: [{role: decode}, {role: chef}]", "pools[1].role: Invalid enum value 'chef'"),
        ("pools: [{role: decode, tp: 0}]", "pools[0].tp: Expected `int` >= 1"),
        ("pools: [{role: decode, tp: two}]", "pools[0].tp: Expected `int`, got `str`"),
        ("pools: [{role: decode, number: 2}]", "pools[0]: Object contains unknown field `number`"),
        ("pools: [{role: decode, flags: {tensor-parallel-size: 2}}]", "say `tp` beside `role`"),
        ("pools: [{role: decode, flags: {block_size: 2}}]", "say `block_size` beside `role`"),
        ("pools: [{role: decode, flags: {no_such: 2}}]", "pools[0].flags.no_such: there is no such flag"),
        ("pools: [{role: decode, flags: {max_num_seqs: many}}]", "pools[0].flags.max_num_seqs: "),
        ("pools: [{role: decode, flags: {max_num_seqs: true}}]", "pools[0].flags.max_num_seqs: expected a value"),
        ("pools: [{role: decode, flags: {local_prefill: 1}}]", "flags.local_prefill: expected true or false, got 1"),
        ("workers: {port: x}\npools: [{role: decode}]", "workers.port: "),
        ("router: {no-cors: 1}\npools: [{role: decode}]", "router.no-cors: there is no such flag"),
        ("pools: [{role: decode, block_size: 7}]", "--block-size 7: "),
        ("pools: [{role: prefill}]", "at least one pool of decode workers"),
        ("pools: [{role: decode, flags: {worker_id: me}}]", "pools[0].flags.worker_id: `twopool up` names"),
        ("workers: {router: 'h:1'}\npools: [{role: decode}]", "workers.router: the workers that"),
        ("pools: [{role: decode, flags: {nnodes: 2}}]", "say `nnodes` beside `role`"),
        ("pools: [{role: decode, flags: {node_rank: 1}}]", "node_rank: `twopool up` starts node 0"),
        ("workers: {nnodes: 2}\npools: [{role: decode}]", "workers.nnodes: a worker on several hosts is a pool"),
        ("pools: [{role: decode, nnodes: 2}]", "--nnodes 2: every node has at least one rank"),
        ("pools: [{role: decode, tp: 2, nnodes: 2, count: 2}]", "pools[0].count 2: a worker of 2 nodes"),
        ("pools: [{role: decode, tp: 2, nnodes: 2, master_addr: 10.0.0.1}]", "--master-addr 10.0.0.1"),
        ("a: &a [1]\npools: !!python/object/apply:os.system ['true']", "could not determine a constructor"),
    ],
)
def test_what_is_wrong_is_named(plan_of: PlanOf, text: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        plan_of(text)
    assert words.lower() in refused.value.message.lower()


def test_the_first_node_of_a_worker_on_two_hosts(plan_of: PlanOf) -> None:
    """It has two of three ranks, and as much of this machine."""
    made = plan_of(
        "pools: [{role: decode, device: cpu, tp: 3, nnodes: 2, master_port: 29511}, {role: prefill, device: cpu}]"
    )
    (decode, process), (_, other) = workers(made)
    assert (decode.nnodes, decode.node_rank, decode.master_addr, decode.master_port) == (2, 0, "127.0.0.1", 29511)
    assert (decode.local_ranks, decode.num_threads) == (range(2), 2)
    assert (process.cpus, other.cpus) == ({0, 1, 2, 3}, {4, 5})


def test_other_nodes_cannot_have_a_key_made_here(parse_up: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("pools: [{role: decode, tp: 2, nnodes: 2}]")
    with pytest.raises(ConfigError, match="needs a --cluster-key that its other nodes have"):
        make_plan(parse_up("-f", str(path)), cluster_key=tmp_path / "new.key")


@pytest.mark.parametrize("flag", ["--prefill=2", "--decode=2", "--prefill-tp=2", "--decode-tp=1"])
def test_counts_come_from_one_place(plan_of: PlanOf, flag: str) -> None:
    with pytest.raises(ConfigError, match="with --file, the pools say that"):
        plan_of("pools: [{role: decode}]", flag)


def test_a_file_that_is_not_there(parse_up: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        make_plan(parse_up(f"--file={tmp_path / 'none.yaml'}"), cluster_key=None)
