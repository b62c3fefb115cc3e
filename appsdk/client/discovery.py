"""Discovery of an instance: endpoints and keys, from the registry folder or given; and whether its processes run.

The registry folder is that of ``immortal register``: HOME/NAME.toml has the endpoint, HOME/NAME/public_keys the keys
that the instance can have, HOME/WHO/keys/pairs the secret keys of a caller WHO. For a registry in a database this
folder is the machine's copy.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, takewhile
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from immortal.appsdk.client.errors import NotConnectable
from immortal.protocol import shared_registry
from immortal.protocol.files import (
    COORDINATOR_FILE_NAME,
    SUPERVISOR_FILE_NAME,
    ProcessFile,
    describe_open_access,
    read_living,
)
from immortal.protocol.shared_registry import Copy, SharedHomeError

IDENTITY_VARIABLE = "IMMORTAL_IDENTITY"
_TCP = re.compile(r"tcp://(?P<host>\[[^\]]+\]|[^:/\[\]]+):(?P<port>\d{1,5})")
KEY = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")


@dataclass(frozen=True, slots=True)
class KeyPair:
    """CURVE keys of a client, in Z85. No text of this object shows the secret key."""

    public: str
    secret: str = field(repr=False)


class Places(Struct, frozen=True):
    """Endpoints of one instance, to be tried in turn, and the server keys that it can have: () without CURVE.

    ``folder``: where its processes note that they run; None if that is on another machine, or not known. ``refusal``:
    why it refuses this caller, as far as its settings show.
    """

    endpoints: tuple[str, ...]
    server_keys: tuple[str, ...]
    pair: KeyPair | None
    folder: Path | None = None
    refusal: str = ""


class Finder(Struct, frozen=True):
    """Finder of an instance's endpoints and keys. It looks them up each time: an instance can move, keys can change."""

    name: str
    home: str | os.PathLike[str] | None = None
    endpoints: Sequence[str] = ()
    server_keys: Sequence[str] = ()
    identity: str | None = None
    insecure: bool = False

    def shards(self) -> list[Finder]:
        """Return the finder of each shard of a keyed class that is registered: NAME-1, NAME-2 ...; else this finder.

        Raises NotConnectable."""
        home = home_of(self.home)
        if self.endpoints or (home / f"{self.name}.toml").exists():
            return [self]
        names = takewhile(lambda name: (home / f"{name}.toml").exists(), (f"{self.name}-{n}" for n in count(1)))
        return [replace(self, name=name) for name in names] or [self]

    def find(self) -> Places:
        """Return the endpoints and keys of the instance. Raises NotConnectable."""
        home = home_of(self.home)
        for folder in (home, home / self.name):
            if (problem := describe_open_access(folder)) is not None:
                raise NotConnectable(problem)
        registered = {} if self.endpoints else _settings(home, self.name)
        endpoints = tuple(self.endpoints) or (_endpoint(home, self.name, registered),)
        keys = tuple(self.server_keys) or _public_keys(home / self.name / "public_keys")
        pair = self._pair(home) if keys else None
        for endpoint in endpoints:
            if not is_local(endpoint) and not keys and not self.insecure:
                raise NotConnectable(
                    f"{endpoint} is not on this machine and no public key of {self.name!r} is known: write it into "
                    f"{home / self.name / 'public_keys'}, or give server_keys=[...] (insecure=True calls in plain)"
                )
        here = bool(registered) and is_local(endpoints[0]) and not (home / shared_registry.ORIGIN_FILE_NAME).exists()
        refusal = self._refusal(home, registered) if keys else ""
        return Places(endpoints, keys, pair, (home / self.name).absolute() if here else None, refusal)

    def watch_registry(self) -> RegistryWatch | None:
        """Watch the registry for changes of the instance; return None if only another :meth:`find` can tell.

        Raises NotConnectable."""
        if self.endpoints:
            return None
        copy = _copy_of(home_of(self.home))
        return None if copy is None else RegistryWatch(self, copy)

    @property
    def caller(self) -> str | None:
        """Identity whose keys the client uses; None: the instance's own."""
        return self.identity or os.environ.get(IDENTITY_VARIABLE)

    def _refusal(self, home: Path, registered: Mapping[str, Any]) -> str:
        allowed, caller = registered.get("allow"), self.caller
        if not isinstance(allowed, list | dict) or caller in (None, self.name, *allowed):
            return ""
        return (
            f"{self.name!r} takes no calls of {caller!r}: 'allow' in {home / self.name}.toml names "
            f"{', '.join(map(str, allowed)) or 'nobody'}"
        )

    def _pair(self, home: Path) -> KeyPair:
        """Return the key pair of the identity; without one the instance's own, which only its operator can read."""
        identity = self.caller
        if identity not in (None, self.name) and (home / f"{identity}.toml").exists():
            raise NotConnectable(
                f"{identity!r} is an instance, whose keys no client may show: make some for this client with "
                f"'immortal keys WHO --make --client', and say identity=\"WHO\""
            )
        if identity is not None:
            pair = pair_of(home / identity, identity)
            if pair is not None:
                return pair
            raise NotConnectable(
                f"{identity!r} has no keys in {home / identity}: 'immortal keys {identity} --make --client' makes them"
            )
        with contextlib.suppress(PermissionError):
            pair = pair_of(home / self.name, self.name)
            if pair is not None:
                return pair
        raise NotConnectable(
            f"{self.name!r} takes only callers with keys, and its own can't be read in {home / self.name}: make some "
            f"with 'immortal keys WHO --make --client', and say who calls with identity=\"WHO\" or "
            f"{IDENTITY_VARIABLE}=WHO"
        )


