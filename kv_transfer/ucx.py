"""What UCX and NIXL are told: both take their settings from the environment alone, when an agent is made."""

import ctypes
import logging
import re
from collections.abc import Mapping, MutableMapping
from difflib import get_close_matches
from typing import Final

from twopool.protocol.errors import ConfigError

logger = logging.getLogger(__name__)

DEFAULTS: Final[Mapping[str, str]] = {
    # Where the system has libefa, a process that made a UCX agent dies with SIGSEGV at exit (the destructor of a
    # second libnl-route), which hides its exit status. Whoever wants EFA sets UCX_MODULES.
    "UCX_MODULES": "^efa",
    # Over TCP, larger segments than UCX takes by default mean fewer system calls.
    "UCX_TCP_TX_SEG_SIZE": "256k",
    "UCX_TCP_RX_SEG_SIZE": "256k",
    # At INFO every agent writes two lines to stdout.
    "NIXL_LOG_LEVEL": "WARN",
}
"""Ours, where neither flags nor environment say anything."""

_PREFIXES = ("UCX_", "NIXL_")
_PRINT_NAMES_AND_DOCS = 0b101
"""Flags of UCX's own listing: its settings, and the text that says which other names stand for them."""


def settings(given: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """All that is set, by name: our defaults, over them the environment, over that what was ``given`` by flags."""
    inherited = {name: value for name, value in environ.items() if name.startswith(_PREFIXES)}
    return dict(sorted({**DEFAULTS, **inherited, **given}.items()))


def apply_settings(given: Mapping[str, str], environ: MutableMapping[str, str]) -> None:
    """Put ``settings`` into ``environ``, before the libraries read it."""
    for name, value in settings(given, environ).items():
        if environ.get(name, value) != value:
            logger.warning("%s=%s, as the flags say; the environment had %s", name, value, environ[name])
        environ[name] = value


def in_words(given: Mapping[str, str], environ: Mapping[str, str]) -> str:
    """``settings``, one after the other."""
    ours = {name for name in DEFAULTS if name not in given and environ.get(name, DEFAULTS[name]) == DEFAULTS[name]}
    return ", ".join(
        f"{name}={value}{' (the default of twopool)' if name in ours else ''}"
        for name, value in settings(given, environ).items()
    )


def check_names(given: Mapping[str, str]) -> None:
    """Raise ``ConfigError`` for a setting that UCX has none of; call it once a UCX backend was made in this process.

    UCX itself only warns, and starts without what it was told.
    """
    known = _known_names()
    for name, value in given.items():
        if known and name not in known:
            close = get_close_matches(name, known, n=1)
            hint = f", but {close[0]}" if close else ""
            raise ConfigError(f"--ucx {name}={value}: UCX knows no such setting on this machine{hint}", param="--ucx")


def _known_names() -> set[str]:
    """The settings of UCX and of the modules it has loaded; empty where this UCX does not list them."""
    try:
        library = ctypes.CDLL(_library_path())
        settings_list = ctypes.c_char.in_dll(library, "ucs_config_global_list")
        list_settings = library.ucs_config_parser_print_all_opts
    except (OSError, AttributeError, ValueError) as error:
        logger.warning("the names of UCX's settings cannot be checked: %s", error)
        return set()
    libc = ctypes.CDLL(None)
    libc.open_memstream.restype = ctypes.c_void_p
    libc.open_memstream.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    libc.fclose.argtypes = libc.free.argtypes = [ctypes.c_void_p]
    # (FILE *, prefix, flags, list, filter): the last one came with UCX 1.17 and is not looked at by older ones.
    list_settings.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p]
    list_settings.restype = None
    text, size = ctypes.c_void_p(), ctypes.c_size_t()
    stream = libc.open_memstream(ctypes.byref(text), ctypes.byref(size))
    list_settings(stream, b"UCX_", _PRINT_NAMES_AND_DOCS, ctypes.addressof(settings_list), None)
    libc.fclose(stream)
    listing = ctypes.string_at(text, size.value).decode(errors="replace")
    libc.free(text)
    return names_in(listing)


def names_in(listing: str) -> set[str]:
    """The names in what ``ucx_info -c -f`` prints: ``UCX_RC_VERBS_SL=auto``, and ``# inherits:  UCX_IB_SL``."""
    names = set(re.findall(r"^(?:# )?(UCX_[A-Z0-9_]+)=", listing, re.MULTILINE))
    for line in re.findall(r"^# inherits: (.*)$", listing, re.MULTILINE):
        names.update(re.findall(r"UCX_[A-Z0-9_]+", line))
    return names


def _library_path() -> str:
    """libucs as it is loaded here: the wheels of NIXL bring one under a name of their own."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            path = line.rstrip("\n").partition("/")
            if re.search(r"/libucs[-.][^/]*$", "/" + path[2]):
                return "/" + path[2]
    raise OSError("libucs is not loaded")
