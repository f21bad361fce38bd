"""Configuration: flags, validation, addresses."""

import argparse
import dataclasses
from pathlib import Path

import pytest

from twopool.protocol.config import DecodeConfig, RouterConfig, WorkerConfig, add_flags, from_namespace
from twopool.protocol.endpoints import bracketed, is_loopback, parse_tcp_address, tcp_address
from twopool.protocol.errors import ConfigError


def parse(config: type, *args: str) -> WorkerConfig | RouterConfig:
    parser = argparse.ArgumentParser()
    add_flags(parser, config)
    result: object = from_namespace(config, parser.parse_args(args))
    assert isinstance(result, WorkerConfig | RouterConfig)
    return result


@pytest.mark.parametrize("config", [RouterConfig, DecodeConfig])
def test_defaults_are_valid_and_every_field_is_a_flag(config: type) -> None:
    assert parse(config) == config()
    help_text = argparse.ArgumentParser()
    add_flags(help_text, config)
    for item in dataclasses.fields(config):
        assert "--" + item.name.replace("_", "-") in help_text.format_help()


def test_flags_are_read() -> None:
    config = parse(
        DecodeConfig,
        *("--model", "m", "--router", "127.0.0.1:1,[::1]:2", "--block-size", "32"),
        *("--no-enable-prefix-caching", "--fault-points", "file"),
    )
    assert isinstance(config, WorkerConfig)
    assert config.router == ("127.0.0.1:1", "[::1]:2")
    assert (config.block_size, config.enable_prefix_caching) == (32, False)
    assert config.fault_points == Path("file")


def test_settings_of_ucx() -> None:
    config = parse(DecodeConfig, "--ucx", "UCX_NET_DEVICES=mlx5_0:1,mlx5_1:1", "--ucx=UCX_IB_SL=3", "--ucx-tls", "rc")
    assert isinstance(config, WorkerConfig)
    assert config.ucx_settings == {"UCX_NET_DEVICES": "mlx5_0:1,mlx5_1:1", "UCX_IB_SL": "3", "UCX_TLS": "rc"}


@pytest.mark.parametrize(
    ("args", "environ", "maps"),
    [
        ((), {}, True),
        (("--ucx", "UCX_IB_SL=3"), {}, True),
        (("--ucx-tls", "tcp"), {}, False),
        (("--ucx", "UCX_TLS=tcp"), {}, False),
        ((), {"UCX_TLS": "tcp"}, False),
        (("--nixl-backend", "LIBFABRIC"), {}, False),
        (("--kv-same-host", "nixl"), {}, False),
    ],
)
def test_whoever_names_what_is_underneath_gets_it(args: tuple[str, ...], environ: dict[str, str], maps: bool) -> None:
    config = parse(DecodeConfig, *args)
    assert isinstance(config, WorkerConfig)
    assert config.with_environment(environ).maps_same_host == maps


@pytest.mark.parametrize("args", [("--ucx-tls", "rc"), ("--ucx", "UCX_TLS=rc")])
def test_flags_say_more_than_the_environment(args: tuple[str, ...]) -> None:
    config = parse(DecodeConfig, *args)
    assert isinstance(config, WorkerConfig)
    assert config.with_environment({"UCX_TLS": "tcp"}).ucx_settings == {"UCX_TLS": "rc"}


TWO_NODES = ("--tensor-parallel-size", "2", "--nnodes", "2")


