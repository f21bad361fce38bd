"""Sockets: messages both ways, loss seen, keys enforced."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from twopool.protocol.endpoints import tcp_address
from twopool.protocol.errors import ConfigError
from twopool.protocol.security import Security, generate_cluster_key, load_cluster_key
from twopool.protocol.sockets import ClientSocket, ServerSocket
from twopool_testing.waiting import until

_CLIENT = """
import sys, time, zmq
socket = zmq.Context().socket(zmq.DEALER)
socket.connect(sys.argv[1])
socket.send(b"hello")
time.sleep(60)
"""


@pytest.fixture
def security() -> Iterator[Security]:
    guard = Security(None)
    yield guard
    guard.close()


class Server:
    def __init__(self, security: Security, host: str = "127.0.0.1", port: int = 0) -> None:
        self.messages: list[tuple[bytes, bytes]] = []
        self.lost: list[bytes] = []
        self.socket = ServerSocket(
            security=security,
            host=host,
            port=port,
            on_message=lambda peer, payload: self.messages.append((peer, payload)),
            on_lost=self.lost.append,
        )
        self.address = tcp_address(host, self.socket.port)


class Client:
    def __init__(self, security: Security, address: str) -> None:
        self.messages: list[bytes] = []
        self.connected = 0
        self.lost = 0
        self.socket = ClientSocket(
            security=security,
            address=address,
            on_message=self.messages.append,
            on_connected=self._connected,
            on_lost=self._lost,
        )

    def _connected(self) -> None:
        self.connected += 1

    def _lost(self) -> None:
        self.lost += 1


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_messages_go_both_ways_in_order(security: Security, host: str) -> None:
    """RT-13: IPv6 addresses work as well."""
    server = Server(security, host)
    client = Client(security, server.address)
    await until(lambda: client.connected)
    expected = [b"%d" % i for i in range(2000)]
    for payload in expected:
        assert client.socket.send(payload)
    await until(lambda: len(server.messages) == 2000)
    assert [payload for _, payload in server.messages] == expected
    peer = server.messages[0][0]
    for payload in expected:
        assert server.socket.send(peer, payload)
    await until(lambda: len(client.messages) == 2000)
    assert client.messages == expected
    client.socket.close()
    await until(lambda: server.lost == [peer])
    assert not server.socket.send(peer, b"late")
    server.socket.close()


async def test_send_before_the_connection_stands_is_refused(security: Security) -> None:
    client = Client(security, "tcp://127.0.0.1:9")
    assert not client.socket.send(b"x")
    client.socket.close()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_killed_or_stopped_peer_is_lost(security: Security, how: signal.Signals) -> None:
    server = Server(security)
    process = subprocess.Popen([sys.executable, "-c", _CLIENT, server.address])
    try:
        await until(lambda: server.messages, 20)
        os.kill(process.pid, how)
        await until(lambda: server.lost, 10)
        assert server.lost == [server.messages[0][0]]
    finally:
        process.kill()
        process.wait()
        server.socket.close()


async def test_a_client_sees_its_server_go(security: Security) -> None:
    server = Server(security)
    client = Client(security, server.address)
    await until(lambda: client.connected)
    server.socket.close()
    await until(lambda: client.lost)
    assert client.socket.closed
    assert not client.socket.send(b"x")


async def test_several_frames_are_dropped_and_the_connection_survives(security: Security) -> None:
    server = Server(security)
    raw = security.context.socket(zmq.DEALER)
    raw.connect(server.address)
    raw.send_multipart([b"a", b"b", b"c"])
    raw.send(b"fine")
    await until(lambda: server.messages)
    assert [payload for _, payload in server.messages] == [b"fine"]
    raw.close(linger=0)
    await until(lambda: server.lost)
    server.socket.close()


async def test_a_taken_port_is_named(security: Security) -> None:
    server = Server(security)
    with pytest.raises(ConfigError, match=f"--port {server.socket.port}"):
        Server(security, port=server.socket.port)
    server.socket.close()


async def test_only_holders_of_the_cluster_key_connect(tmp_path: Path) -> None:
    generate_cluster_key(tmp_path / "key")
    generate_cluster_key(tmp_path / "other")
    ours, same, other, plain = (
        Security(tmp_path / "key"),
        Security(tmp_path / "key"),
        Security(tmp_path / "other"),
        Security(None),
    )
    server = Server(ours)
    friend = Client(same, server.address)
    strangers = [Client(other, server.address), Client(plain, server.address)]
    await until(lambda: friend.connected)
    assert friend.socket.send(b"friend")
    await until(lambda: server.messages)
    # A stranger that knows the server's public key (from a leak) but holds another key pair.
    insider = plain.context.socket(zmq.DEALER)
    insider.curve_publickey, insider.curve_secretkey = zmq.curve_keypair()
    insider.curve_serverkey = load_cluster_key(tmp_path / "key").public
    insider.connect(server.address)
    insider.send(b"insider")
    await asyncio.sleep(0.5)
    assert [payload for _, payload in server.messages] == [b"friend"]
    assert not any(stranger.connected for stranger in strangers)
    insider.close(linger=0)
    for client in (friend, *strangers):
        client.socket.close()
    server.socket.close()
    for guard in (ours, same, other, plain):
        guard.close()


def test_key_files(tmp_path: Path) -> None:
    path = tmp_path / "key"
    generate_cluster_key(path)
    assert (path.stat().st_mode & 0o777) == 0o600
    secret = path.read_text().strip()
    assert secret not in repr(load_cluster_key(path))
    with pytest.raises(ConfigError, match="cannot write"):
        generate_cluster_key(path)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="other users may read"):
        load_cluster_key(path)
    (tmp_path / "bad").write_text("short")
    (tmp_path / "bad").chmod(0o600)
    with pytest.raises(ConfigError, match="is no cluster key"):
        load_cluster_key(tmp_path / "bad")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_cluster_key(tmp_path / "missing")
