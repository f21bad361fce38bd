"""Loading the native code that ``setup.py`` builds from ``native/``."""

import ctypes
import functools
import hashlib
from pathlib import Path
from typing import Final

LIBRARY_NAME: Final = "_native.so"
GROUP_LOST: Final = 2
"""What a function returns when the ranks of a group can no longer compute together."""
_ABI_VERSION = 6


@functools.cache
def native_code_sha256() -> str:
    """Of the library's file: what another one packed need not be laid out alike."""
    return hashlib.sha256(Path(__file__).with_name(LIBRARY_NAME).read_bytes()).hexdigest()


@functools.cache
def native_library() -> ctypes.CDLL:
    """The library, its functions typed. Raises ``OSError`` where it was not built, ``RuntimeError`` where it is old."""
    path = Path(__file__).with_name(LIBRARY_NAME)
    if not path.is_file():
        raise OSError("the native library was not built (no C++ compiler when twopool was installed?)")
    library = ctypes.CDLL(str(path))
    pointer, number, long = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
    signatures: dict[str, tuple[list[type[object]], type[object] | None]] = {
        "twopool_abi_version": ([], number),
        "twopool_last_error": ([], ctypes.c_char_p),
        "twopool_isa_supported": ([number], number),
        "twopool_isa_name": ([number], ctypes.c_char_p),
        "twopool_advise_huge_pages": ([pointer, long], None),
        "twopool_copy_runs": ([pointer, long, pointer, pointer, long, pointer, long, long], None),
        "twopool_model_create": ([pointer, pointer], number),
        "twopool_model_destroy": ([pointer], None),
        "twopool_set_matrix": ([pointer, number, number, long, number, pointer, long, long], number),
        "twopool_set_bias": ([pointer, number, number, long, number, pointer, long], number),
        "twopool_set_vector": ([pointer, number, number, pointer, long], number),
        "twopool_set_embedding": ([pointer, pointer], None),
        "twopool_packed_bytes": ([pointer], long),
        "twopool_packed_data": ([pointer], pointer),
        "twopool_use_packed": ([pointer, pointer], number),
        "twopool_check_complete": ([pointer], number),
        "twopool_step": ([pointer, pointer], number),
        "twopool_model_join": ([pointer, pointer, pointer], number),
        "twopool_segment_create": ([number, long, pointer], number),
        "twopool_collective_open": ([number, number, number, long, number, number, pointer], number),
        "twopool_collective_close": ([pointer], None),
        "twopool_collective_abort": ([pointer], None),
        "twopool_collective_spin_us": ([pointer], long),
        "twopool_collective_barrier": ([pointer], number),
        "twopool_collective_all_reduce": ([pointer, pointer, long, long], number),
        "twopool_collective_gather": ([pointer, pointer, long, pointer, pointer], number),
    }
    for name, (arguments, result) in signatures.items():
        function = getattr(library, name, None)
        if function is None:
            raise RuntimeError(f"{path} lacks {name}: it was built from other sources; install twopool again")
        function.argtypes, function.restype = arguments, result
    if library.twopool_abi_version() != _ABI_VERSION:
        raise RuntimeError(f"{path} was built from other sources; install twopool again")
    return library
