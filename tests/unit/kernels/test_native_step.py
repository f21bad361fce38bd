"""The native step refuses what would read or write out of bounds, and its threads behave."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from twopool.kernels.native_step import (
    NativeStep,
    StepShape,
    advise_huge_pages,
    native_available,
    supported_isas,
    unsupported_reason,
)

UNAVAILABLE = native_available()
pytestmark = pytest.mark.skipif(UNAVAILABLE is not None, reason=f"no native step: {UNAVAILABLE}")

VOCAB, HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM = 50, 40, 24, 4, 2, 10
ROPE_ROWS = 64


def _shape(**changes: Any) -> StepShape:
    fields: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_layers": 1,
        "num_heads": HEADS,
        "num_kv_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": 1e-5,
        "activation": "silu",
        "windows": (None,),
        "dtype": torch.float32,
    }
    return StepShape(**(fields | changes))


def _fill(step: NativeStep) -> None:
    generator = torch.Generator().manual_seed(0)

    def random(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator)

    step.set_embedding(random(VOCAB, HIDDEN))
    step.set_matrix("head", random(VOCAB, HIDDEN))
    step.set_matrix("qkv", random((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN))
    step.set_matrix("output", random(HIDDEN, HEADS * HEAD_DIM))
    step.set_matrix("gate_up", random(INNER, HIDDEN), interleaved=True)
    step.set_matrix("gate_up", random(INNER, HIDDEN), first=16, interleaved=True)
    step.set_matrix("down", random(HIDDEN, INNER))
    for kind in ("input_norm", "post_attention_norm", "final_norm"):
        step.set_vector(kind, torch.ones(HIDDEN))


@pytest.fixture
def make_step() -> Iterator[Callable[..., NativeStep]]:
    made: list[NativeStep] = []

    def make(**options: Any) -> NativeStep:
        made.append(NativeStep(_shape(), **({"num_threads": 2} | options)))
        return made[-1]

    yield make
    for step in made:
        step.close()


@pytest.fixture
def step(make_step: Callable[..., NativeStep]) -> NativeStep:
    made = make_step()
    _fill(made)
    made.finish()
    return made


def _arguments() -> dict[str, Any]:
    """Two sequences: three new tokens, and one after 16 cached ones."""
    return {
        "token_ids": np.array([1, 2, 3, 4], dtype=np.int32),
        "query_lens": np.array([3, 1], dtype=np.int32),
        "context_lens": np.array([3, 17], dtype=np.int32),
        "block_tables": np.array([[1, 0], [2, 3]], dtype=np.int32),
        "logit_rows": np.array([2, 3], dtype=np.int32),
        "cos": torch.ones(ROPE_ROWS, HEAD_DIM // 2),
        "sin": torch.zeros(ROPE_ROWS, HEAD_DIM // 2),
        "kv_pool": torch.zeros(4, KV_HEADS, 1, 2, 16, HEAD_DIM),
    }


def test_a_good_batch_runs(step: NativeStep) -> None:
    logits = step.run(**_arguments())
    assert logits.shape == (2, VOCAB)
    assert logits.isfinite().all()


def test_an_empty_batch_runs(step: NativeStep) -> None:
    arguments = _arguments()
    for name in ("token_ids", "query_lens", "context_lens", "logit_rows"):
        arguments[name] = arguments[name][:0]
    arguments["block_tables"] = arguments["block_tables"][:0]
    assert step.run(**arguments).shape == (0, VOCAB)


@pytest.mark.parametrize(
    ("name", "index", "value", "message"),
    [
        ("token_ids", (1,), VOCAB, "token_ids"),
        ("token_ids", (1,), -1, "token_ids"),
        ("token_ids", (3,), 2**31 - 1, "token_ids"),
        ("query_lens", (0,), 0, "rows"),
        ("query_lens", (0,), -3, "rows"),
        ("query_lens", (0,), 2**31 - 1, "rows"),
        ("query_lens", (1,), 2, "rows"),
        ("context_lens", (0,), 2, "rows"),
        ("context_lens", (1,), 33, "block table"),
        ("context_lens", (1,), 2**31 - 1, "rotations"),
        ("context_lens", (1,), ROPE_ROWS + 1, "rotations"),
        ("block_tables", (1, 1), 4, "not in the pool"),
        ("block_tables", (1, 1), -1, "not in the pool"),
        ("logit_rows", (0,), 4, "logit_rows"),
        ("logit_rows", (0,), -1, "logit_rows"),
    ],
)
def test_a_value_out_of_range_is_refused_before_the_pool_is_touched(
    step: NativeStep, name: str, index: tuple[int, ...], value: int, message: str
) -> None:
    arguments = _arguments()
    arguments[name][index] = value
    with pytest.raises(ValueError, match=message):
        step.run(**arguments)
    assert not arguments["kv_pool"].any()


@pytest.mark.parametrize("name", [name for name in _arguments() if name != "kv_pool"])
def test_arrays_of_another_shape_or_type_are_refused(step: NativeStep, name: str) -> None:
    arguments = _arguments()
    array = arguments[name]
    retyped = array.to(torch.float64) if isinstance(array, Tensor) else array.astype(np.int64)
    longer = torch.cat((array, array)) if isinstance(array, Tensor) else np.concatenate((array, array))
    for wrong in (retyped, array[..., None], longer):
        if name in ("logit_rows", "cos") and wrong.ndim == array.ndim and wrong.dtype == array.dtype:
            continue  # of any length
        with pytest.raises(ValueError):
            step.run(**(arguments | {name: wrong}))


@pytest.mark.parametrize(
    "pool",
    [
        torch.zeros(4, KV_HEADS, 1, 2, 16, HEAD_DIM, dtype=torch.bfloat16),
        torch.zeros(4, KV_HEADS, 1, 2, 8, HEAD_DIM),
        torch.zeros(4, KV_HEADS, 1, 2, 24, HEAD_DIM),
        torch.zeros(4, KV_HEADS, 2, 2, 16, HEAD_DIM),
        torch.zeros(4, KV_HEADS, 1, 2, HEAD_DIM, 16).transpose(-1, -2),
        torch.zeros(4, KV_HEADS, 16, HEAD_DIM),
    ],
)
def test_another_pool_is_refused(step: NativeStep, pool: Tensor) -> None:
    with pytest.raises(ValueError, match=r"pool|block_size"):
        step.run(**(_arguments() | {"kv_pool": pool}))


def test_a_view_is_as_good_as_a_copy(step: NativeStep) -> None:
    wanted = step.run(**_arguments())
    arguments = _arguments()
    arguments["block_tables"] = arguments["block_tables"].T.copy().T
    arguments["token_ids"] = np.stack((arguments["token_ids"], arguments["token_ids"]), axis=1)[:, 0]
    assert torch.equal(step.run(**arguments), wanted)


def test_an_unfinished_model_is_refused(make_step: Callable[..., NativeStep]) -> None:
    empty = make_step()
    with pytest.raises(ValueError, match=r"finish\(\)"):
        empty.run(**_arguments())
    with pytest.raises(ValueError, match="embedding"):
        empty.finish()
    _fill(empty)
    empty.finish()
    empty.run(**_arguments())


def test_weights_of_another_shape_are_refused(make_step: Callable[..., NativeStep]) -> None:
    empty = make_step()
    with pytest.raises(ValueError, match="shape"):
        empty.set_matrix("down", torch.zeros(HIDDEN, INNER + 1))
    with pytest.raises(ValueError, match="more rows"):
        empty.set_matrix("down", torch.zeros(HIDDEN + 25, INNER))
    with pytest.raises(ValueError, match="more rows"):
        empty.set_matrix("gate_up", torch.zeros(INNER + 16, HIDDEN), interleaved=True)
    with pytest.raises(ValueError, match="layer"):
        empty.set_matrix("down", torch.zeros(HIDDEN, INNER), layer=1)
    with pytest.raises(ValueError, match="bias"):
        empty.set_matrix("down", torch.zeros(HIDDEN, INNER), bias=torch.zeros(65))
    with pytest.raises(ValueError, match="norm"):
        empty.set_vector("query_norm", torch.zeros(HEAD_DIM + 1))
    with pytest.raises(ValueError, match="embedding"):
        empty.set_embedding(torch.zeros(VOCAB, HIDDEN + 1))


def test_what_cannot_be_served_is_said() -> None:
    assert unsupported_reason(_shape()) is None
    assert "float16" in (unsupported_reason(_shape(dtype=torch.float16)) or "")
    assert "head_dim" in (unsupported_reason(_shape(head_dim=512)) or "")
    assert "head_dim" in (unsupported_reason(_shape(head_dim=9)) or "")
    assert "KV heads" in (unsupported_reason(_shape(num_kv_heads=3)) or "")
    with pytest.raises(ValueError, match="head_dim"):
        NativeStep(_shape(head_dim=512), num_threads=1)
    with pytest.raises(ValueError, match="instruction set"):
        NativeStep(_shape(), num_threads=1, isa="mmx")
    with pytest.raises(ValueError, match="threads"):
        NativeStep(_shape(), num_threads=0)
    with pytest.raises(ValueError, match="CPU"):
        NativeStep(_shape(), num_threads=1, cpus=[10**6])


def test_a_closed_step_is_refused(step: NativeStep) -> None:
    step.close()
    step.close()
    with pytest.raises(ValueError, match=r"finish\(\)"):
        step.run(**_arguments())


def test_pinned_threads_stay_on_their_cpus(make_step: Callable[..., NativeStep]) -> None:
    cpus = sorted(os.sched_getaffinity(0))[:2]
    pinned = make_step(num_threads=len(cpus), cpus=cpus)
    _fill(pinned)
    pinned.finish()
    seen: list[set[int]] = []

    def run() -> None:  # in a thread of its own, which ends with the test
        pinned.run(**_arguments())
        seen.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [{cpus[0]}]


def test_idle_threads_sleep(step: NativeStep) -> None:
    """Threads that spun between steps would use a second of CPU here for each."""
    step.run(**_arguments())
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(1.0)
    assert time.process_time() - before < 0.2


def test_more_threads_than_cpus_finish(make_step: Callable[..., NativeStep]) -> None:
    """Waiting threads give way to the working ones."""
    few, many = make_step(num_threads=1), make_step(num_threads=9)
    for each in (few, many):
        _fill(each)
        each.finish()
    wanted = few.run(**_arguments())
    for _ in range(20):
        assert torch.equal(many.run(**_arguments()), wanted)


def test_the_callers_rounding_is_left_alone(step: NativeStep) -> None:
    """Denormals are zero within a step only."""
    step.run(**_arguments())
    tiny = torch.tensor([1e-30, 1e-30]) * torch.tensor([1e-10, 1e-10])
    assert (tiny > 0).all()


def test_huge_pages_are_advice(step: NativeStep) -> None:
    pool = torch.empty(5 << 20, dtype=torch.uint8)
    advise_huge_pages(pool)
    advise_huge_pages(pool[:0])
    assert pool.fill_(7).sum() == 7 * len(pool)


def test_the_fastest_instruction_set_comes_first() -> None:
    assert supported_isas()[-1] == "avx2"
    assert len(set(supported_isas())) == len(supported_isas())