class RegistryWatch:
    """Watch on one instance in a registry in a database, until :meth:`close`."""

    def __init__(self, finder: Finder, copy: Copy) -> None:
        self._finder, self._copy = finder, copy
        self._changes = -1
        copy.start_sync()

    def has_moved(self, places: Places) -> bool:
        """Return True if the instance has other endpoints or keys than ``places``. Cheap while nothing changes."""
        if self._changes == self._copy.changes:
            return False
        self._changes = self._copy.changes
        try:
            found = self._finder.find()
        except NotConnectable:
            return False  # unchanged
        return (found.endpoints, found.server_keys) != (places.endpoints, places.server_keys)

    def close(self) -> None:
        self._copy.stop_sync()


def home_of(home: str | os.PathLike[str] | None) -> Path:
    """Return the registry folder; for a URL the copy on this machine. Raises NotConnectable."""
    try:
        return shared_registry.folder_of(home)
    except SharedHomeError as error:
        raise NotConnectable(str(error)) from None


def _copy_of(home: Path) -> Copy | None:
    try:
        return shared_registry.copy_of(home)
    except SharedHomeError as error:
        raise NotConnectable(str(error)) from None


def _settings(home: Path, name: str) -> dict[str, Any]:
    path = home / f"{name}.toml"
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        known = sorted(file.name.removesuffix(".toml") for file in home.glob("*.toml")) if home.is_dir() else []
        names = f"registered are {', '.join(known[:20])}" if known else "nothing is registered there"
        raise NotConnectable(
            f"there is no instance {name!r} in {home}: {names}; set {shared_registry.HOME_VARIABLE}, or say where it "
            f"is with endpoints=[...]"
        ) from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise NotConnectable(f"{path} cannot be read: {error}") from None


def _endpoint(home: Path, name: str, registered: Mapping[str, Any]) -> str:
    peer = registered.get("peer")
    if not isinstance(peer, str):
        path = home / f"{name}.toml"
        raise NotConnectable(f'{path} gives no endpoint: peer = "tcp://HOST:PORT" is missing')
    copy, log = _copy_of(home), registered.get("log")
    return (copy.endpoint(name, log) if copy is not None and isinstance(log, str) else None) or peer


def _public_keys(path: Path) -> tuple[str, ...]:
    try:
        lines = [line.strip() for line in path.read_text("ascii").split("\n")]
    except (FileNotFoundError, NotADirectoryError):
        return ()
    except (OSError, UnicodeDecodeError) as error:
        raise NotConnectable(f"the public keys in {path} cannot be read: {error}") from None
    return tuple(line for line in lines if KEY.fullmatch(line))


def pair_of(folder: Path, identity: str) -> KeyPair | None:
    """Return the key pair in use; None if there is none. Raises PermissionError."""
    path = folder / "keys" / "pairs"
    try:
        if path.stat().st_mode & 0o077:
            raise NotConnectable(f"{path} can be read by others: 'chmod 600 {path}', and change the keys")
        first = path.read_text("ascii").split("\n")[0]
    except (FileNotFoundError, NotADirectoryError):
        return None
    except PermissionError:
        raise
    except (OSError, UnicodeDecodeError) as error:
        raise NotConnectable(f"the keys in {path} cannot be read: {error}") from None
    public, _, secret = first.partition(" ")
    if not (KEY.fullmatch(public) and KEY.fullmatch(secret)):
        raise NotConnectable(f"{path} holds something else than key pairs")
    return KeyPair(public, secret)


def is_local(endpoint: str) -> bool:
    """Return True if only this machine can reach ``endpoint``. Raises NotConnectable if it is no endpoint."""
    if endpoint.startswith(("ipc://", "inproc://")):
        return True
    match = _TCP.fullmatch(endpoint)
    if match is None:
        raise NotConnectable(f'{endpoint!r} is no endpoint: "tcp://HOST:PORT" or "ipc://PATH" were expected')
    host = match["host"].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


# Whether an instance of this machine's registry folder runs, by the files of its processes there.


class ProcessStatus(Struct, frozen=True):
    """Status of an instance's processes. ``stopped``: an operator stopped it, or it was never started.

    ``problem``: why it does not answer; "" while it runs."""

    stopped: bool
    problem: str


_UNKNOWN = ProcessStatus(False, "")


def presence(folder: Path) -> ProcessStatus:
    """Return the status of the processes of the instance in ``folder``.

    A killed process leaves its file: it can be restarted at any moment."""
    name = folder.name
    files = [folder / SUPERVISOR_FILE_NAME, folder / COORDINATOR_FILE_NAME]
    try:
        if not any(map(_is_there, files)):
            return ProcessStatus(True, f"{name!r} does not run: 'immortal run {name}' starts it")
    except OSError:
        return _UNKNOWN  # this user can't read the folder
    supervisor, coordinator = (read_living(file, ProcessFile) for file in files)
    if coordinator is not None:
        return _UNKNOWN
    if supervisor is not None:
        return ProcessStatus(False, f"{name!r} is starting ('immortal status {name}')")
    return ProcessStatus(False, f"{name!r} was killed, and nobody has started it again: 'immortal run {name}'")


def _is_there(file: Path) -> bool:
    """Return True if ``file`` exists. Raises OSError if that is unknown, unlike ``exists()`` from Python 3.14 on."""
    try:
        file.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True
