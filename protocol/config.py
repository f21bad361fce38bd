"""What each process is told at its start: one frozen dataclass a process, validated once.

A field becomes a command-line flag through ``add_flags``; ``from_namespace`` builds and validates the dataclass;
every message names the flag.
Flags spell as in ``vllm serve`` where vLLM has them.
"""

import argparse
import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

from twopool.protocol.endpoints import is_loopback, parse_tcp_address
from twopool.protocol.errors import ConfigError
from twopool.protocol.messages import Role

C = TypeVar("C")

DTYPES = ("auto", "float32", "bfloat16", "float16")
KERNEL_BACKENDS = ("auto", "native", "torch")
DEFAULT_CONTROL_PORT = 8100
DEFAULT_HTTP_PORT = 8000
DEFAULT_MASTER_PORT = 29500
MAX_ROUTER_PROCESSES = 64


def flag(
    default: Any, help_text: str, *, parse: Any = None, choices: tuple[str, ...] | None = None, repeatable: bool = False
) -> Any:
    """A dataclass field that is also a command-line flag; a ``bool`` becomes ``--x/--no-x``.

    A ``repeatable`` flag gives one item of a tuple each time: for items that may hold commas.
    """
    metadata = {"help": help_text, "parse": parse, "choices": choices, "repeatable": repeatable}
    return field(default=default, metadata=metadata)


