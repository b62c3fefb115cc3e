"""Registry: a folder with a settings file for each instance, and its folder for log, runtime files and followers.

A registry of many machines is in a database; each machine's folder is a copy of it (immortal.protocol.shared_registry).

<home>/counter.toml             the settings
<home>/counter/                 log/, and the files that announce running processes (coordinator.json, supervisor.json)
<home>/counter/followers/1/     the first follower on this machine: app.sock, app_secret, control.sock, coordinator.json
<home>/counter/followers/2/     a second follower

A follower's folder belongs to the process that holds the lock in it. When the follower becomes the instance, peers and
operators reach it at the instance's addresses; its app stays connected at the folder's socket.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import socket
import stat
import tomllib
from collections.abc import Iterable, Iterator, Sequence, Set
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from immortal.coordinator.config import (
    LOG_KEY_FILE,
    AppAuth,
    ConfigError,
    InstanceSettings,
    check_instance_name,
    split_tcp,
)
from immortal.coordinator.config.settings_file import (
    check_settings,
    file_values,
    log_of,
    read_settings,
    settings_text,
    text_with,
    write_atomically,
)
from immortal.coordinator.config.socket_addresses import LOCALHOST, hosts_of
from immortal.coordinator.config.values import check_app
from immortal.coordinator.core.errors import LogError
from immortal.coordinator.log_url import is_in_folder, log_of_instance, split_url
from immortal.protocol import shared_registry
from immortal.protocol.errors import ImmortalError
from immortal.protocol.files import (
    PUBLIC_FILE_MODE,
    acquire_lock,
    describe_lock_holder,
    describe_open_access,
    make_folder,
    open_lock,
)
from immortal.protocol.safe_output import did_you_mean

HOME_VARIABLE = shared_registry.HOME_VARIABLE
HOME_DEFAULT = shared_registry.HOME_DEFAULT
_LOCK_FILE_NAME = ".lock"
PUBLIC_KEYS_FILE_NAME = "public_keys"  # here, as immortal.coordinator.peers.keys needs ZeroMQ, whose loading takes long
LOCK_TIMEOUT_S = 60.0  # a change takes milliseconds, and hundreds of instances may start at once
PORTS_VARIABLE = "IMMORTAL_PORTS"  # "7000-7099": the range of free ports to take, such as the one that a firewall opens
_PORT_LOWEST = 15000  # below are the ports that well-known services take
_PORT_HIGHEST = 65535
_PORT_TRIES_MAX = 500
_RANDOM = random.SystemRandom()


class RegistryError(ImmortalError):
    """Raised if the registry refuses a request, or can't be read or written."""


class UnknownInstanceError(RegistryError):
    """Raised if an instance is not registered under the given name."""


