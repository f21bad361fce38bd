"""What produced an answer, in one short string: the ``system_fingerprint`` of the API.

Two answers with the same fingerprint came from the same weights, number formats, kernels, degrees of parallelism and
version, so that the same seed should have given the same tokens; where one of them changed, so does the fingerprint.
"""

import hashlib
from collections.abc import Iterable
from functools import cache
from importlib.metadata import version
from typing import Any

import msgspec

from twopool.protocol.messages import PROTOCOL_VERSION, Register


def describe(workers: Iterable[Register]) -> dict[str, Any]:
    """The stack of these workers; each side lists every combination among them."""
    infos = list(workers)
    return {
        "version": _version(),
        "protocol": PROTOCOL_VERSION,
        "model": sorted({info.model for info in infos}),
        "model_hash": sorted({info.compatibility_hash for info in infos}),
        **{role: _sides(info for info in infos if info.role == role) for role in ("prefill", "decode")},
    }


def fingerprint(stack: dict[str, Any]) -> str:
    """``fp_`` and 64 bits of a hash."""
    return "fp_" + hashlib.blake2b(msgspec.json.encode(stack, order="sorted"), digest_size=8).hexdigest()


def _sides(infos: Iterable[Register]) -> list[dict[str, Any]]:
    kinds = sorted({(info.dtype, info.kernel_backend, info.tp_size) for info in infos})
    return [{"dtype": dtype, "kernels": kernels, "tensor_parallel_size": tp} for dtype, kernels, tp in kinds]


@cache
def _version() -> str:
    return version("twopool")
