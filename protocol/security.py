"""Who may talk to whom: one CURVE key for the whole cluster.

A READ opens a worker's whole KV pool to a peer, so peers prove that they belong to the cluster before any of that is
exchanged. Every process of a cluster holds the same key file (`twopool keygen FILE`); each socket presents its key
pair, and a server admits that public key alone. Traffic is encrypted and authenticated by CURVE. Without a key only
loopback addresses are allowed, which the configuration checks.
"""

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.auth.thread import ThreadAuthenticator

from twopool.protocol.errors import ConfigError

_KEY_CHARS = 40


@dataclass(frozen=True)
class ClusterKey:
    """A CURVE key pair in Z85. The secret half never shows in logs."""

    public: bytes
    secret: bytes = field(repr=False)

    def secure(self, socket: "zmq.Socket[bytes]", *, server: bool) -> None:
        """Make ``socket`` speak CURVE; call it before bind or connect."""
        socket.curve_secretkey = self.secret
        socket.curve_publickey = self.public
        if server:
            socket.curve_server = True
        else:
            socket.curve_serverkey = self.public


def generate_cluster_key(path: Path) -> None:
    """Write a new cluster key to ``path``, readable by its owner alone; never overwrites a file."""
    _, secret = zmq.curve_keypair()
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    with os.fdopen(descriptor, "wb") as file:
        file.write(secret + b"\n")


def load_cluster_key(path: Path) -> ClusterKey:
    """Read the key ``generate_cluster_key`` wrote; raises ``ConfigError`` naming the file."""
    try:
        secret = path.read_bytes().strip()
        mode = path.stat().st_mode
    except OSError as error:
        raise ConfigError(f"--cluster-key {path}: cannot be read: {error.strerror}", param="--cluster-key") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(f"--cluster-key {path}: other users may read it; chmod 600 it", param="--cluster-key")
    try:
        if len(secret) != _KEY_CHARS:
            raise ValueError
        return ClusterKey(public=zmq.curve_public(secret), secret=secret)
    except (ValueError, zmq.ZMQError) as error:
        raise ConfigError(f"--cluster-key {path}: is no cluster key", param="--cluster-key") from error


class Security:
    """A process's ZeroMQ context and, where there is a cluster key, the guard that checks clients against it."""

    def __init__(self, key_file: Path | None) -> None:
        self.key = load_cluster_key(key_file) if key_file else None
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._guard: ThreadAuthenticator | None = None
        if self.key:
            self._guard = ThreadAuthenticator(self.context)
            self._guard.start()
            self._guard.configure_curve_callback(domain="*", credentials_provider=_OneKey(self.key))

    def apply(self, socket: "zmq.Socket[bytes]", *, server: bool) -> None:
        if self.key:
            self.key.secure(socket, server=server)

    def close(self) -> None:
        """Call after every socket is closed."""
        if self._guard:
            self._guard.stop()
        self.context.destroy(linger=0)


class _OneKey:
    """ZAP credentials provider that admits the cluster's key alone."""

    def __init__(self, key: ClusterKey) -> None:
        self._public = key.public

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._public
