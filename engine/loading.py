"""What a worker loads before it serves: weights, KV pool, threads."""

import hashlib
import json
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch

from twopool.engine.kv_cache import allocate_kv_pool, kv_cache_blocks
from twopool.engine.model_runner import CapturedDecode, Model, ModelRunner
from twopool.engine.tp_group import TpGroup
from twopool.kernels.collectives import Collective, SharedMemoryCollective
from twopool.kv_transfer.dtypes import TORCH_DTYPES
from twopool.kv_transfer.interface import NUM_RESERVED_BLOCKS
from twopool.models.cache import default_cache_dir
from twopool.models.config import DecoderConfig
from twopool.models.decoder import Decoder
from twopool.models.native_decoder import NativeDecoder
from twopool.models.packed_weights import PackedStore
from twopool.models.sharding import Shard
from twopool.models.vocabulary import num_tokens_known
from twopool.protocol.config import WorkerConfig
from twopool.protocol.errors import ConfigError, ModelError
from twopool.protocol.geometry import KvDtype, KvGeometry

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedModel:
    """The model of ``folder`` in memory and its KV pool (``geometry.shape``), which lives until the process ends."""

    decoder: Decoder | NativeDecoder
    geometry: KvGeometry
    kv_pool: torch.Tensor
    folder: Path
    num_valid_tokens: int
    """ids from here on have logits, but no text: nothing draws them"""
    deterministic_gemm: bool = False
    group: TpGroup | None = None
    """the other ranks, where this is the first of several"""

    @property
    def compatibility_hash(self) -> str:
        """Equal on two workers exactly when their KV means the same; shape, order and width are not part of it.

        Every KV dtype there is holds the plain numbers, without a scale; which one it is stands in the geometry.
        """
        meaning = f"{self.decoder.fingerprint()} unscaled float"
        return hashlib.sha256(meaning.encode()).hexdigest()[:32]

    @property
    def kernel_backend(self) -> str:
        """What computes, by name: outputs are equal bit for bit only between equal ones."""
        return kernel_backend(self.decoder, deterministic_gemm=self.deterministic_gemm)

    @property
    def max_model_len(self) -> int:
        return self.decoder.config.max_model_len

    def runner(
        self, config: WorkerConfig, *, on_layers: Callable[[int], None] | None = None, model: Model | None = None
    ) -> ModelRunner:
        """What runs this model's steps; on a GPU, a rank that is alone captures decodes when it is warmed up.

        ``model``: stands in for the decoder in the steps that are not captured, to be measured.
        """
        captured: CapturedDecode | None = None
        if isinstance(self.decoder, Decoder) and self.decoder.device.type == "cuda" and self.geometry.tp_size == 1:
            from twopool.models.decode_graphs import DecodeGraphs

            captured = DecodeGraphs(
                self.decoder,
                self.kv_pool,
                max_num_seqs=config.max_num_seqs,
                max_model_len=config.max_model_len or self.max_model_len,
            )
        return ModelRunner(
            model or self.decoder,
            self.kv_pool,
            num_valid_tokens=self.num_valid_tokens,
            captured=captured,
            on_layers=on_layers,
        )


ALONE = Shard(0, 1)


@dataclass(frozen=True)
class RankPlace:
    """One process's place in its worker. ``cpus`` are for its compute threads; None: all that the process may use.

    ``local_rank``: its number among the ranks of its node.
    """

    shard: Shard = ALONE
    collective: Collective | None = None
    cpus: tuple[int, ...] | None = None
    local_rank: int = 0


def load_model(config: WorkerConfig, folder: Path) -> LoadedModel:
    """Read the model in ``folder`` and allocate its KV pool. Raises ``ModelError`` or ``ConfigError``."""
    decoder = load_decoder(config, folder, RankPlace())
    return with_pool(config, folder, decoder, RankPlace(), num_blocks=pool_blocks(config, decoder))


def load_decoder(config: WorkerConfig, folder: Path, place: RankPlace) -> Decoder | NativeDecoder:
    """The rank's part of the model in ``folder``. Raises ``ModelError`` or ``ConfigError``."""
    cpus = sorted(os.sched_getaffinity(0)) if place.cpus is None else list(place.cpus)
    torch.set_num_threads(config.num_threads or len(cpus))
    device = rank_device(config.device, place.local_rank)
    dtype = TORCH_DTYPES[_dtype(config.dtype, folder)]
    decoder = _load_decoder(config, folder, dtype, device, place, cpus)
    _check_length(config, decoder.config.max_model_len)
    return decoder


def kernel_backend(decoder: Decoder | NativeDecoder, *, deterministic_gemm: bool) -> str:
    """What ``LoadedModel.kernel_backend`` says."""
    if isinstance(decoder, NativeDecoder):
        return f"native-{decoder.isa}"
    if decoder.device.type == "cpu":
        return "torch"
    return "triton-deterministic" if deterministic_gemm else "triton"


