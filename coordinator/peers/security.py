"""Whom an instance talks to: its keys, those of its peers, and the list of those who may call it.

All of it is looked at again and again, so that keys change without a restart. A peer that had keys once is never called
in plain again, and what cannot be read leaves in use what was there before.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import date

from msgspec import structs

from immortal.coordinator.config import InstanceSettings, split_tcp
from immortal.coordinator.config.socket_addresses import is_loopback
from immortal.coordinator.core.permissions import Permission
from immortal.coordinator.instances.registry import Registry
from immortal.coordinator.messenger import KeyPair, Role, Security
from immortal.coordinator.peers import keys
from immortal.coordinator.peers.keys import KeysError, PublicFile
from immortal.protocol.errors import ImmortalError

LOOK_NS = 1_000_000_000  # between two looks
KEY_FILES_PER_POLL = 32  # public files that each look has a glance at: what it costs does not grow with the registry

_Version = tuple[int, int, int]


class Keyring:
    """The public keys of the instances of a registry, and those that one instance's settings give."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._files: dict[str, str] = {}
        self._read: dict[str, tuple[_Version, PublicFile]] = {}
        self._watched: list[tuple[str, _Version | None]] = []  # public files, as they were when all were read
        self._next = 0  # of these, for the next glance

    def keys_of(self, settings: InstanceSettings, name: str) -> tuple[str, ...]:
        """As ``settings`` give them for ``name``, else as its public file does. Raises KeysError."""
        given = settings.peer_keys.get(name) or settings.client_keys.get(name)
        return given or tuple(public.key for public in self._file(name).keys)

    def unexpired(self, name: str, found: tuple[str, ...], today: date) -> tuple[str, ...]:
        """Of its keys ``found`` those that have not expired, as its public file says, which was looked at just now."""
        read = self._read.get(name)
        expired = {public.key for public in read[1].keys if public.has_expired(today)} if read is not None else ()
        return tuple(key for key in found if key not in expired) if expired else found

    def role_of(self, settings: InstanceSettings, registered: Collection[str], name: str) -> Role:
        """What ``name`` is: as the settings, the registry, or its public file say. Raises KeysError.

        Who has secrets in the registry folder and is no instance of it was made a client before files said so. Of a
        public file alone, which was copied here, an instance is taken to be the owner, as it always was.
        """
        if name in settings.client_keys:
            return Role.CLIENT
        if name in settings.peer_keys or name in registered:
            return Role.INSTANCE
        if (role := self._file(name).role) is not None:
            return role
        return Role.CLIENT if keys.secret_path(self._registry.home / name).exists() else Role.INSTANCE

    def callers(self, settings: InstanceSettings, registered: Iterable[str]) -> list[str]:
        """Of the instances of the registry and those that ``settings`` name, who may call the instance of these."""
        names = settings.allow
        if names is None:
            clients = {*self._registry.client_names(registered), *settings.client_keys}
            names = tuple(sorted({*registered, *clients, *settings.peer_keys}))
        return [name for name in names if name != settings.name]

    def watch(self, names: Iterable[str]) -> None:
        """All that was read is of the files of ``names`` as they are now."""
        self._watched = [(path, _version(path)) for path in map(self._path, names)]

    def has_changed(self) -> bool:
        """Whether one of the next few files that are watched is another one by now: all have their turn."""
        for _ in range(min(KEY_FILES_PER_POLL, len(self._watched))):
            self._next = (self._next + 1) % len(self._watched)
            path, version = self._watched[self._next]
            if _version(path) != version:
                return True
        return False

    def _path(self, name: str) -> str:
        file = self._files.get(name)
        if file is None:
            file = self._files[name] = str(keys.public_path(self._registry.home / name))
        return file

    def _file(self, name: str) -> PublicFile:
        version = _version(self._path(name))
        if version is None:
            return PublicFile()
        known = self._read.get(name)
        if known is None or known[0] != version:
            known = self._read[name] = (version, keys.read_public_file(self._registry.home / name))
        return known[1]


