"""Ahead-of-time compilation of the Triton kernels, without a GPU."""

from dataclasses import dataclass
from typing import Any

from twopool.kernels.gpu.compilation import EXACT, Specialisation


@dataclass(frozen=True)
class Target:
    """A GPU kernels are compiled for."""

    name: str
    backend: str
    architecture: int | str
    warp_size: int
    shared_memory: int
    """bytes a program may have"""

    @property
    def is_amd(self) -> bool:
        return self.backend == "hip"


TARGETS = (
    Target("sm80", "cuda", 80, 32, 163 * 1024),
    Target("sm90", "cuda", 90, 32, 227 * 1024),
    Target("sm100", "cuda", 100, 32, 227 * 1024),
    Target("gfx942", "hip", "gfx942", 64, 64 * 1024),
)


def compile_for(specialisation: Specialisation, target: Target) -> Any:
    """Triton's compiled kernel; ``metadata.shared`` is the shared memory it needs, in bytes."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = specialisation.kernel.arg_names
    unaligned = {param.name for param in specialisation.kernel.params if param.do_not_specialize_on_alignment}
    place = {name: (number,) for number, name in enumerate(names)}
    source = ASTSource(
        specialisation.kernel,
        {name: specialisation.signature.get(name, "constexpr") for name in names},
        {place[name]: value for name, value in specialisation.constants.items()},
        {
            place[name]: [["tt.divisibility", 16]]
            for name, kind in specialisation.signature.items()
            if kind[0] == "*" and name not in unaligned
        },
    )
    options = {"num_warps": specialisation.num_warps, "num_stages": specialisation.num_stages, **EXACT}
    return triton.compile(
        source,
        target=GPUTarget(target.backend, target.architecture, target.warp_size),
        options=options,
    )
