"""Security of an instance: its keys, its peers' keys, and the list of allowed callers.

All of it is polled, so that keys change without a restart. A peer that had keys once is never called without encryption
again. If a file cannot be read, its earlier contents stay in use.
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
from immortal.protocol.limits import ARGUMENTS_SIZE_MIB_MAX

POLL_NS = 1_000_000_000  # between two polls
KEY_FILES_PER_POLL = 32  # public files checked by each poll, so that its cost does not grow with the registry

_Version = tuple[int, int, int]


class Keyring:
    """Public keys of the instances of a registry, and those in one instance's settings."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._files: dict[str, str] = {}
        self._read: dict[str, tuple[_Version, PublicFile]] = {}
        self._watched: list[tuple[str, _Version | None]] = []  # versions of the public files when all were last read
        self._next = 0  # index of the file checked next

    def keys_of(self, settings: InstanceSettings, name: str) -> tuple[str, ...]:
        """Return the keys of ``name``: those that ``settings`` give, else those of its public file. Raises
        KeysError."""
        given = settings.peer_keys.get(name) or settings.client_keys.get(name)
        return given or tuple(public.key for public in self._file(name).keys)

    def unexpired(self, name: str, public_keys: tuple[str, ...], today: date) -> tuple[str, ...]:
        """Return the ``public_keys`` of ``name`` that have not expired; its public file gives the dates."""
        read = self._read.get(name)
        expired = {public.key for public in read[1].keys if public.has_expired(today)} if read is not None else ()
        return tuple(key for key in public_keys if key not in expired) if expired else public_keys

    def role_of(self, settings: InstanceSettings, registered: Collection[str], name: str) -> Role:
        """Return the role of ``name`` by the settings, the registry, or its public file. Raises KeysError.

        A name that has secrets in the registry folder, but no settings there, is a client. If there is only a public
        file without a role, which somebody copied here, its owner counts as an instance.
        """
        if name in settings.client_keys:
            return Role.CLIENT
        if name in settings.peer_keys or name in registered:
            return Role.INSTANCE
        if (role := self._file(name).role) is not None:
            return role
        return Role.CLIENT if keys.secret_path(self._registry.home / name).exists() else Role.INSTANCE

    def callers(self, settings: InstanceSettings, registered: Iterable[str]) -> list[str]:
        """Return the names that may call the instance of ``settings``: those of ``allow``, else all that are known."""
        names = settings.allow
        if names is None:
            clients = {*self._registry.client_names(registered), *settings.client_keys}
            names = tuple(sorted({*registered, *clients, *settings.peer_keys}))
        return [name for name in names if name != settings.name]

    def watch(self, names: Iterable[str]) -> None:
        """Remember the present versions of the public files of ``names``, for :meth:`has_changed`."""
        self._watched = [(path, _version(path)) for path in map(self._path, names)]

    def has_changed(self) -> bool:
        """Check the next few watched files, in turn; return True if one of them has changed."""
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
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