class Registry:
    """Registry of the instances in one folder. It reads settings again when their file has changed.

    ``home``: the folder, or the URL of a database: then this machine's copy is used, and ``copy`` is set. Raises
    SharedHomeError.
    """

    def __init__(self, home: str | os.PathLike[str]) -> None:
        self.home = shared_registry.folder_of(home)
        self.copy = shared_registry.copy_of(self.home)
        self._cache: dict[str, tuple[tuple[int, int, int], InstanceSettings]] = {}
        self._values: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {}  # file's version, unchecked values
        self._are_modes_checked = False  # the folder's modes were checked

    def path(self, name: str) -> Path:
        """Return the path of the settings file of ``name``."""
        return self.home / f"{name}.toml"

    def names(self) -> list[str]:
        """Return the names of all registered instances, sorted. Raises RegistryError for a folder that can't be read,
        or that others can write to."""
        self._refuse_open()
        return sorted(file.removesuffix(".toml") for file in self._files() if file.endswith(".toml"))

    def client_names(self, instances: Iterable[str]) -> list[str]:
        """Return the names of clients, sorted: they have keys here and are not in ``instances``. Raises RegistryError
        for an unreadable folder."""
        others = self.folder_names()
        others.difference_update(instances)
        return sorted(name for name in others if (self.home / name / PUBLIC_KEYS_FILE_NAME).exists())

    def folder_names(self) -> set[str]:
        """Return the names that can have a folder here. Raises RegistryError for an unreadable folder."""
        return {name for name in self._files() if not name.endswith(".toml")}

    def _files(self) -> list[str]:
        try:
            return [file for file in os.listdir(self.home) if not file.startswith(".")]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:  # for example, too many open files
            raise RegistryError(f"the registry folder {self.home} cannot be read: {error.strerror}") from None

    def load(self, name: str) -> InstanceSettings:
        """Return the settings of ``name``. Raises UnknownInstanceError, ConfigError; RegistryError as :meth:`names`."""
        check_instance_name(name)
        self._refuse_open()
        path = self.path(name)
        try:
            version = _version(path)
            cached = self._cache.get(name)
            if cached is not None and cached[0] == version:
                return cached[1]
            settings = read_settings(path, name)
        except (FileNotFoundError, NotADirectoryError):
            self._cache.pop(name, None)
            raise self._unknown_error(name) from None
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
        self._cache[name] = (version, settings)
        return settings

    def resolve(self, name: str) -> str:
        """Return the endpoint of the coordinator of ``name``. Raises UnknownInstanceError, ConfigError."""
        return self.load(name).peer

    def register(self, name: str, peer: str, *, with_log_key: bool = False, **given: Any) -> InstanceSettings:
        """Register a new instance and write its settings file. `*` as the port of ``peer`` takes a free one.

        ``given``: other settings, as attributes of InstanceSettings or as in a file; None means the file's word for it,
        such as "never", or else the default. "*" or 0 as ``app_port`` or ``app_send_port`` takes a free port; so does
        None as ``app_port`` if other settings need one (two ports, another host, a client of the base protocol).
        ``log`` is relative to the working directory. ``with_log_key``: a log in a folder gets a key, unless ``given``
        names one. (A log in a database gets none: other machines use it too, and would lack the key.)

        Raises ConfigError for a wrong value, RegistryError if the name is taken.
        """
        check_instance_name(name)
        if self.copy is not None:
            given = {"log": self.copy.url} | given
            _create_schema(self.copy.log_of(name))
        with self.locked():
            path = self.path(name)
            if path.exists():
                raise RegistryError(
                    f"the instance {name!r} is registered already, in {path}: 'immortal status {name}' shows it,"
                    f" 'immortal unregister {name}' removes it"
                )
            values = self._assign_ports({"peer": peer, **file_values(given)})
            if "log" in values and is_in_folder(values["log"]):
                values["log"] = os.path.abspath(split_url(values["log"])[1])
            elif "log" in values:
                values["log"] = log_of_instance(values["log"], name)
            if with_log_key and is_in_folder(values.get("log", "")):
                values.setdefault("log_key", LOG_KEY_FILE)
            settings = check_settings(values, name, path)
            peer_address = split_tcp(settings.peer)
            if peer_address is not None and peer_address[1] in (settings.app_port, settings.app_send_port):
                raise ConfigError(f"the app of {name!r} and its peers cannot both use port {peer_address[1]}")
            if not is_in_folder(settings.log):
                _require_backend(settings.log)
            self._refuse_shared_log(name, settings.log)
            write_text(path, settings_text(settings, log=settings.log if "log" in values else None))
        return settings

    def replace(self, name: str, text: str) -> InstanceSettings:
        """Replace the settings of an instance by ``text``, the whole text of its file. Raises ConfigError."""
        try:
            values = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"the new settings of {name!r} are no valid TOML: {error}") from None
        with self.locked():
            self.load(name)
            settings = check_settings(values, name, self.path(name), text)
            self._refuse_shared_log(name, settings.log)
            write_text(self.path(name), text)
        return self.load(name)

    def share(self, url: str) -> list[str]:
        """Move this registry into the database ``url``; the folder is a copy of it from then on. Return the names.

        Instances whose log is in the folder continue with it, on this machine alone. Raises ImmortalError.
        """
        names = self.names()
        for name in names:
            self.load(name)  # all of them, or none
        _create_schema(f"{url}#registry")
        with self.locked():
            names += self.client_names(names)
            files = {
                (name, part): path
                for name in names
                for part in (shared_registry.SETTINGS, shared_registry.PUBLIC_KEYS, shared_registry.UPGRADE)
                if (path := shared_registry.path_in(self.home, name, part)).exists()
            }
            self.copy = shared_registry.share(url, self.home, {key: path.read_text() for key, path in files.items()})
        return names

    @contextlib.contextmanager
    def synchronized(self) -> Iterator[None]:
        """Keep the copy of a shared registry up to date while the context is open."""
        with contextlib.nullcontext() if self.copy is None else self.copy.synchronized():
            yield

    def _assign_ports(self, values: dict[str, Any]) -> dict[str, Any]:
        """Replace each request for a free port in ``values`` by a port; return ``values``."""
        used_ports = self._find_used_ports()
        address = split_tcp(values["peer"])
        if address is not None and address[1] == 0:
            port = free_port((address[0],), used_ports)
            values["peer"] = values["peer"].removesuffix("*") + str(port)
            used_ports.add(port)
        elif address is not None:
            used_ports.add(address[1])
        if values.keys() & {"app_host", "app_send_port"} or values.get("app_auth") == AppAuth.NONE:
            values.setdefault("app_port", "*")
        keys = ("app_port", "app_send_port")
        used_ports.update(values[key] for key in keys if isinstance(values.get(key), int))
        for key in keys:
            if values.get(key) in (0, "*"):
                values[key] = free_port(hosts_of(values.get("app_host", LOCALHOST)), used_ports)
                used_ports.add(values[key])
        return values

    def remember_app(self, name: str, app: str) -> InstanceSettings:
        """Store ``app`` ("module:Class") as the last app of ``name``."""
        check_app(app)
        if (known := self.load(name)).app == app:
            return known  # so at most starts, which then need no lock
        import tomlkit  # noqa: F401  # before the lock is taken, since its loading takes long

        with self.locked():
            return self._remember(name, "app", app)

    def remember_log(self, name: str, log: str) -> InstanceSettings:
        """Store ``log``, a path or a URL, as the log of ``name`` from its next start on.

        Raises RegistryError if it is the log of another instance.
        """
        with self.locked():
            self._refuse_shared_log(name, log)
            return self._remember(name, "log", log)

    def _remember(self, name: str, field: str, value: str) -> InstanceSettings:
        """Change one field of the settings file. The caller holds the lock."""
        if getattr(self.load(name), field) != value:
            path = self.path(name)
            text = text_with(path.read_bytes().decode(), field, value)
            write_text(path, text, mode=stat.S_IMODE(path.stat().st_mode))
        return self.load(name)

    def refuse_open_folder(self, name: str) -> None:
        """Raise RegistryError if others can write to the folder of ``name``."""
        problem = describe_open_access(self.home / name)
        if problem is not None:
            raise RegistryError(problem)

    def _unknown_error(self, name: str) -> UnknownInstanceError:
        names = self.names()
        if not names:
            return UnknownInstanceError(
                f"there is no instance {name!r}: nothing is registered in {self.home}"
                f" ('immortal register {name} --peer tcp://127.0.0.1:*';"
                f" --home or {HOME_VARIABLE} names another folder)"
            )
        known = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
        hint = did_you_mean(name, names) or ":"
        return UnknownInstanceError(f"there is no instance {name!r}{hint} registered in {self.home}: {known}")

    def _refuse_open(self) -> None:
        """Raise RegistryError if others can write to the home. Checked once, so that a running process continues."""
        if self._are_modes_checked:
            return
        problem = describe_open_access(self.home)
        if problem is not None:
            raise RegistryError(f"the registry folder {problem}")
        self._are_modes_checked = True

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock for changes of the registry, so that two registrations never take the same name or port."""
        try:
            make_folder(self.home)
            self._refuse_open()
            descriptor = open_lock(self.home / _LOCK_FILE_NAME)
        except OSError as error:
            raise RegistryError(f"the registry folder {self.home} cannot be used: {error.strerror}") from None
        try:
            try:
                acquire_lock(descriptor, LOCK_TIMEOUT_S)
            except BlockingIOError:
                raise RegistryError(
                    f"the registry folder {self.home} is being changed by {describe_lock_holder(descriptor)}, for more"
                    f" than {LOCK_TIMEOUT_S:g} s: wait for that process, or end it"
                ) from None
            with contextlib.nullcontext() if self.copy is None else self.copy.changing():
                yield
        except OSError as error:
            raise RegistryError(f"the registry folder {self.home} cannot be changed: {error}") from None
        finally:
            os.close(descriptor)

    def _unchecked_values(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the values of each settings file unchecked, which is fast even for a thousand files."""
        for name in self.names():
            with contextlib.suppress(OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
                version = _version(f"{self.home}/{name}.toml")
                if name not in self._values or self._values[name][0] != version:
                    self._values[name] = version, tomllib.loads(self.path(name).read_text("utf-8"))
                yield name, self._values[name][1]

    def _find_used_ports(self) -> set[int]:
        ports: set[int] = set()
        for _, values in self._unchecked_values():
            given = [values.get(key) for key in ("app_port", "app_send_port")]
            ports.update(port for port in given if isinstance(port, int))
            address = split_tcp(str(values.get("peer", "")))
            if address is not None:
                ports.add(address[1])
        return ports

    def _refuse_shared_log(self, name: str, log: str) -> None:
        real, home = _real_path(log), os.path.realpath(self.home)
        for other, values in self._unchecked_values():
            written = values.get("log")
            others = f"{home}/{other}/log"
            if isinstance(written, str):
                others = _real_path(log_of(other, self.path(other), written))
            if other != name and others == real:
                raise RegistryError(f"{log} is the log folder of {other!r}: each instance needs its own")


def _version(path: str | Path) -> tuple[int, int, int]:
    status = os.stat(path)
    return status.st_mtime_ns, status.st_size, status.st_ino


def _real_path(log: str) -> str:
    return os.path.realpath(log) if is_in_folder(log) else log


def write_text(path: Path, text: str, mode: int = PUBLIC_FILE_MODE) -> None:
    """Write one of the registry's shared files, to the database if there is one. Raises SharedHomeError, OSError."""
    if not _write_shared(path, text):
        write_atomically(path, text.encode(), mode=mode)
        notify_coordinators(path)


def remove_file(path: Path) -> None:
    """Remove one of the registry's shared files, from the database if there is one. Raises as :func:`write_text`."""
    if not _write_shared(path, None):
        path.unlink(missing_ok=True)
        notify_coordinators(path)


def notify_coordinators(path: Path) -> None:
    """Touch the registry's folder after a public file has changed.

    Coordinators check the time of the folder each second, since a large registry has too many files to check each.
    """
    if path.name == PUBLIC_KEYS_FILE_NAME:
        with contextlib.suppress(OSError):  # another user's folder: coordinators there see the change later
            os.utime(path.parent.parent)


def _write_shared(path: Path, text: str | None) -> bool:
    """Write ``path`` to the database if its folder is a copy of one, else return False. ``text`` None: remove it."""
    is_settings = path.suffix == ".toml"
    home = path.parent if is_settings else path.parent.parent
    copy = shared_registry.copy_of(home)
    if copy is None:
        return False
    part = shared_registry.SETTINGS if is_settings else shared_registry.PARTS[path.name]
    copy.write_file(path.stem if is_settings else path.parent.name, part, text)
    return True


def _create_schema(url: str) -> None:
    """Create the registry's tables if the database has none. Raises RegistryError."""
    from immortal.coordinator.log.open import place_of

    try:
        place = place_of(url)
        if not place.exists():  # which refuses an older version
            place.migrate()
    except LogError as error:
        raise RegistryError(str(error)) from None


def _require_backend(url: str) -> None:
    """Raise RegistryError if no backend is known for the log ``url``."""
    from immortal.coordinator.log.open import place_of

    try:
        place_of(url)
    except LogError as error:
        raise RegistryError(str(error)) from None


def free_port(hosts: Sequence[str], used_ports: Set[int]) -> int:
    """Return a port that nobody listens at on any of ``hosts`` and that is not in ``used_ports``. Raises RegistryError.

    The port is one of those that IMMORTAL_PORTS names. Without that variable it is outside the range from which the
    kernel takes ports for outgoing connections: such a port could be in use when the coordinator restarts after a
    crash, even by a peer's own attempt to reach it.
    """
    asked = os.environ.get(PORTS_VARIABLE)
    for port in _any_ports() if asked is None else _shuffled(_parse_port_range(asked)):
        found = _bind(hosts[0], port)
        if found is None or found in used_ports:
            continue
        if all(_bind(other, found) is not None for other in hosts[1:]):
            return found
    where = "" if asked is None else f" in the range of {PORTS_VARIABLE}: {asked}"
    raise RegistryError(f"no free port was found at {' and '.join(hosts)}{where}")


def _parse_port_range(text: str) -> range:
    """Parse IMMORTAL_PORTS. Raises RegistryError."""
    found = re.fullmatch(r"([0-9]{1,5})-([0-9]{1,5})", text)
    lowest, highest = (0, 0) if found is None else (int(found[1]), int(found[2]))
    if not 0 < lowest <= highest <= _PORT_HIGHEST:
        raise RegistryError(
            f"{PORTS_VARIABLE} must be two numbers from 1 to {_PORT_HIGHEST}, the lowest port and the highest,"
            f" such as 7000-7099, not {text!r}"
        )
    return range(lowest, highest + 1)


def _any_ports() -> Iterator[int]:
    try:
        lowest_outgoing = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        lowest_outgoing = 0
    if lowest_outgoing > _PORT_LOWEST + _PORT_TRIES_MAX:
        yield from _shuffled(range(_PORT_LOWEST, lowest_outgoing))
    yield from [0] * _PORT_TRIES_MAX


def _shuffled(ports: range) -> list[int]:
    """Return some of ``ports`` in random order. The system's generator draws them: processes that seed their own
    generator equally would try the same ports."""
    return _RANDOM.sample(ports, min(len(ports), _PORT_TRIES_MAX))


def _bind(host: str, port: int) -> int | None:
    """Bind ``port`` (0: any) and release it; return its number, or None if it is in use."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise RegistryError(f"the address {host!r} cannot be used here: {error}") from None
    with socket.socket(family, kind, protocol) as probe:
        try:
            probe.bind(address)
        except PermissionError:
            return None
        except OSError as error:
            if error.errno in (98, 13):  # EADDRINUSE, EACCES
                return None
            raise RegistryError(f"the address {host!r} cannot be used here: {error.strerror}") from None
        return int(probe.getsockname()[1])


FOLDER_NAME = "followers"
LOCK_FILE_NAME = "lock"
PLACES_MAX = 16  # more followers of one log on one machine are useless


class FollowerPlaceError(ImmortalError):
    """Raised if all folders for followers are taken, or can't be used."""


class FollowerPlace(Struct):
    """Folder of one follower, locked until :meth:`release`, or until the process ends."""

    folder: Path
    _descriptor: int

    def release(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def claim_place(settings: InstanceSettings) -> FollowerPlace:
    """Lock a free folder for a follower of the instance. Raises FollowerPlaceError."""
    folder = settings.folder / FOLDER_NAME
    try:
        for number in range(1, PLACES_MAX + 1):
            place = folder / str(number)
            make_folder(place)
            descriptor = open_lock(place / LOCK_FILE_NAME)
            try:
                acquire_lock(descriptor, 0)
            except BlockingIOError:
                os.close(descriptor)
            else:
                return FollowerPlace(place, descriptor)
    except OSError as error:
        raise FollowerPlaceError(f"{folder} can't be used: {error.strerror}; make room for it there") from None
    raise FollowerPlaceError(f"{settings.name!r} has {PLACES_MAX} followers on this machine already: stop one of them")


def follower_settings(
    settings: InstanceSettings, folder: Path, *, app_port: int | None = None, app_send_port: int | None = None
) -> InstanceSettings:
    """Return ``settings`` for a follower with its sockets and files in ``folder``. Its app connects by a Unix socket
    there, or by these ports."""
    return msgspec.structs.replace(
        settings, folder=folder, log=settings.log, app_port=app_port, app_send_port=app_send_port, app_socket=None
    )
