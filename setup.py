"""Builds the native CPU step (kernels/native), if it can; pyproject.toml holds everything else.

The library is loaded with ctypes, so it depends on no Python version. Without a C++ compiler, or on another machine
than x86-64 Linux, the install succeeds without it and the torch kernels serve.
"""

import os
import platform
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCE_DIR = Path("kernels") / "native"
LIBRARY = "_native"
COMMON_FLAGS = [
    "-std=c++17",
    "-O3",
    "-g0",
    "-fPIC",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-ffp-contract=off",  # a product and a sum that the compiler may fuse here and not there would break bit equality
    "-fno-math-errno",
]
AVX512_FLAGS = [
    "-mavx2",
    "-mfma",
    "-mavx512f",
    "-mavx512bw",
    "-mavx512dq",
    "-mavx512vl",
    "-Wno-uninitialized",  # GCC's own intrinsics headers start from undefined registers
    "-Wno-maybe-uninitialized",
]
# Only these files may use more than the baseline; which of them runs is chosen at run time.
FLAGS_BY_FILE = {
    "isa_avx2.cpp": ["-mavx2", "-mfma"],
    "isa_avx512.cpp": AVX512_FLAGS,
    "isa_avx512_bf16.cpp": [*AVX512_FLAGS, "-mavx512bf16"],
    "isa_amx_bf16.cpp": [*AVX512_FLAGS, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"],
}


class BuildNative(build_ext):
    """Compiles each file with its own flags; a failure is one line of warning, not an error."""

    def get_ext_filename(self, ext_name: str) -> str:
        return os.path.join(*ext_name.split(".")) + ".so"

    def run(self) -> None:
        if not _can_build():
            self.warn_unbuilt(f"no native code for {platform.machine()} {sys.platform}")
            self.extensions = []
            return
        super().run()

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        try:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                objects = [path for paths in pool.map(self.compile, ext.sources) for path in paths]
            target.parent.mkdir(parents=True, exist_ok=True)
            self.compiler.link_shared_object(objects, str(target), extra_postargs=["-pthread"], target_lang="c++")
        except Exception as error:  # setuptools' compilers raise classes of their own, by version
            target.unlink(missing_ok=True)  # never an old library beside new sources
            self.warn_unbuilt(str(error))

    def compile(self, source: str) -> list[str]:
        """-> the object files of one source file."""
        flags = [*COMMON_FLAGS, *FLAGS_BY_FILE.get(Path(source).name, [])]
        objects: list[str] = self.compiler.compile([source], output_dir=self.build_temp, extra_postargs=flags)
        return objects

    def copy_extensions_to_source(self) -> None:
        for ext in self.extensions:
            built, in_place = Path(self.build_lib) / self.get_ext_filename(ext.name), _in_place()
            in_place.unlink(missing_ok=True)
            if built.is_file():
                self.copy_file(str(built), str(in_place))

    def warn_unbuilt(self, reason: str) -> None:
        self.warn(f"the native CPU step was not built, the torch kernels will serve: {reason}")

    def get_outputs(self) -> list[str]:
        return [output for output in super().get_outputs() if Path(output).is_file()]


def _can_build() -> bool:
    return sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64")


def _in_place() -> Path:
    return Path("kernels") / f"{LIBRARY}.so"


def _extension() -> Extension:
    return Extension(
        f"twopool.kernels.{LIBRARY}",
        sources=sorted(str(path) for path in SOURCE_DIR.glob("*.cpp")),
        depends=sorted(str(path) for pattern in ("*.h", "*.inc") for path in SOURCE_DIR.glob(pattern)),
        language="c++",
    )


setup(ext_modules=[_extension()], cmdclass={"build_ext": BuildNative})
