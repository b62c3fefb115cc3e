"""Listening socket of a plain server, and its callers by their CURVE keys from the registry folder."""

from __future__ import annotations

import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Generic, TypeVar

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import parse_monitor_message

from immortal.appsdk.client.discovery import KEY, is_local, pair_of
from immortal.appsdk.client.errors import NotConnectable
from immortal.protocol.errors import RemoteProtocolError
from immortal.protocol.safe_output import RateLimit
from immortal.protocol.unfinished_messages import UnfinishedMessages

_NOBLOCK = int(zmq.NOBLOCK)
M = TypeVar("M")


class Listener(Generic[M]):
    """ROUTER socket that listens at ``endpoint`` until :meth:`close`, with ZeroMQ's ``options`` by their numbers.

    ``decode``: raises RemoteProtocolError for an invalid message; ``log`` receives a warning about dropped messages,
    ``malformed`` counts them. ``error`` is raised if it can't listen.

    ``identity``: the name whose keys in the registry folder ``home`` the socket shows. Then it admits only callers with
    keys of that folder: ``names``; None: all names with keys. "": it admits everybody who reaches ``endpoint``, which
    must be on this machine unless ``insecure`` is True.
    """

    def __init__(
        self,
        endpoint: str,
        options: Mapping[zmq.SocketOption, int],
        decode: Callable[[bytes], M],
        log: logging.Logger,
        error: type[Exception],
        *,
        home: Path,
        identity: str = "",
        names: Sequence[str] | None = None,
        insecure: bool = False,
    ) -> None:
        self.malformed = 0
        self._decode = decode
        self._log = log
        self._error = error
        self._warnings = RateLimit(burst=1)
        self.callers: Callers | None = None  # None: everybody can call
        self._authenticator: ThreadAuthenticator | None = None
        self._watch: _Watch | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        try:
            if identity:
                self._secure(home, identity, names)
            elif not insecure and not self._is_local(endpoint):
                raise error(
                    f"{endpoint} is not on this machine only: it needs keys, with identity=NAME ('immortal keys NAME "
                    f"--make' makes some), or insecure=True, which lets everybody in"
                )
            self._watch = _Watch(self._context, self.socket, options[zmq.MAXMSGSIZE], self._warn_unfinished)
            self._unfinished = self._watch.unfinished
            self.endpoint = self._unfinished.endpoint = self._bind(endpoint, options)
        except BaseException:
            self.close(0)
            raise

    def _is_local(self, endpoint: str) -> bool:
        try:
            return is_local(endpoint.removesuffix("*") + "0" if endpoint.endswith(":*") else endpoint)
        except NotConnectable as error:
            raise self._error(str(error)) from None

    def _secure(self, home: Path, identity: str, names: Sequence[str] | None) -> None:
        """Admit only connections with keys of callers to the socket, which is not bound yet."""
        try:
            pair = pair_of(home / identity, identity)
        except (NotConnectable, PermissionError) as error:
            raise self._error(f"the keys of {identity!r} can't be used: {error}") from None
        if pair is None:
            raise self._error(
                f"{identity!r} has no keys in {home / identity}: 'immortal keys {identity} --make --client' makes them"
            )
        for name in names or ():
            if not (home / name / "public_keys").exists():
                raise self._error(
                    f"{name!r} may call, and there are no keys of it in {home / name}: "
                    f"'immortal keys {name} --make --client' makes some, or copy its public_keys there"
                )
        self.callers = Callers(home, None if names is None else [identity, *names])
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.configure_curve_callback(domain=ZAP_DOMAIN, credentials_provider=self.callers)
        self._authenticator.start()
        self.socket.setsockopt(zmq.CURVE_SERVER, 1)
        self.socket.setsockopt(zmq.CURVE_SECRETKEY, pair.secret.encode())
        self.socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN.encode())
        self.socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without an authenticator nobody is admitted

    def _bind(self, endpoint: str, options: Mapping[zmq.SocketOption, int]) -> str:
        for option, value in {zmq.TCP_KEEPALIVE: 1, zmq.IPV6: int("[" in endpoint), **options}.items():
            self.socket.setsockopt(option, value)
        port = endpoint.rpartition(":")[2]
        if port.isdigit() and int(port) > 65535:
            raise self._error(f"can't listen at {endpoint!r}: ports end at 65535")  # ZeroMQ would take another
        if _somebody_listens(endpoint):
            raise self._error(f"can't listen at {endpoint!r}: it is in use")  # ZeroMQ would take it from its owner
        try:
            self.socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise self._error(
                f"can't listen at {endpoint!r}: {error.strerror}; tcp://ADDRESS:PORT of this machine (PORT may be *), "
                f"or ipc://PATH was expected"
            ) from None
        return self.socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")

    def receive(self, count_max: int, handle: Callable[[bytes, str, M], None]) -> bool:
        """Pass arrived messages to ``handle``, at most ``count_max``: the answer's route, the caller's name ("" without
        keys), the message. Return False if there may be more.
        """
        self._unfinished.reading()
        for _ in range(count_max):
            try:
                parts = [self.socket.recv(_NOBLOCK, copy=False)]
            except zmq.Again:
                self._unfinished.drained()
                return True
            if self._unfinished.suspects:
                self._unfinished.note(parts[0])
            more = parts[0].more
            while more:
                part = self.socket.recv(_NOBLOCK, copy=False)
                more = part.more
                if len(parts) < 3:
                    parts.append(part)
            try:
                caller = self._caller_of(parts[0])
                if len(parts) != 2:
                    raise RemoteProtocolError(f"a message of {len(parts) - 1} parts or more, 1 was expected")
                message = self._decode(parts[1].bytes)
            except (PermissionError, RemoteProtocolError) as error:
                self.drop(str(error))
                continue
            handle(parts[0].bytes, caller, message)
        return False

    def _caller_of(self, part: zmq.Frame) -> str:
        """Return the name of the caller that sent ``part``; "" without keys. Raises PermissionError if its key no
        longer has an owner.
        """
        if self.callers is None:
            return ""
        key = part.get("User-Id")
        name = self.callers.name_of(key if isinstance(key, str) else "")
        if name is None:
            raise PermissionError(f"a message with the key {key}, which may not call here any more")
        return name

    def drop(self, problem: str) -> None:
        """Count and report a dropped message."""
        self.malformed += 1
        self._warn("malformed", f"{problem}; dropped")

    def _warn_unfinished(self, problem: str) -> None:
        self._warn("unfinished", f"{problem}; ended: remove its key, if it has one")

    def _warn(self, kind: str, text: str) -> None:
        if (left_out := self._warnings.admit(kind, time.monotonic_ns())) is not None:
            where = self._unfinished.endpoint
            self._log.warning("at %s: %s (%d more since the last warning)", where, text, left_out)

    def send(self, route: bytes, data: bytes) -> bool:
        """Send a message; return False if the connection is gone or has no room."""
        try:
            self.socket.send_multipart((route, data), _NOBLOCK, copy=len(data) < 4096)
        except zmq.ZMQError:
            return False
        return True

    def close(self, linger_ms: int) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()
        self.socket.close(linger=linger_ms)
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()