def comma_list(text: str) -> tuple[str, ...]:
    """``"a,b"`` → ``("a", "b")``."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def port_range(text: str) -> tuple[int, int]:
    """``"9000-9010"`` or ``"9000"`` → inclusive bounds."""
    low, _, high = text.partition("-")
    return int(low), int(high or low)


def ranks_of_node(size: int, nnodes: int, node: int) -> range:
    """The ranks of ``node`` when ``size`` are dealt out in order; where it is uneven the first nodes have one more."""
    each, more = divmod(size, nnodes)
    start = node * each + min(node, more)
    return range(start, start + each + (node < more))


@dataclass(frozen=True, kw_only=True)
class LinkConfig:
    """How a process reaches and is reached by others."""

    advertise_host: str | None = flag(None, "host name or address other processes reach this one at (default: --host)")
    cluster_key: Path | None = flag(
        None,
        "file with the cluster's secret (`twopool keygen FILE`); needed as soon as an address is not loopback",
        parse=Path,
    )
    log_level: str = flag("info", "log level", choices=("debug", "info", "warning", "error"))
    log_format: str = flag("text", "log lines as text or as JSON", choices=("text", "json"))


@dataclass(frozen=True, kw_only=True)
class RouterConfig(LinkConfig):
    """The router process."""

    model: str = flag("smollm2-135m-instruct", "model name, local folder, GGUF file or hub id")
    served_model_name: tuple[str, ...] = flag(
        (),
        "names the API serves the model under, comma separated (default: --model)",
        parse=comma_list,
    )
    host: str = flag("127.0.0.1", "address of the HTTP server and of the control endpoint")
    port: int = flag(DEFAULT_HTTP_PORT, "HTTP port; 0 picks a free one")
    control_port: int = flag(DEFAULT_CONTROL_PORT, "ZeroMQ port workers connect to; 0 picks a free one")
    min_prefill: int = flag(1, "prefill workers to wait for before the router is ready; 0 where decode workers prefill")
    min_decode: int = flag(1, "decode workers to wait for before the router is ready")
    max_model_len: int | None = flag(None, "longest prompt plus output in tokens (default: the workers')", parse=int)
    api_key_file: Path | None = flag(None, "file with one API key a line; without it no key is asked for", parse=Path)
    max_queue: int = flag(1024, "requests that may wait for a worker before new ones get 429")
    max_queue_wait_s: float = flag(30.0, "seconds a request may wait for room before it gets 429")
    request_timeout_s: float = flag(600.0, "seconds a request may take in all")
    resume_timeout_s: float = flag(30.0, "seconds an open stream waits for a decode worker when all are lost")
    max_attempts: int = flag(4, "pairings tried for one request")
    max_body_bytes: int = flag(16 * 1024 * 1024, "largest request body")
    max_pending_body_bytes: int = flag(
        256 * 1024 * 1024, "bytes of request bodies held while they are read and tokenised, together; more get 429"
    )
    max_header_bytes: int = flag(64 * 1024, "largest request line plus headers")
    tool_call_parser: str = flag(
        "auto",
        "how the model writes tool calls (auto: as its chat template looks)",
        choices=("auto", "hermes", "llama3_json", "mistral"),
    )
    reasoning_parser: str = flag(
        "auto",
        "how the model's reasoning is told from its answer (auto: as its chat template looks)",
        choices=("auto", "none", "deepseek_r1", "qwen3"),
    )
    max_stream_buffer_bytes: int = flag(1024 * 1024, "unread bytes after which a slow reader is disconnected")
    drain_timeout_s: float = flag(30.0, "seconds open requests may finish in after SIGTERM")
    uds: Path | None = flag(None, "serve HTTP on this Unix socket instead of --host and --port", parse=Path)
    ssl_certfile: Path | None = flag(None, "serve HTTPS with this certificate chain (PEM)", parse=Path)
    ssl_keyfile: Path | None = flag(None, "private key of --ssl-certfile (PEM)", parse=Path)
    cors_allow_origins: tuple[str, ...] = flag(
        (), "origins whose pages may call the API, comma separated; * allows all", parse=comma_list
    )
    router_processes: int = flag(
        1, "router processes that share the HTTP port; the workers connect to a control port of each"
    )

    def __post_init__(self) -> None:
        _check_port("--port", self.port)
        _check_port("--control-port", self.control_port)
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ConfigError("--ssl-certfile and --ssl-keyfile: give both or neither", param="--ssl-certfile")
        if not 1 <= self.router_processes <= MAX_ROUTER_PROCESSES:
            raise ConfigError(
                f"--router-processes {self.router_processes}: must be between 1 and {MAX_ROUTER_PROCESSES}",
                param="--router-processes",
            )
        if self.control_port and self.control_port + self.router_processes - 1 > 65535:
            raise ConfigError(
                f"--control-port {self.control_port}: --router-processes {self.router_processes} needs as many ports",
                param="--control-port",
            )
        for name in (
            "max_queue",
            "max_attempts",
            "max_body_bytes",
            "max_pending_body_bytes",
            "max_header_bytes",
            "max_stream_buffer_bytes",
        ):
            _check_positive(name, getattr(self, name))
        for name in (
            "max_queue_wait_s",
            "request_timeout_s",
            "resume_timeout_s",
            "drain_timeout_s",
        ):
            _check_positive(name, getattr(self, name))
        if self.max_pending_body_bytes < self.max_body_bytes:
            raise ConfigError(
                f"--max-pending-body-bytes {self.max_pending_body_bytes}: must hold one of --max-body-bytes "
                f"{self.max_body_bytes}",
                param="--max-pending-body-bytes",
            )
        if self.max_model_len is not None:
            _check_positive("max_model_len", self.max_model_len)
        for name in ("min_prefill", "min_decode"):
            if getattr(self, name) < 0:
                raise ConfigError(
                    f"{_flag_name(name)} {getattr(self, name)}: must not be negative", param=_flag_name(name)
                )
        _check_key("--host", self.host, self.cluster_key)

    @property
    def served_names(self) -> tuple[str, ...]:
        return self.served_model_name or (self.model,)


@dataclass(frozen=True, kw_only=True)
class WorkerConfig(LinkConfig):
    """A prefill or decode worker process."""

    model: str = flag("smollm2-135m-instruct", "model name, local folder, GGUF file or hub id")
    router: tuple[str, ...] = flag(
        (f"127.0.0.1:{DEFAULT_CONTROL_PORT}",),
        "control endpoints of the routers, host:port, comma separated",
        parse=comma_list,
    )
    worker_id: str | None = flag(None, "this worker's name, unique in the cluster (default: random)")
    host: str = flag("127.0.0.1", "address this worker listens on for its peers")
    port: int = flag(0, "ZeroMQ port for peers; 0 picks a free one")
    dtype: str = flag("auto", "weights and KV cache (auto: the model's own)", choices=DTYPES)
    device: str = flag("auto", "cpu, cuda or cuda:N (auto: cuda where there is one)")
    kernel_backend: str = flag(
        "auto",
        "what computes on a CPU: the native step or torch (auto: native where it was built and serves the model)",
        choices=KERNEL_BACKENDS,
    )
    deterministic_gemm: bool = flag(
        False,
        "GPU: products that sum in the same order in any batch, so that a token's bits never depend on its neighbours",
    )
    num_threads: int = flag(0, "compute threads of each rank; 0 takes the CPUs, in equal shares")
    tensor_parallel_size: int = flag(1, "ranks of this worker, each a process with a part of the model")
    nnodes: int = flag(1, "nodes (hosts, as a rule) the worker's ranks are spread over; each runs the same command")
    node_rank: int = flag(0, "this node's number: 0 is the worker, the others only hold their ranks")
    master_addr: str = flag("127.0.0.1", "address of node 0, at which it listens for the other nodes")
    master_port: int = flag(DEFAULT_MASTER_PORT, "port at --master-addr where the nodes meet")
    node_timeout_s: float = flag(300.0, "seconds the nodes wait for one another when they start")
    max_model_len: int | None = flag(None, "longest prompt plus output in tokens (default: the model's)", parse=int)
    max_num_seqs: int = flag(64, "sequences in one step")
    max_num_batched_tokens: int = flag(512, "tokens in one step; longer prompts are prefilled in chunks")
    max_waiting: int = flag(256, "requests this worker queues before it answers busy")
    block_size: int = flag(16, "tokens in a KV block: a power of two, at least 16")
    kv_cache_memory: int | None = flag(None, "bytes of KV cache of each rank (default on CPU: 1 GiB)", parse=int)
    packed_weights_bytes: int = flag(
        8 * 1024**3,
        "CPU: disk space for packed weights, so that the next start maps them instead of packing; 0: none are kept",
    )
    gpu_memory_utilization: float = flag(0.9, "share of a GPU's memory to use when --kv-cache-memory is not given")
    enable_prefix_caching: bool = flag(True, "keep the KV of finished requests for later ones")
    local_prefill: bool = flag(True, "decode: prefill here when no prefill worker is left")
    kv_transport: str = flag("nixl", "how KV blocks move", choices=("nixl",))
    nixl_backend: str = flag("UCX", "NIXL plugin")
    ucx_tls: str | None = flag(None, "UCX_TLS for the transport (default: UCX chooses)")
    ucx: tuple[str, ...] = flag(
        (), "another setting of UCX as NAME=VALUE, such as UCX_NET_DEVICES=mlx5_0:1; repeatable", repeatable=True
    )
    kv_same_host: str = flag(
        "map",
        "READs between workers of one host: map the peer's pool and copy (not where UCX_TLS is set or another "
        "--nixl-backend than UCX), or leave them to NIXL",
        choices=("map", "nixl"),
    )
    pin_lease_s: float = flag(30.0, "prefill: seconds KV stays pinned for a decode worker that does not come")
    drain_timeout_s: float = flag(30.0, "seconds running requests may finish in after SIGTERM")
    kv_layer_groups: int = flag(4, "prefill: layer groups in which a prompt's last chunk is offered; 1: all at once")
    kv_verify: str = flag(
        "off", "blocks read from peers whose checksums both sides compare", choices=("off", "sample", "all")
    )
    kv_convert_dtype: bool = flag(
        False, "read KV of another dtype than this worker's from peers and convert it, instead of refusing them"
    )
    kv_quarantine_s: float = flag(30.0, "seconds a peer is not read from after its checksums did not match")
    fault_points: Path | None = flag(
        None, "tests only: file of POINT=FAULT lines, see kv_transfer/fault_points.py", parse=Path
    )

    @property
    def local_ranks(self) -> range:
        """The ranks of this node."""
        return ranks_of_node(self.tensor_parallel_size, self.nnodes, self.node_rank)

    @property
    def maps_same_host(self) -> bool:
        """Whether KV pools are shared with the host's other workers; whoever names NIXL's plugin or UCX's transports
        gets those.
        """
        return self.kv_same_host == "map" and self.nixl_backend == "UCX" and "UCX_TLS" not in self.ucx_settings

    @property
    def ucx_settings(self) -> dict[str, str]:
        """What ``--ucx`` and ``--ucx-tls`` say, by name."""
        settings = dict(_split_setting(item) for item in self.ucx)
        return settings if self.ucx_tls is None else {**settings, "UCX_TLS": self.ucx_tls}

    def with_environment(self, environ: Mapping[str, str]) -> Self:
        """A UCX_TLS of the environment is as good as ``--ucx-tls``; what flags say comes first."""
        if "UCX_TLS" not in environ or "UCX_TLS" in self.ucx_settings:
            return self
        return dataclasses.replace(self, ucx_tls=environ["UCX_TLS"])

    def __post_init__(self) -> None:
        _check_port("--port", self.port)
        for name in (
            "tensor_parallel_size",
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_waiting",
            "pin_lease_s",
            "drain_timeout_s",
            "kv_layer_groups",
            "kv_quarantine_s",
            "node_timeout_s",
        ):
            _check_positive(name, getattr(self, name))
        self._check_nodes()
        self._check_ucx()
        if self.block_size < 16 or self.block_size & (self.block_size - 1):
            raise ConfigError(
                f"--block-size {self.block_size}: must be a power of two, at least 16",
                param="--block-size",
            )
        if self.num_threads < 0:
            raise ConfigError(f"--num-threads {self.num_threads}: must not be negative", param="--num-threads")
        if self.packed_weights_bytes < 0:
            raise ConfigError(
                f"--packed-weights-bytes {self.packed_weights_bytes}: must not be negative",
                param="--packed-weights-bytes",
            )
        if self.kv_cache_memory is not None:
            _check_positive("kv_cache_memory", self.kv_cache_memory)
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"--gpu-memory-utilization {self.gpu_memory_utilization}: must be in (0, 1]",
                param="--gpu-memory-utilization",
            )
        if not self.router:
            raise ConfigError("--router: name at least one router", param="--router")
        _check_key("--host", self.host, self.cluster_key)
        for address in self.router:
            host, _ = parse_tcp_address(address, param="--router")
            _check_key("--router", host, self.cluster_key)

    def _check_ucx(self) -> None:
        names = [_split_setting(item)[0] for item in self.ucx]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"--ucx {name}: given more than once", param="--ucx")
            if name == "UCX_TLS" and self.ucx_tls is not None:
                raise ConfigError(f"--ucx {name}: --ucx-tls {self.ucx_tls} says that already", param="--ucx")

    def _check_nodes(self) -> None:
        if not 1 <= self.nnodes <= self.tensor_parallel_size:
            raise ConfigError(
                f"--nnodes {self.nnodes}: every node has at least one rank, and --tensor-parallel-size "
                f"{self.tensor_parallel_size} says how many there are",
                param="--nnodes",
            )
        if not 0 <= self.node_rank < self.nnodes:
            raise ConfigError(
                f"--node-rank {self.node_rank}: must be between 0 and {self.nnodes - 1}, for --nnodes {self.nnodes}",
                param="--node-rank",
            )
        if self.nnodes == 1:
            return
        _check_port("--master-port", self.master_port)
        if not self.master_port:
            raise ConfigError("--master-port 0: the other nodes have to know it", param="--master-port")
        if self.kernel_backend == "native":
            raise ConfigError(
                f"--kernel-backend native: its sums need the memory of one host, --nnodes {self.nnodes} computes with "
                "torch",
                param="--kernel-backend",
            )
        _check_key("--master-addr", self.master_addr, self.cluster_key)


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(WorkerConfig):
    """A decode worker."""


@dataclass(frozen=True, kw_only=True)
class PrefillConfig(WorkerConfig):
    """A prefill worker."""


def config_class(role: Role) -> type[WorkerConfig]:
    return PrefillConfig if role == "prefill" else DecodeConfig


def add_flags(parser: argparse.ArgumentParser, config: type) -> None:
    """One flag for each field of the ``config`` dataclass; defaults stay out, so only given flags show up."""
    for item in dataclasses.fields(config):
        name = "--" + item.name.replace("_", "-")
        help_text = f"{item.metadata['help']}{_default_text(item.default)}"
        if isinstance(item.default, bool):
            parser.add_argument(
                name,
                action=argparse.BooleanOptionalAction,
                default=argparse.SUPPRESS,
                help=help_text,
            )
            continue
        if item.metadata["repeatable"]:
            parser.add_argument(name, action="append", default=argparse.SUPPRESS, help=help_text)
            continue
        parse = item.metadata["parse"] or (str if item.default is None else type(item.default))
        parser.add_argument(
            name,
            type=parse,
            choices=item.metadata["choices"],
            default=argparse.SUPPRESS,
            help=help_text,
        )


def from_namespace(config: type[C], namespace: argparse.Namespace) -> C:
    """The validated ``config`` of the flags that were given; raises ``ConfigError`` naming flag and value."""
    names = {item.name for item in dataclasses.fields(config)}  # type: ignore[arg-type]
    given = {key: value for key, value in vars(namespace).items() if key in names}
    return config(**{key: tuple(value) if isinstance(value, list) else value for key, value in given.items()})


def flags_of(config: type, given: Mapping[str, Any]) -> tuple[str, ...]:
    """The command line that gives ``config`` its share of ``given``; the inverse of ``add_flags``."""
    flags: list[str] = []
    for item in dataclasses.fields(config):
        if item.name in given:
            value = given[item.name]
            values = value if item.metadata["repeatable"] else (value,)
            flags += [_flag_text(_flag_name(item.name), one) for one in values]
    return tuple(flags)


def _flag_text(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return name if value else "--no-" + name.removeprefix("--")
    return f"{name}={','.join(value) if isinstance(value, tuple) else value}"


def _split_setting(text: str) -> tuple[str, str]:
    """``UCX_NAME=VALUE``; raises ``ConfigError``."""
    match = re.fullmatch(r"(UCX_[A-Z0-9_]+)=(.+)", text)
    if match is None:
        raise ConfigError(f"--ucx {text}: expected UCX_NAME=VALUE", param="--ucx")
    return match[1], match[2]


def _default_text(default: Any) -> str:
    if default is None or default == ():
        return ""
    text = ",".join(default) if isinstance(default, tuple) else default
    return f" (default: {text})"


def _flag_name(name: str) -> str:
    return "--" + name.replace("_", "-")


def _check_positive(name: str, value: float) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise ConfigError(f"{_flag_name(name)} {value}: must be positive", param=_flag_name(name))


def _check_port(name: str, port: int) -> None:
    if not 0 <= port <= 65535:
        raise ConfigError(f"{name} {port}: not a port number", param=name)


def _check_key(name: str, host: str, cluster_key: Path | None) -> None:
    if cluster_key is None and not is_loopback(host):
        raise ConfigError(
            f"{name} {host}: an address that is not loopback needs --cluster-key (make one with `twopool keygen FILE`)",
            param="--cluster-key",
        )
