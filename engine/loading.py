"""What a worker loads before it serves: weights, KV pool, threads."""

import hashlib
import json
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch

from twopool.engine.kv_cache import TORCH_DTYPES, allocate_kv_pool, kv_cache_blocks
from twopool.engine.model_runner import CapturedDecode, Model, ModelRunner
from twopool.kv_transfer.interface import NUM_RESERVED_BLOCKS
from twopool.models.config import DecoderConfig
from twopool.models.decoder import Decoder
from twopool.models.native_decoder import NativeDecoder
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

    @property
    def compatibility_hash(self) -> str:
        """Equal on two workers exactly when their KV means the same; shape and order are not part of it."""
        meaning = f"{self.decoder.fingerprint()} {self.geometry.dtype}"
        return hashlib.sha256(meaning.encode()).hexdigest()[:32]

    @property
    def kernel_backend(self) -> str:
        """What computes, by name: outputs are equal bit for bit only between equal ones."""
        if isinstance(self.decoder, NativeDecoder):
            return f"native-{self.decoder.isa}"
        if self.decoder.device.type == "cpu":
            return "torch"
        return "triton-deterministic" if self.deterministic_gemm else "triton"

    @property
    def max_model_len(self) -> int:
        return self.decoder.config.max_model_len

    def runner(
        self, config: WorkerConfig, *, on_layers: Callable[[int], None] | None = None, model: Model | None = None
    ) -> ModelRunner:
        """What runs this model's steps; on a GPU decodes are captured when it is warmed up.

        ``model``: stands in for the decoder in the steps that are not captured, to be measured.
        """
        captured: CapturedDecode | None = None
        if isinstance(self.decoder, Decoder) and self.decoder.device.type == "cuda":
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


def load_model(config: WorkerConfig, folder: Path) -> LoadedModel:
    """Read the model in ``folder`` and allocate its KV pool. Raises ``ModelError`` or ``ConfigError``."""
    torch.set_num_threads(config.num_threads or len(os.sched_getaffinity(0)))
    device = _device(config.device)
    dtype = _dtype(config.dtype, folder)
    decoder = _load_decoder(config, folder, TORCH_DTYPES[dtype], device)
    _check_length(config, decoder.config.max_model_len)
    geometry = KvGeometry(
        num_blocks=kv_cache_blocks(config, decoder.config, TORCH_DTYPES[dtype]) + NUM_RESERVED_BLOCKS,
        block_size=config.block_size,
        num_layers=decoder.config.num_layers,
        num_kv_heads=decoder.config.num_kv_heads,
        num_kv_heads_local=decoder.config.num_kv_heads,
        head_dim=decoder.config.head_dim,
        dtype=dtype,
        memory="host" if device.type == "cpu" else "device",
        device_index=device.index or 0,
    )
    return LoadedModel(
        decoder,
        geometry,
        allocate_kv_pool(geometry, device, shared=config.maps_same_host),
        folder,
        num_valid_tokens=min(num_tokens_known(folder), decoder.config.vocab_size),
        deterministic_gemm=config.deterministic_gemm,
    )


def _load_decoder(
    config: WorkerConfig, folder: Path, dtype: torch.dtype, device: torch.device
) -> Decoder | NativeDecoder:
    """The decoder of the backend asked for; ``auto`` takes the native one where it can serve, and says why not."""
    backend = config.kernel_backend
    if backend == "torch" or device.type != "cpu":
        return Decoder.load(folder, dtype=dtype, device=device, deterministic_gemm=config.deterministic_gemm)
    model_config = DecoderConfig.from_folder(folder)
    reason = NativeDecoder.unavailable_reason(model_config, dtype=dtype, device=device)
    if reason is None:
        return NativeDecoder.load(folder, dtype=dtype, device=device, cpus=_own_cpus(torch.get_num_threads()))
    if backend == "native":
        raise ConfigError(f"--kernel-backend native: {reason}", param="--kernel-backend")
    logger.info("torch computes: %s", reason)
    return Decoder.load(folder, dtype=dtype, device=device)


def _own_cpus(num_threads: int) -> list[int] | None:
    """The CPUs to pin compute threads to, one each, when this process has exactly that many; None: do not pin.

    Unpinned, Linux often wakes two threads of a step on one CPU, and the step takes up to three times as long.
    """
    cpus = sorted(os.sched_getaffinity(0))
    return cpus if 1 < num_threads == len(cpus) else None


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