class _Watch:
    """Thread that ends connections with unfinished messages that grow too large."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        socket: zmq.Socket[bytes],
        size_bytes_max: int,
        warn: Callable[[str], None],
    ) -> None:
        self.unfinished = UnfinishedMessages(socket, size_bytes_max, warn)
        self._socket = socket
        address = f"inproc://unfinished-{id(self)}"
        socket.monitor(address, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._monitor: zmq.Socket[bytes] = context.socket(zmq.PAIR)
        self._monitor.setsockopt(zmq.RCVHWM, 0)  # a lost event would be a missed connection
        self._monitor.connect(address)
        self._closing = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="unfinished messages", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        poller = zmq.Poller()
        for waited in (self._closing, self._monitor, self.unfinished.descriptor):
            poller.register(waited, zmq.POLLIN)
        while self._closing not in (ready := dict(poller.poll(self.unfinished.wait_ms()))):
            while self._monitor in ready and self._monitor.poll(0):
                event = parse_monitor_message(self._monitor.recv_multipart())
                if event["event"] is zmq.Event.ACCEPTED:
                    self.unfinished.add(event["value"])
                else:
                    self.unfinished.remove(event["value"])
            self.unfinished.check()

    def close(self) -> None:
        os.eventfd_write(self._closing, 1)
        self._thread.join()
        os.close(self._closing)
        self._socket.disable_monitor()
        self._monitor.close(0)
        self.unfinished.close()


def _somebody_listens(endpoint: str) -> bool:
    """Return True if a process listens at this Unix socket; False for other endpoints."""
    path = endpoint.removeprefix("ipc://")
    if path == endpoint:
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(0.0)
        try:
            probe.connect("\0" + path[1:] if path.startswith("@") else path)
        except BlockingIOError:
            return True  # its backlog is full
        except OSError:
            return False
        return True


# Callers of a server with keys: names with public keys in the registry folder, which is read again regularly.


CALLERS_POLL_S = 1.0  # for new and removed keys, like instances

ZAP_DOMAIN = "patterns"
_EXPIRES = re.compile(r";.*\bexpires: (\d{4}-\d\d-\d\d)\s*")
_FILE_SIZE_BYTES_MAX = 4096  # far more than two keys and a few comments


class Callers:
    """Callers by their keys. ``names``: those that can call, each with a file HOME/NAME/public_keys; None: all
    with such a file.
    """

    def __init__(self, home: Path, names: Sequence[str] | None) -> None:
        self._home = home
        self._names = None if names is None else tuple(names)
        self._by_key: dict[str, str] = {}
        self._last_read_s = float("-inf")

    def name_of(self, key: str) -> str | None:
        """Return the owner of ``key`` (Z85), by files read at most a second ago; None if no admitted caller has it."""
        now_s = time.monotonic()
        if now_s - self._last_read_s >= CALLERS_POLL_S:
            self._last_read_s = now_s
            self._by_key = self._read()
        return self._by_key.get(key)

    def callback(self, domain: str, key: bytes) -> bool:
        """Return True if ZAP must accept a connection with that key."""
        return self.name_of(key.decode("ascii")) is not None

    def _read(self) -> dict[str, str]:
        today = datetime.now(UTC).date()
        found: dict[str, str] = {}
        shared: set[str] = set()
        names = self._names
        if names is None:
            names = tuple(path.parent.name for path in self._home.glob("*/public_keys"))
        for name in names:
            for key in _valid_keys(self._home / name / "public_keys", today):
                if found.setdefault(key, name) != name:
                    shared.add(key)  # of two names: the owner would be ambiguous
        return {key: name for key, name in found.items() if key not in shared}


def _valid_keys(path: Path, today: date) -> list[str]:
    """Return the keys of a public file that have not expired; an empty list if it can't be read."""
    try:
        with path.open("rb") as file:
            text = file.read(_FILE_SIZE_BYTES_MAX).decode("ascii")
    except (OSError, UnicodeDecodeError):
        return []
    keys = []
    expires: date | None = None
    for line in map(str.strip, text.split("\n")):
        if KEY.fullmatch(line):
            if expires is None or today <= expires:
                keys.append(line)
            expires = None
        elif match := _EXPIRES.fullmatch(line):
            try:
                expires = date.fromisoformat(match[1])
            except ValueError:
                expires = date.min
    return keys