def _version(path: str) -> _Version | None:
    """None where there is no such file."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


class PeerSecurity:
    """The messenger's security, kept up to date for one running instance. Clocks are monotonic, in ns.

    ``names_at`` says which peers are called at an endpoint. Raises KeysError for keys that cannot be used, and where
    keys are required and there are none.
    """

    def __init__(
        self,
        settings: InstanceSettings,
        registry: Registry,
        names_at: Callable[[str], Iterable[str]],
        warn: Callable[[str], None],
        today: Callable[[], date] = keys.today,
    ) -> None:
        self._settings = settings
        self._registry = registry
        self._names_at = names_at
        self._warn = warn
        self._today = today
        self._book = Keyring(registry)
        self._own: KeyPair | None = None
        self._pairs: tuple[KeyPair, ...] = ()
        self._known: dict[str, tuple[str, ...]] = {}  # of each peer, the last keys that it had
        self._known_roles: dict[str, Role] = {}
        self._told: set[str] = set()
        self._told_now: set[str] = set()
        self._next_look_ns = 0
        self._barriers: dict[tuple[str, ...], str | None] = {}
        self._looked_at: tuple[object, ...] = ()  # what the last look had found, but for public files
        self.security: Security | None = self._look(check_start(settings))

    @property
    def permissions(self) -> Mapping[str, Permission]:
        """Of those who may not do everything, by name, as of the last look."""
        return self._settings.permissions

    def next_deadline_ns(self) -> int:
        """When :meth:`look` is to be called next."""
        return self._next_look_ns

    def schedule_check(self) -> None:
        """The next :meth:`look` is due."""
        self._next_look_ns = 0

    def look(self, now_ns: int) -> bool:
        """Look again if it is time: whether ``security`` is another one."""
        if now_ns < self._next_look_ns:
            return False
        self._next_look_ns = now_ns + LOOK_NS
        self._barriers.clear()
        before_told, self._told, self._told_now = self._told, self._told_now, set()
        pairs: tuple[KeyPair, ...] = ()
        try:
            settings = self._registry.load(self._settings.name)
            self._settings = structs.replace(
                self._settings,
                allow=settings.allow,
                permissions=settings.permissions,
                peer_keys=settings.peer_keys,
                client_keys=settings.client_keys,
            )
            pairs = keys.read_pairs(settings.folder)
        except ImmortalError as error:
            self._tell(f"keys and callers as they were stay in use: {error}")
        if not self._told and not self._told_now and not self._may_differ(pairs):
            self._told = before_told
            return False
        before, known_before = self.security, dict(self._known)
        try:
            found = self._look(pairs)
        except ImmortalError as error:
            self._tell(f"keys and callers as they were stay in use: {error}")
            return False
        if found is None or before is None:
            self.security = found
            return found is not before
        self.security = found
        now = found.own, found.callers, found.roles, self._known
        return now != (before.own, before.callers, before.roles, known_before)

    def _may_differ(self, pairs: tuple[KeyPair, ...]) -> bool:
        """Whether a look at all keys may find what the last one did not.

        Who changes a public file by the command line touches the folder of the registry, which tells all; what is
        changed by hand is seen as its file has its turn.
        """
        return self._looked_at != self._state(pairs) or self._book.has_changed()

    def _state(self, pairs: tuple[KeyPair, ...]) -> tuple[object, ...]:
        settings = self._settings
        given = settings.allow, settings.permissions, settings.peer_keys, settings.client_keys
        return _version(str(self._registry.home)), self._today(), pairs, given

    def barrier(self, endpoint: str) -> str | None:
        """Why ``endpoint`` must not be connected to as things are; None if it may."""
        asked = (endpoint, *self._names_at(endpoint))  # for each frame: as all else, looked at once a second
        if asked not in self._barriers:
            self._barriers[asked] = self._barrier(endpoint)
        return self._barriers[asked]

    def _barrier(self, endpoint: str) -> str | None:
        if expired := [name for name in self._names_at(endpoint) if self._has_expired(name)]:
            return f"the keys of {', '.join(expired)} have expired: rotate them, and bring the public file here"
        has_keys = bool(self._servers(endpoint))
        if has_keys and self._own is not None:
            return None
        if not has_keys and (self._settings.insecure or is_local(endpoint)):
            return None
        name = self._settings.name
        names = ", ".join(self._names_at(endpoint))
        if has_keys:
            return f"{names} takes only callers with keys, and {name!r} has none: 'immortal keys {name} --make'"
        if self._own is None:
            return f"{endpoint} is not on this machine, and {name!r} has no keys: 'immortal keys {name} --make'"
        return (
            f"no public key of {names} is known, which {endpoint} must have since it is not on this machine: write it "
            f"into {keys.public_path(self._registry.home / names)}, or under [peer_keys] in {self._registry.path(name)}"
        )

    def _look(self, pairs: tuple[KeyPair, ...]) -> Security | None:
        if pairs:
            self._own, self._pairs = pairs[0], pairs
        # A client that can read the secrets of the instance needs none of its own.
        callers = {pair.public: self._settings.name for pair in self._pairs}
        if self._registry.copy is not None and self._pairs:  # who has those of another machine is its owner there
            elsewhere = self._keys_of(self._settings.name)
            callers |= dict.fromkeys(self._let_in(self._settings.name, elsewhere), self._settings.name)
        roles = dict.fromkeys(callers, Role.OWNER)
        shared: set[str] = set()
        self._looked_at = self._state(pairs)
        registered = frozenset(self._registry.names())
        allowed = set(self._book.callers(self._settings, registered))
        names = {*allowed, *registered, *self._settings.peer_keys, *self._settings.client_keys, *self._known}
        self._book.watch(names | self._registry.folder_names())
        for name in names:
            found = self._keys_of(name)
            if found:
                self._known[name] = found
                found = self._let_in(name, found)
            if name not in allowed or not found:
                continue
            role = self._role_of(name, registered)
            for key in found:
                if callers.setdefault(key, name) != name:
                    shared.add(key)
                roles.setdefault(key, role)
        for key in shared:
            self._tell(f"the public key {key} is given for several instances, and so let in for none")
            del callers[key]
        return None if self._own is None else Security(self._own, callers, self._servers, roles)

    def _let_in(self, name: str, found: tuple[str, ...]) -> tuple[str, ...]:
        """Of the keys ``found`` those that have not expired."""
        left = self._book.unexpired(name, found, self._today())
        if not left:
            self._tell(f"the keys of {name!r} have expired: it is not let in, nor called")
        return left

    def _has_expired(self, name: str) -> bool:
        """All its keys have."""
        found = self._keys_of(name)
        return bool(found) and not self._let_in(name, found)

    def _role_of(self, name: str, registered: Collection[str]) -> Role:
        try:
            role = self._known_roles[name] = self._book.role_of(self._settings, registered, name)
        except KeysError:  # told with its keys
            return self._known_roles.get(name, Role.INSTANCE)
        return role

    def _keys_of(self, name: str) -> tuple[str, ...]:
        try:
            return self._book.keys_of(self._settings, name)
        except KeysError as error:
            self._tell(f"the keys of {name!r} as they were stay in use: {error}")
            return self._known.get(name, ())

    def _servers(self, endpoint: str) -> tuple[str, ...]:
        return tuple(key for name in self._names_at(endpoint) for key in self._known.get(name) or self._keys_of(name))

    def _tell(self, problem: str) -> None:
        """Warn, once for as long as it lasts."""
        self._told_now.add(problem)
        if problem not in self._told:
            self._warn(problem)


def check_start(settings: InstanceSettings) -> tuple[KeyPair, ...]:
    """The instance's own pairs. Raises KeysError for those that cannot be used, and where there must be some."""
    pairs = keys.read_pairs(settings.folder)
    if pairs or settings.insecure or is_local(settings.peer):
        return pairs
    raise KeysError(
        f"{settings.name!r} is reached at {settings.peer}, also from other machines, and has no keys: 'immortal keys "
        f"{settings.name} --make' makes them; '--insecure' starts it without, open to whoever reaches that address"
    )


def insecurity_warning(settings: InstanceSettings, security: Security | None) -> str | None:
    """What is to be said at each start of an instance that is run with ``insecure``."""
    if not settings.insecure:
        return None
    if security is None:
        return (
            f"INSECURE, as asked for: {settings.peer} takes input from whoever reaches it, and nothing to or from "
            f"peers is encrypted; 'immortal keys {settings.name} --make' and a start without 'insecure' end that"
        )
    return "INSECURE, as asked for: peers of which no key is known are called without encryption, wherever they are"


@functools.lru_cache(maxsize=1024)  # asked for each frame
def is_local(endpoint: str) -> bool:
    """Whether only this machine reaches ``endpoint``."""
    address = split_tcp(endpoint)
    return endpoint.startswith(("ipc://", "inproc://")) or (address is not None and is_loopback(address[0]))
