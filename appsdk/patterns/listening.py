"""The socket of a plain server of a pattern: bound, and with keys only for those who have some."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

import zmq

from immortal.appsdk.client.errors import NotConnectable
from immortal.appsdk.client.places import is_local, pair_of
from immortal.appsdk.patterns.callers import Callers, Guard, NoKeysError


class ListenError(Exception):
    """Nobody can be heard there, with a reason for the user."""


class Listener:
    """A ROUTER at ``endpoint`` from here to :meth:`close`, with ZeroMQ's ``options`` by their numbers.

    ``identity``: whose keys in the registry folder ``home`` are shown. Then only callers with keys of that folder get
    in: ``names``; None: all that have some. "": everybody does that reaches ``endpoint``, which is on this machine
    then, unless ``insecure`` is True. Raises ListenError.
    """

    def __init__(
        self,
        endpoint: str,
        options: Mapping[zmq.SocketOption, int],
        *,
        home: Path,
        identity: str = "",
        names: Sequence[str] | None = None,
        insecure: bool = False,
    ) -> None:
        self.callers: Callers | None = None  # None: everybody
        self._guard: Guard | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        try:
            if identity:
                self._secure(home, identity, names)
            elif not insecure and not _is_local(endpoint):
                raise ListenError(
                    f"{endpoint} is not on this machine only: it needs keys, with identity=NAME ('immortal keys NAME "
                    f"--make' makes some), or insecure=True, which lets everybody in"
                )
            self.endpoint = self._bind(endpoint, options)
        except BaseException:
            self.close(0)
            raise

    def _secure(self, home: Path, identity: str, names: Sequence[str] | None) -> None:
        try:
            pair = pair_of(home / identity, identity)
        except (NotConnectable, PermissionError) as error:
            raise ListenError(f"the keys of {identity!r} can't be used: {error}") from None
        if pair is None:
            raise ListenError(
                f"{identity!r} has no keys in {home / identity}: 'immortal keys {identity} --make --client' makes them"
            )
        try:
            self.callers = Callers(home, None if names is None else [identity, *names])
        except NoKeysError as error:
            raise ListenError(str(error)) from None
        self._guard = Guard(self._context, pair, self.callers)
        self._guard.protect(self.socket)

    def _bind(self, endpoint: str, options: Mapping[zmq.SocketOption, int]) -> str:
        for option, value in {zmq.TCP_KEEPALIVE: 1, zmq.IPV6: int("[" in endpoint), **options}.items():
            self.socket.setsockopt(option, value)
        port = endpoint.rpartition(":")[2]
        if port.isdigit() and int(port) > 65535:
            raise ListenError(f"can't listen at {endpoint!r}: ports end at 65535")  # ZeroMQ would take another
        if _somebody_listens(endpoint):
            raise ListenError(f"can't listen at {endpoint!r}: it is in use")  # ZeroMQ would take it from its owner
        try:
            self.socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise ListenError(
                f"can't listen at {endpoint!r}: {error.strerror}; tcp://ADDRESS:PORT of this machine (PORT may be *), "
                f"or ipc://PATH was expected"
            ) from None
        return self.socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")

    def caller_of(self, part: zmq.Frame) -> str:
        """Whose key ``part`` came with; "": without keys. Raises PermissionError: nobody's any more."""
        if self.callers is None:
            return ""
        key = part.get("User-Id")
        name = self.callers.name_of(key if isinstance(key, str) else "")
        if name is None:
            raise PermissionError(f"a message with the key {key}, which may not call here any more")
        return name

    def close(self, linger_ms: int) -> None:
        self.socket.close(linger=linger_ms)
        if self._guard is not None:
            self._guard.close()
        self._context.term()


def _is_local(endpoint: str) -> bool:
    """Raises ListenError for what is no endpoint."""
    try:
        return is_local(endpoint.removesuffix("*") + "0" if endpoint.endswith(":*") else endpoint)
    except NotConnectable as error:
        raise ListenError(str(error)) from None


def _somebody_listens(endpoint: str) -> bool:
    """At this Unix socket; False for other endpoints."""
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
