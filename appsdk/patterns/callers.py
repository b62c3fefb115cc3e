"""Who may talk to a server with keys: names with public keys in the registry folder, which is looked at again."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from datetime import UTC, date, datetime
from pathlib import Path

import zmq
from zmq.auth.thread import ThreadAuthenticator

from immortal.appsdk.client.places import KEY, KeyPair

CALLERS_LOOK_S = 1.0  # for new and removed keys, as instances do

ZAP_DOMAIN = "patterns"
_EXPIRES = re.compile(r";.*\bexpires: (\d{4}-\d\d-\d\d)\s*")
_FILE_SIZE_BYTES_MAX = 4096  # far more than two keys and a few comments


class NoKeysError(Exception):
    """Of somebody who may call."""


class Callers:
    """``names``: those that may call, each with a file HOME/NAME/public_keys; None: all that have one.

    Raises NoKeysError.
    """

    def __init__(self, home: Path, names: Sequence[str] | None) -> None:
        self._home = home
        self._names = None if names is None else tuple(names)
        self._by_key: dict[str, str] = {}
        self._looked_s = float("-inf")
        for name in names or ():
            if not (home / name / "public_keys").exists():
                raise NoKeysError(
                    f"{name!r} may call, and there are no keys of it in {home / name}: "
                    f"'immortal keys {name} --make --client' makes some, or copy its public_keys there"
                )

    def name_of(self, key: str) -> str | None:
        """Whose ``key`` is (Z85), as the files say within a second; None: of nobody who may call."""
        now_s = time.monotonic()
        if now_s - self._looked_s >= CALLERS_LOOK_S:
            self._looked_s = now_s
            self._by_key = self._read()
        return self._by_key.get(key)

    def callback(self, domain: str, key: bytes) -> bool:
        """For ZAP: whether a connection with that key may be made."""
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
                    shared.add(key)  # of two names: it would be either
        return {key: name for key, name in found.items() if key not in shared}


def _valid_keys(path: Path, today: date) -> list[str]:
    """Of a public file, less those that have expired; none where it can't be read."""
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


class Guard:
    """Lets into ``socket``, which is not bound yet, only connections with keys of ``callers``."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], pair: KeyPair, callers: Callers) -> None:
        self._pair = pair
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.configure_curve_callback(domain=ZAP_DOMAIN, credentials_provider=callers)
        self._authenticator.start()

    def protect(self, socket: zmq.Socket[bytes]) -> None:
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._pair.secret.encode())
        socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN.encode())
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without a guard nobody gets in, instead of everybody

    def close(self) -> None:
        self._authenticator.stop()