class PeerSecurity:
    """Keeps the messenger's keys and allowed callers up to date for a running instance. Times: monotonic clock, ns.

    ``names_at``: returns the peers that are called at an endpoint. Raises KeysError for keys that cannot be used, and
    if required keys are missing.
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
        self._keyring = Keyring(registry)
        self._own: KeyPair | None = None
        self._pairs: tuple[KeyPair, ...] = ()
        self._known_keys: dict[str, tuple[str, ...]] = {}  # last keys that were read, by peer
        self._known_roles: dict[str, Role] = {}
        self._warned: set[str] = set()
        self._warned_now: set[str] = set()
        self._next_poll_ns = 0
        self._block_reasons: dict[tuple[str, ...], str | None] = {}
        self._last_state: tuple[object, ...] = ()  # all that the last poll read, except public files
        self.security: Security | None = self._read_security(check_start(settings))

    @property
    def permissions(self) -> Mapping[str, Permission]:
        """Permissions of the restricted callers, by name, as of the last poll."""
        return self._settings.permissions

    def call_size_mib_max(self) -> int:
        """Return the largest ``rpc_limit_mb`` of this instance and of its allowed callers. Any thread may call it.

        A caller that is not registered here can have any limit; without keys, anybody may call.
        """
        security = self.security
        if security is None:
            return ARGUMENTS_SIZE_MIB_MAX
        names = {name for key, name in security.callers.items() if security.roles.get(key) is Role.INSTANCE}
        try:
            return max([self._settings.rpc_limit_mb, *(self._registry.load(name).rpc_limit_mb for name in names)])
        except ImmortalError:
            return ARGUMENTS_SIZE_MIB_MAX

    def next_deadline_ns(self) -> int:
        """Return the time of the next :meth:`poll`."""
        return self._next_poll_ns

    def schedule_check(self) -> None:
        """Make the next :meth:`poll` due."""
        self._next_poll_ns = 0

    def poll(self, now_ns: int) -> bool:
        """Read keys and callers again if that is due; return True if ``security`` has changed."""
        if now_ns < self._next_poll_ns:
            return False
        self._next_poll_ns = now_ns + POLL_NS
        self._block_reasons.clear()
        before_warned, self._warned, self._warned_now = self._warned, self._warned_now, set()
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
            self._warn_once(f"keys and callers as they were stay in use: {error}")
        # A command that changes a public file touches the registry's folder, so the change is seen at once; a change by
        # hand is seen when it is the file's turn.
        may_differ = self._last_state != self._state(pairs) or self._keyring.has_changed()
        if not self._warned and not self._warned_now and not may_differ:
            self._warned = before_warned
            return False
        before, known_before = self.security, dict(self._known_keys)
        try:
            found = self._read_security(pairs)
        except ImmortalError as error:
            self._warn_once(f"keys and callers as they were stay in use: {error}")
            return False
        if found is None or before is None:
            self.security = found
            return found is not before
        self.security = found
        now = found.own, found.callers, found.roles, self._known_keys
        return now != (before.own, before.callers, before.roles, known_before)

    def _state(self, pairs: tuple[KeyPair, ...]) -> tuple[object, ...]:
        settings = self._settings
        given = settings.allow, settings.permissions, settings.peer_keys, settings.client_keys
        return _version(str(self._registry.home)), self._today(), pairs, given

    def block_reason(self, endpoint: str) -> str | None:
        """Return the reason why ``endpoint`` must not be connected to now; None if there is none."""
        asked = (endpoint, *self._names_at(endpoint))  # called for each frame, so cached until the next poll
        if asked not in self._block_reasons:
            self._block_reasons[asked] = self._find_block_reason(endpoint)
        return self._block_reasons[asked]

    def _find_block_reason(self, endpoint: str) -> str | None:
        if expired := [name for name in self._names_at(endpoint) if self._has_expired(name)]:
            return f"the keys of {', '.join(expired)} have expired: rotate them, and bring the public file here"
        has_keys = bool(self._server_keys(endpoint))
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

    def _read_security(self, pairs: tuple[KeyPair, ...]) -> Security | None:
        if pairs:
            self._own, self._pairs = pairs[0], pairs
        # A client that can read the secrets of the instance needs no keys of its own.
        callers = {pair.public: self._settings.name for pair in self._pairs}
        if self._registry.copy is not None and self._pairs:  # keys of this instance made on other machines
            elsewhere = self._keys_of(self._settings.name)
            callers |= dict.fromkeys(self._unexpired_keys(self._settings.name, elsewhere), self._settings.name)
        roles = dict.fromkeys(callers, Role.OWNER)
        shared: set[str] = set()
        self._last_state = self._state(pairs)
        registered = frozenset(self._registry.names())
        allowed = set(self._keyring.callers(self._settings, registered))
        names = {*allowed, *registered, *self._settings.peer_keys, *self._settings.client_keys, *self._known_keys}
        self._keyring.watch(names | self._registry.folder_names())
        for name in names:
            found = self._keys_of(name)
            if found:
                self._known_keys[name] = found
                found = self._unexpired_keys(name, found)
            if name not in allowed or not found:
                continue
            role = self._role_of(name, registered)
            for key in found:
                if callers.setdefault(key, name) != name:
                    shared.add(key)
                roles.setdefault(key, role)
        for key in shared:
            self._warn_once(f"the public key {key} is given for several instances, and so let in for none")
            del callers[key]
        return None if self._own is None else Security(self._own, callers, self._server_keys, roles)

    def _unexpired_keys(self, name: str, public_keys: tuple[str, ...]) -> tuple[str, ...]:
        """Return the ``public_keys`` of ``name`` that have not expired; warn if none is left."""
        left = self._keyring.unexpired(name, public_keys, self._today())
        if not left:
            self._warn_once(f"the keys of {name!r} have expired: it is not let in, nor called")
        return left

    def _has_expired(self, name: str) -> bool:
        found = self._keys_of(name)
        return bool(found) and not self._unexpired_keys(name, found)

    def _role_of(self, name: str, registered: Collection[str]) -> Role:
        try:
            role = self._known_roles[name] = self._keyring.role_of(self._settings, registered, name)
        except KeysError:  # warned of when its keys were read
            return self._known_roles.get(name, Role.INSTANCE)
        return role

    def _keys_of(self, name: str) -> tuple[str, ...]:
        try:
            return self._keyring.keys_of(self._settings, name)
        except KeysError as error:
            self._warn_once(f"the keys of {name!r} as they were stay in use: {error}")
            return self._known_keys.get(name, ())

    def _server_keys(self, endpoint: str) -> tuple[str, ...]:
        return tuple(
            key for name in self._names_at(endpoint) for key in self._known_keys.get(name) or self._keys_of(name)
        )

    def _warn_once(self, problem: str) -> None:
        """Warn of a problem, but only once while it lasts."""
        self._warned_now.add(problem)
        if problem not in self._warned:
            self._warn(problem)


def check_start(settings: InstanceSettings) -> tuple[KeyPair, ...]:
    """Read the instance's own key pairs. Raises KeysError if they can't be used, or are missing and required."""
    pairs = keys.read_pairs(settings.folder)
    if pairs or settings.insecure or is_local(settings.peer):
        return pairs
    raise KeysError(
        f"{settings.name!r} is reached at {settings.peer}, also from other machines, and has no keys: 'immortal keys "
        f"{settings.name} --make' makes them; '--insecure' starts it without, open to whoever reaches that address"
    )


def insecurity_warning(settings: InstanceSettings, security: Security | None) -> str | None:
    """Return the warning to give at the start of an instance with the setting ``insecure``; None without it."""
    if not settings.insecure:
        return None
    if security is None:
        return (
            f"INSECURE, as asked for: {settings.peer} takes input from whoever reaches it, and nothing to or from "
            f"peers is encrypted; 'immortal keys {settings.name} --make' and a start without 'insecure' end that"
        )
    return "INSECURE, as asked for: peers of which no key is known are called without encryption, wherever they are"


@functools.lru_cache(maxsize=1024)  # called for each frame
def is_local(endpoint: str) -> bool:
    """Return True if only this machine reaches ``endpoint``."""
    address = split_tcp(endpoint)
    return endpoint.startswith(("ipc://", "inproc://")) or (address is not None and is_loopback(address[0]))