def pool_blocks(config: WorkerConfig, decoder: Decoder | NativeDecoder) -> int:
    """Blocks this rank's memory allows beside the transport's own."""
    return kv_cache_blocks(
        config, decoder.config, decoder.dtype, num_kv_heads=decoder.num_kv_heads_local, device=decoder.device
    )


def with_pool(
    config: WorkerConfig, folder: Path, decoder: Decoder | NativeDecoder, place: RankPlace, *, num_blocks: int
) -> LoadedModel:
    """The loaded model with its KV pool of ``num_blocks`` blocks and the transport's. Raises ``ConfigError``."""
    model, device = decoder.config, decoder.device
    geometry = KvGeometry(
        num_blocks=num_blocks + NUM_RESERVED_BLOCKS,
        block_size=config.block_size,
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        kv_head_start=decoder.kv_head_start,
        num_kv_heads_local=decoder.num_kv_heads_local,
        head_dim=model.head_dim,
        dtype=_dtype(config.dtype, folder),
        memory="host" if device.type == "cpu" else "device",
        device_index=device.index or 0,
        tp_rank=place.shard.rank,
        tp_size=place.shard.size,
    )
    return LoadedModel(
        decoder,
        geometry,
        allocate_kv_pool(geometry, device, shared=config.maps_same_host),
        folder,
        num_valid_tokens=min(num_tokens_known(folder), model.vocab_size),
        deterministic_gemm=config.deterministic_gemm,
    )


def _load_decoder(
    config: WorkerConfig,
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    place: RankPlace,
    cpus: Sequence[int],
) -> Decoder | NativeDecoder:
    """The decoder of the backend asked for; ``auto`` takes the native one where it can serve, and says why not."""
    collective = place.collective
    if config.kernel_backend != "torch" and device.type == "cpu":
        reason = NativeDecoder.unavailable_reason(DecoderConfig.from_folder(folder), dtype=dtype, device=device)
        if reason is None and (collective is None or isinstance(collective, SharedMemoryCollective)):
            return NativeDecoder.load(
                folder,
                dtype=dtype,
                device=device,
                cpus=_own_cpus(torch.get_num_threads(), cpus, place.shard.size),
                shard=place.shard,
                collective=collective,
                packed_store=_packed_store(config),
            )
        reason = reason or "the native step sums over the shared memory of one host"
        if config.kernel_backend == "native":
            raise ConfigError(f"--kernel-backend native: {reason}", param="--kernel-backend")
        logger.info("torch computes: %s", reason)
    return Decoder.load(
        folder,
        dtype=dtype,
        device=device,
        deterministic_gemm=config.deterministic_gemm,
        shard=place.shard,
        collective=collective,
    )


def _packed_store(config: WorkerConfig) -> PackedStore | None:
    limit_bytes = config.packed_weights_bytes
    return PackedStore(default_cache_dir() / "packed", limit_bytes) if limit_bytes else None


def _own_cpus(num_threads: int, cpus: Sequence[int], num_ranks: int) -> Sequence[int] | None:
    """The CPUs to pin compute threads to, one each, when this rank has exactly that many; None: do not pin.

    Unpinned, Linux often wakes two threads of a step on one CPU, and the step takes up to three times as long. A thread
    that is alone may go where it likes.
    """
    return cpus if num_threads == len(cpus) and num_threads * num_ranks > 1 else None


def rank_device(name: str, rank: int) -> torch.device:
    """The device of a node's rank ``rank``: GPUs one after the other from the one named, or the first.

    Raises ``ConfigError``.
    """
    device = _device(name)
    if device.type == "cpu" or rank == 0:
        return device
    index = (device.index or 0) + rank
    if index >= torch.cuda.device_count():
        raise ConfigError(
            f"--device {name}: rank {rank} needs cuda:{index}, torch sees {torch.cuda.device_count()} GPUs here",
            param="--device",
        )
    return torch.device("cuda", index)


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"--device {name}: expected cpu, cuda or cuda:N", param="--device") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"--device {name}: torch sees no GPU here", param="--device")
    return device


def _dtype(name: str, folder: Path) -> KvDtype:
    """The dtype asked for, or the one the model's config names."""
    if name == "auto":
        try:
            config = json.loads((folder / "config.json").read_text())
        except (OSError, ValueError) as error:
            raise ModelError(f"{folder / 'config.json'} cannot be read: {error}") from error
        name = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    if name not in TORCH_DTYPES:
        raise ModelError(f"dtype {name} of {folder / 'config.json'} is not one of {', '.join(TORCH_DTYPES)}")
    return cast(KvDtype, name)


def _check_length(config: WorkerConfig, model_len: int) -> None:
    if config.max_model_len is not None and config.max_model_len > model_len:
        raise ConfigError(
            f"--max-model-len {config.max_model_len}: the model was made for {model_len}", param="--max-model-len"
        )
