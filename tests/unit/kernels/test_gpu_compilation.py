"""Every Triton kernel compiles for every target and fits its shared memory, in every configuration it may pick.

No GPU is needed. A slice that has every kernel for every target runs always, all models' shapes with ``--all``.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from twopool_testing.triton_targets import TARGETS, Target, compile_for

pytest.importorskip("triton", reason="Triton comes for Linux only")

from twopool.kernels.gpu import activation, attention, linear, qkv, rms_norm, rows, sampling
from twopool.kernels.gpu.compilation import Specialisation

HEADS = [(32, 8), (9, 3), (7, 1), (71, 1)]
HEAD_DIMS = [32, 64, 80, 96, 128, 192, 256]
MMA = re.compile(r"(?:wgmma\.mma_async|mma\.sync|tcgen05\.mma)[.\w:]*\.kind\S+|(?:wgmma\.mma_async|mma\.sync)[.\w:]+")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture(autouse=True)
def private_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "triton"))


def check(specialisation: Specialisation, target: Target) -> None:
    compiled = compile_for(specialisation, target)
    assert compiled.metadata.shared <= target.shared_memory, specialisation.name
    assert compiled.metadata.num_warps == specialisation.num_warps
    binary = compiled.asm["hsaco" if target.is_amd else "cubin"]
    assert len(binary) > 0


def once_each(target: Target) -> Iterator[Specialisation]:
    """Every kernel of a bfloat16 model, in one configuration."""
    dtype, amd = torch.bfloat16, target.is_amd
    attending = list(attention.specialisations(9, 3, 30, 128, 16, dtype, amd=amd))
    for candidates in (
        list(rms_norm.specialisations(576, dtype)),
        list(activation.specialisations(1536, dtype)),
        list(rows.specialisations()),
        list(qkv.specialisations(9, 3, 64, 16, dtype)),
        [*attending[:2], attending[-1]],  # without a soft cap
        list(linear.specialisations(4096, 4096, dtype, amd=amd)),
        list(sampling.specialisations()),
    ):
        seen = set()
        for candidate in reversed(candidates):  # the richer configurations come last
            if candidate.kernel not in seen:
                seen.add(candidate.kernel)
                yield candidate


def everything(target: Target, dtype: torch.dtype) -> Iterator[Specialisation]:
    amd = target.is_amd
    for size in (576, 2048, 4096, 8192, 16384):
        yield from rms_norm.specialisations(size, dtype)
        yield from activation.specialisations(size, dtype)
    for num_columns, depth in ((960, 576), (49152, 576), (4096, 4096), (4096, 14336), (128, 64), (5, 1537)):
        yield from linear.specialisations(num_columns, depth, dtype, amd=amd)
    for block_size in (16, 64):
        for heads in HEADS:
            yield from qkv.specialisations(*heads, 128, block_size, dtype)
    for head_dim in HEAD_DIMS:
        yield from qkv.specialisations(32, 8, head_dim, 16, dtype)
        yield from attention.specialisations(32, 8, 32, head_dim, 16, dtype, amd=amd)
    for heads in HEADS[1:]:
        yield from attention.specialisations(*heads, 30, 64, 64, dtype, amd=amd)
    yield from rows.specialisations()
    yield from sampling.specialisations()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_every_kernel_compiles(target: Target) -> None:
    for specialisation in once_each(target):
        check(specialisation, target)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("target", TARGETS[:3], ids=lambda target: target.name)
def test_paths_that_have_to_agree_multiply_alike(target: Target) -> None:
    """Rows by tiles and rows by splits (and a product's tiles and slices) use the same MMA instructions."""
    by_name: dict[str, set[str]] = {}
    for specialisation in once_each(target):
        ptx = compile_for(specialisation, target).asm["ptx"]
        by_name[specialisation.kernel.__name__] = set(MMA.findall(ptx))
    assert by_name["_attend_tiles_kernel"] == by_name["_attend_splits_kernel"] != set()
    assert by_name["_tiles_kernel"] == by_name["_slices_kernel"] != set()
    if target.name == "sm90":
        assert all("wgmma" in name for name in by_name["_attend_tiles_kernel"] | by_name["_tiles_kernel"])


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_every_configuration_compiles(target: Target, dtype: torch.dtype) -> None:
    for specialisation in everything(target, dtype):
        check(specialisation, target)


def test_a_kernel_that_needs_too_much_is_noticed() -> None:
    """The check itself: what fits Hopper need not fit an MI300."""
    hopper, mi300 = TARGETS[1], TARGETS[3]
    greedy = next(linear.specialisations(4096, 4096, torch.bfloat16, amd=False))
    assert compile_for(greedy, hopper).metadata.shared > mi300.shared_memory


def test_every_kernel_is_listed() -> None:
    """A kernel nobody compiles here could be broken on a target without anybody noticing."""
    folder = Path(attention.__file__).parent
    defined = {
        line.split("(")[0].removeprefix("def ")
        for path in folder.glob("*.py")
        for line in path.read_text().splitlines()
        if line.startswith("def ") and line.split("(")[0].endswith("_kernel")
    }
    assert defined == {specialisation.kernel.__name__ for specialisation in once_each(TARGETS[0])}
