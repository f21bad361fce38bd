"""What of gpu_check needs no GPU: every section's code on small sizes, its verdicts, its report."""

import io
import json
from collections.abc import Callable, Iterator

import pytest
import torch
from rich.console import Console
from torch import Tensor

from twopool.scripts import gpu_check
from twopool.scripts.gpu_check_correctness import compare, correctness
from twopool.scripts.gpu_check_model import ModelSizes, invariance, model_speed
from twopool.scripts.gpu_check_report import Result, table
from twopool.scripts.gpu_check_server import ServerSizes, server_speed
from twopool.scripts.gpu_check_speed import KernelSizes, kernel_speed

CPU = torch.device("cpu")
SMALL_MODEL = ModelSizes(
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    vocab_size=100,
    decode_batches=(1, 3),
    decode_context=40,
    prefill_lengths=(20, 50),
)
SMALL_KERNELS = KernelSizes(
    copy_bytes=4096,
    rows=20,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    decode=((1, 40), (3, 20)),
    prefill=50,
    products=((1, 16, 32), (20, 16, 32)),
    vocab_size=600,
)


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main([]) == 2
    assert "needs a GPU" in capsys.readouterr().out


def test_a_device_that_computes_something_else_fails() -> None:
    factors = iter([1.0, 1.1, 1.0, torch.nan, 2.0, 2.0])

    def drifting(to: Callable[[Tensor], Tensor]) -> Tensor:
        return to(torch.ones(3)) * next(factors)

    assert [compare(name, drifting, CPU, 1e-3).passed for name in ("wrong", "nan", "right")] == [False, False, True]


def test_correctness_covers_every_kernel() -> None:
    results = list(correctness(CPU))
    assert all(result.passed for result in results)
    assert len({result.name for result in results}) == len(results) > 20


def test_invariance_reports_both_kinds_of_products() -> None:
    results = list(invariance(CPU, SMALL_MODEL))
    assert [result.passed is None for result in results] == [False] * 7 + [True] * 7


def test_measurements_have_values() -> None:
    for result in (*kernel_speed(CPU, SMALL_KERNELS), *model_speed(CPU, SMALL_MODEL)):
        assert result.value is not None and result.value > 0 and result.unit


def test_the_server_is_asked_over_http() -> None:
    sizes = ServerSizes(SMALL_MODEL, decode_tokens=60, flags=(f"--kv-cache-memory={16 * 1024**2}",))
    results = list(server_speed(CPU, sizes))
    assert [result.name for result in results] == ["prefill of 20", "prefill of 50", "decode of 1", "decode of 3"]
    assert all(result.passed and (result.value or result.note.startswith("not measured")) for result in results)
    assert results[2].value and "first token after" in results[0].note


def test_a_server_that_cannot_start_is_a_failed_check() -> None:
    sizes = ServerSizes(SMALL_MODEL, flags=("--kv-cache-memory=1",))
    (result,) = gpu_check.run({"server": lambda: server_speed(CPU, sizes)}, lambda _: None)
    assert result.passed is False and "one block of 16 tokens takes" in result.note


def test_a_section_that_breaks_off_hides_nothing() -> None:
    def broken() -> Iterator[Result]:
        yield Result("first", "one", passed=True)
        raise RuntimeError("out of shared memory")

    def fine() -> Iterator[Result]:
        yield Result("second", "two", value=3.0, unit="GB/s", reference=4.0, reference_name="copy")

    reported: list[Result] = []
    results = gpu_check.run({"first": broken, "second": fine}, reported.append)
    assert results == reported
    assert [(result.name, result.passed) for result in results] == [("one", True), ("broke off", False), ("two", None)]
    assert "out of shared memory" in results[1].note
    report = json.loads(gpu_check.as_json(results, "a device"))
    assert report["device"] == "a device"
    assert report["results"][2]["ratio"] == 0.75
    console = Console(file=io.StringIO(), width=200)
    console.print(table(results))
    shown = console.file.getvalue() if isinstance(console.file, io.StringIO) else ""
    assert "FAILED" in shown and "3 GB/s" in shown and "0.75" in shown
