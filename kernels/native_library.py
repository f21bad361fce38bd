"""Loading the native code that ``setup.py`` builds from ``native/``."""

import ctypes
import functools
from pathlib import Path
from typing import Final

LIBRARY_NAME: Final = "_native.so"
_ABI_VERSION = 3


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
        "twopool_check_complete": ([pointer], number),
        "twopool_step": ([pointer, pointer], number),
    }
    for name, (arguments, result) in signatures.items():
        function = getattr(library, name, None)
        if function is None:
            raise RuntimeError(f"{path} lacks {name}: it was built from other sources; install twopool again")
        function.argtypes, function.restype = arguments, result
    if library.twopool_abi_version() != _ABI_VERSION:
        raise RuntimeError(f"{path} was built from other sources; install twopool again")
    return library
