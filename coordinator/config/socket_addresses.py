"""Addresses of the sockets of an instance, for its app and its operator."""

from __future__ import annotations

import errno
import hashlib
import ipaddress
import os
import socket
import stat
from pathlib import Path

from immortal.protocol.files import make_folder

LOCALHOST = "localhost"  # both loopback addresses, whatever the machine's name service makes of the word
IPV4_LOOPBACK = "127.0.0.1"
IPV6_LOOPBACK = "::1"
UNIX = "unix:"  # in front of the path of a Unix socket
SOCKET_FILE_NAME = "app.sock"  # of the Unix socket that an instance has if its settings name none


def hosts_of(app_host: str) -> tuple[str, ...]:
    """Return the addresses of ``app_host``: one, or both loopbacks for "localhost" if the machine has IPv6."""
    if app_host != LOCALHOST:
        return (app_host,)
    return (IPV4_LOOPBACK, IPV6_LOOPBACK) if _has_ipv6_loopback() else (IPV4_LOOPBACK,)


def host_port(host: str, port: int) -> str:
    """Return ``HOST:PORT``, an IPv6 address in brackets; for "localhost" the IPv4 loopback."""
    host = IPV4_LOOPBACK if host == LOCALHOST else host
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def family_of(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def is_loopback(host: str) -> bool:
    """Return True if only this machine reaches ``host``. Any name but "localhost" counts as another machine."""
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


# The kernel takes paths of Unix sockets of at most 107 bytes. A socket whose folder has too long a path is in a short
# folder instead. Its path follows from the instance's folder and the user alone, so that all commands find it.


UNIX_PATH_SIZE_BYTES_MAX = 107
SHORT_FOLDERS = Path("/tmp")  # noqa: S108 (secure_folder looks whose it is) not TMPDIR: each command has its own
_DIGEST_SIZE_BYTES = 12


def socket_path(folder: Path, file_name: str) -> Path:
    """Return the path of a socket: ``folder / file_name`` if it is short enough, else :func:`short_path`."""
    path = Path(os.path.realpath(folder), file_name)
    fits = len(os.fsencode(path)) < UNIX_PATH_SIZE_BYTES_MAX  # with a dot in front, while it is created
    return path if fits else short_path(folder, file_name)


def short_path(folder: Path, file_name: str) -> Path:
    """Return the path, in the user's short folder, of a socket that can't be in ``folder``."""
    real = os.fsencode(os.path.realpath(folder))
    digest = hashlib.blake2b(real, digest_size=_DIGEST_SIZE_BYTES).hexdigest()
    return _short_folder() / f"{digest}-{file_name}"


def secure_folder(path: Path) -> None:
    """Create the folder of a socket; if it is the short one, check that only this user can use it.

    Raises OSError, also if the short folder is somebody else's.
    """
    folder = path.parent
    if folder != _short_folder():
        make_folder(folder)
        return
    try:
        folder.mkdir(0o700)
    except FileExistsError:
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise OSError(
                errno.EPERM,
                f"{folder} is not a folder that only user {os.geteuid()} can use: remove it, or see who did that",
            ) from None


def _short_folder() -> Path:
    return SHORT_FOLDERS / f"immortal-{os.geteuid()}"
