"""API keys from a file."""

import hashlib
import hmac
from pathlib import Path

from twopool.protocol.errors import AuthenticationError, ConfigError


class ApiKeys:
    """The keys that open the API; with none, it is open to everybody."""

    def __init__(self, keys: list[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def tenant(self, authorization: bytes | None) -> bytes:
        """The salt of the key's owner (empty when the API is open); raises ``AuthenticationError``.

        Every key is compared, each in constant time, so the answer's timing says nothing about any of them.
        """
        if not self._digests:
            return b""
        scheme, _, key = (authorization or b"").strip().partition(b" ")
        given = _digest(key.strip())
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        if scheme.lower() != b"bearer" or not any(matches):
            raise AuthenticationError("a valid API key is needed, as in `Authorization: Bearer KEY`")
        return given[:16]


def load_api_keys(path: Path | None) -> ApiKeys:
    """One key a line; empty lines and lines that start with ``#`` do not count."""
    if path is None:
        return ApiKeys([])
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"--api-key-file {path}: cannot be read: {error}", param="--api-key-file") from error
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"--api-key-file {path}: holds no key", param="--api-key-file")
    return ApiKeys(keys)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
