"""Addresses of processes: parsing, printing, loopback or not. IPv6 addresses are bracketed everywhere."""

import ipaddress
import socket

import psutil

from twopool.protocol.errors import ConfigError


def parse_tcp_address(text: str, *, param: str) -> tuple[str, int]:
    """``host:port``, ``[ipv6]:port`` or ``tcp://host:port`` → (host, port); raises ``ConfigError`` naming ``param``."""
    rest = text.removeprefix("tcp://")
    host, separator, port = rest.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ConfigError(f"{param} {text}: an IPv6 address needs brackets, as in [::1]:8100", param=param)
    if not separator or not host or not port.isdecimal() or not 0 < int(port) <= 65535:
        raise ConfigError(f"{param} {text}: expected host:port", param=param)
    return host, int(port)


def tcp_address(host: str, port: int) -> str:
    """The ZeroMQ address of a host and port."""
    return f"tcp://{bracketed(host)}:{port}"


def bracketed(host: str) -> str:
    """``host`` with brackets when it is an IPv6 address."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def is_loopback(host: str) -> bool:
    """Whether ``host`` can only be reached from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def resolved(host: str, *, param: str) -> str:
    """``host`` as an IP address; raises ``ConfigError`` naming ``param`` where the system does not know the name."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"{param} {host}: the name is not known here: {error.strerror}", param=param) from error
    return str(found[0][4][0])


def interface_towards(host: str) -> str | None:
    """The name of the network interface whose address this host has in the eyes of ``host``; None: not known.

    On ``host`` itself the one that has the address ``host``.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # of a datagram socket: nothing is sent
            own = probe.getsockname()[0]
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == own for one in addresses):
            return name
    return None