@pytest.mark.parametrize(
    ("args", "flag", "value"),
    [
        (("--block-size", "24"), "--block-size", "24"),
        (("--block-size", "8"), "--block-size", "8"),
        (("--port", "70000"), "--port", "70000"),
        (("--ucx", "UCX_IB_SL"), "--ucx", "UCX_IB_SL"),
        (("--ucx", "UCX_IB_SL="), "--ucx", "UCX_IB_SL="),
        (("--ucx", "LD_PRELOAD=x"), "--ucx", "LD_PRELOAD=x"),
        (("--ucx", "UCX_IB_SL=1", "--ucx", "UCX_IB_SL=1"), "--ucx", "UCX_IB_SL"),
        (("--ucx", "UCX_TLS=rc", "--ucx-tls", "tcp"), "--ucx", "tcp"),
        (("--max-num-seqs", "0"), "--max-num-seqs", "0"),
        (("--kv-cache-memory", "-1"), "--kv-cache-memory", "-1"),
        (("--packed-weights-bytes", "-1"), "--packed-weights-bytes", "-1"),
        (("--gpu-memory-utilization", "1.5"), "--gpu-memory-utilization", "1.5"),
        (("--router", "nohost"), "--router", "nohost"),
        (("--router", "::1:5555"), "--router", "::1:5555"),
        (("--router", ""), "--router", ""),
        (("--host", "0.0.0.0"), "--host", "0.0.0.0"),
        (("--router", "10.0.0.1:80"), "--router", "10.0.0.1"),
        (("--num-threads", "-1"), "--num-threads", "-1"),
        (("--tensor-parallel-size", "0"), "--tensor-parallel-size", "0"),
        (("--nnodes", "2"), "--nnodes", "2"),
        (("--tensor-parallel-size", "4", "--nnodes", "5"), "--tensor-parallel-size 4", "--nnodes 5"),
        (("--nnodes", "0"), "--nnodes", "0"),
        (("--node-rank", "1"), "--node-rank 1", "--nnodes 1"),
        ((*TWO_NODES, "--node-rank", "2"), "--node-rank 2", "between 0 and 1"),
        ((*TWO_NODES, "--node-rank", "-1"), "--node-rank", "-1"),
        ((*TWO_NODES, "--master-addr", "10.0.0.1"), "--master-addr 10.0.0.1", "--cluster-key"),
        ((*TWO_NODES, "--master-port", "0"), "--master-port", "0"),
        ((*TWO_NODES, "--master-port", "65536"), "--master-port", "65536"),
        ((*TWO_NODES, "--node-timeout-s", "0"), "--node-timeout-s", "0"),
        ((*TWO_NODES, "--kernel-backend", "native"), "--kernel-backend native", "--nnodes 2"),
    ],
)
def test_each_refusal_names_flag_and_value(args: tuple[str, ...], flag: str, value: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse(DecodeConfig, *args)
    assert flag in raised.value.message and value in raised.value.message


def test_the_room_for_bodies_holds_the_largest() -> None:
    with pytest.raises(ConfigError, match=r"--max-pending-body-bytes 10: .*--max-body-bytes 11") as raised:
        RouterConfig(max_body_bytes=11, max_pending_body_bytes=10)
    assert raised.value.param == "--max-pending-body-bytes"
    RouterConfig(max_body_bytes=10, max_pending_body_bytes=10)


def test_ranks_are_dealt_out_to_nodes_in_order() -> None:
    def parts(size: int, nnodes: int) -> list[list[int]]:
        return [
            list(WorkerConfig(tensor_parallel_size=size, nnodes=nnodes, node_rank=node).local_ranks)
            for node in range(nnodes)
        ]

    assert parts(4, 2) == [[0, 1], [2, 3]]
    assert parts(5, 3) == [[0, 1], [2, 3], [4]]
    assert parts(3, 3) == [[0], [1], [2]]
    assert parts(2, 1) == [[0, 1]]


def test_an_open_address_is_fine_with_a_key() -> None:
    assert WorkerConfig(host="0.0.0.0", cluster_key=Path("key")).host == "0.0.0.0"
    with pytest.raises(ConfigError, match=r"--host 0\.0\.0\.0"):
        RouterConfig(host="0.0.0.0")


def test_served_names_default_to_the_model() -> None:
    assert RouterConfig(model="m").served_names == ("m",)
    assert RouterConfig(model="m", served_model_name=("a", "b")).served_names == ("a", "b")


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("127.0.0.1:80", ("127.0.0.1", 80)),
        ("[::1]:80", ("::1", 80)),
        ("tcp://host.example:65535", ("host.example", 65535)),
    ],
)
def test_addresses_round_trip(text: str, parsed: tuple[str, int]) -> None:
    assert parse_tcp_address(text, param="--router") == parsed
    assert parse_tcp_address(tcp_address(*parsed), param="--router") == parsed


@pytest.mark.parametrize("text", ["host", "host:", "host:0", "host:65536", ":80", "::1:80", "host:8x"])
def test_bad_addresses_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_tcp_address(text, param="--router")


def test_loopback() -> None:
    assert all(is_loopback(host) for host in ("127.0.0.1", "127.1.2.3", "::1", "[::1]", "localhost"))
    assert not any(is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "example.org"))
    assert (bracketed("::1"), bracketed("[::1]"), bracketed("a")) == ("[::1]", "[::1]", "a")
