"""Where an app and its coordinator meet: what `app_host` stands for."""

from __future__ import annotations

import ipaddress
import socket

LOCALHOST = "localhost"  # both loopback addresses, whatever the machine's name service makes of the word
IPV4_LOOPBACK = "127.0.0.1"
IPV6_LOOPBACK = "::1"
UNIX = "unix:"  # in front of the path of a Unix socket
SOCKET_FILE_NAME = "app.sock"  # of the Unix socket that an instance has where its settings name none


def hosts_of(app_host: str) -> tuple[str, ...]:
    """The addresses of ``app_host``: one, or both loopbacks for "localhost" where the machine has IPv6."""
    if app_host != LOCALHOST:
        return (app_host,)
    return (IPV4_LOOPBACK, IPV6_LOOPBACK) if _has_ipv6_loopback() else (IPV4_LOOPBACK,)


def host_port(host: str, port: int) -> str:
    """``HOST:PORT``, an IPv6 address in brackets; for "localhost" the loopback that all machines have."""
    host = IPV4_LOOPBACK if host == LOCALHOST else host
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def family_of(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def is_loopback(host: str) -> bool:
    """Only this machine reaches ``host``. A name other than "localhost" may stand for anything."""
    try:
        return host == LOCALHOST or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _has_ipv6_loopback() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind((IPV6_LOOPBACK, 0))
    except OSError:
        return False
    return True
