"""What the headers of an answer say of its time: the figures of ``timings``, for clients that read no bodies.

A whole answer is over when its headers are sent, so they carry everything. A stream's go out with its first token and
say what has happened by then; the rest is in its last event.
"""

from collections.abc import Callable

from twopool.router.timings import Timeline

NAMES = (
    "server-timing",
    "x-prefill-worker",
    "x-decode-worker",
    "x-attempts",
    "x-kv-bytes-moved",
    "x-cached-tokens",
    "x-system-fingerprint",
)
"""For pages of other origins, which may read only headers that they are told of."""

_MAX_PROMPTS = 4
"""Proxies take a few kilobytes of headers; the body has all prompts."""


def timing_headers(timelines: list[Timeline], fingerprint: str | None, *, is_whole: bool) -> list[tuple[bytes, bytes]]:
    """``fingerprint`` is the answer's. Of several prompts the first few, in order; one that no worker has yet is ``-``.

    ``is_whole``: the answer is complete, so that what moved and what was cached is known.
    """
    if not timelines:
        return []
    lines = timelines[:_MAX_PROMPTS]
    figures: list[Callable[[Timeline], str]] = [_prefill_worker, _decode_worker, _attempts]
    if is_whole:
        figures += [_bytes_moved, _cached_tokens]
    headers = [(b"server-timing", _server_timing(lines).encode())]
    headers += [
        (name.encode(), ", ".join([figure(line) for line in lines]).encode())
        for name, figure in zip(NAMES[1:], figures, strict=False)
    ]
    if fingerprint is not None:
        headers.append((b"x-system-fingerprint", fingerprint.encode()))
    return headers


def _server_timing(lines: list[Timeline]) -> str:
    """Entries in milliseconds; with several prompts each says whose it is."""
    entries = []
    for number, line in enumerate(lines):
        whose = f";desc=prompt-{number}" if len(lines) > 1 else ""
        entries += [
            f"{name};dur={seconds * 1e3:.3f}{whose}" for name, seconds in {**line.seconds(), **line.totals()}.items()
        ]
    return ", ".join(entries)


def _prefill_worker(line: Timeline) -> str:
    return "-" if line.last_grant is None else line.last_grant.prefilled_by


def _decode_worker(line: Timeline) -> str:
    return "-" if line.last_grant is None else line.last_grant.decode


def _attempts(line: Timeline) -> str:
    return "0" if line.last_grant is None else str(line.last_grant.attempt + 1)


def _bytes_moved(line: Timeline) -> str:
    return str(line.num_bytes_moved)


def _cached_tokens(line: Timeline) -> str:
    return ";".join([f"{source}={count}" for source, count in line.cached_by_source().items()])
