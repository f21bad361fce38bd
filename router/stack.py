"""What produced an answer, in one short string: the ``system_fingerprint`` of the API.

Two answers with the same fingerprint came from the same weights, number formats, kernels, degrees of parallelism and
version, so that the same seed should have given the same tokens; where one of them changed, so does the fingerprint.
It is of the pair that served the request, not of the pools: in mixed ones neighbours may differ. An answer that several
different pairs had a part in, one after another or for different prompts, has a fingerprint of all of them.
"""

import hashlib
from collections.abc import Collection
from functools import cache
from importlib.metadata import version
from typing import Any

import msgspec

from twopool.protocol.messages import PROTOCOL_VERSION, Register


def kind(info: Register) -> tuple[str, str, int]:
    """What of a worker decides about its numbers, beside the model that all of them share."""
    return info.dtype, info.kernel_backend, info.tp_size


def describe(prefill: Register, decode: Register) -> dict[str, Any]:
    """The stack of a pair; a decode worker that prefills for itself is both."""
    return {
        "version": _version(),
        "protocol": PROTOCOL_VERSION,
        "model": decode.model,
        "model_hash": decode.compatibility_hash,
        "prefill": _side(prefill),
        "decode": _side(decode),
    }


def fingerprint(stack: dict[str, Any]) -> str:
    """``fp_`` and 64 bits of a hash."""
    return _hash(stack)


def combined(fingerprints: Collection[str]) -> str | None:
    """One for all: itself where they are equal, ``None`` where there are none."""
    distinct = sorted(set(fingerprints))
    if len(distinct) > 1:
        return _hash(distinct)
    return distinct[0] if distinct else None


def _side(info: Register) -> dict[str, Any]:
    dtype, kernels, tp_size = kind(info)
    return {"dtype": dtype, "kernels": kernels, "tensor_parallel_size": tp_size}


def _hash(value: Any) -> str:
    return "fp_" + hashlib.blake2b(msgspec.json.encode(value, order="sorted"), digest_size=8).hexdigest()


@cache
def _version() -> str:
    return version("twopool")
