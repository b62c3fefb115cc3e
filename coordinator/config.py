"""The settings of one instance: a TOML file, read strictly, written whole or not at all.

    peer = "tcp://127.0.0.1:7001"       where other coordinators reach this one

Everything else has a default. A file that says something which is not understood is an error that names the file, the
line and the field: a typo must not become a default.
"""

from __future__ import annotations

import dataclasses
import enum
import os
import re
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from coordinator.app_addresses import LOCALHOST, SOCKET_FILE_NAME, UNIX, host_port, is_loopback
from coordinator.core.limits import ReplayCheck
from coordinator.core.permissions import ANYTHING, Permission
from coordinator.fault_points import FaultPoint, reach
from coordinator.socket_paths import UNIX_PATH_SIZE_BYTES_MAX, socket_path
from protocol.errors import ImmortalError
from protocol.extensions import QUERIES
from protocol.limits import ARGUMENTS_SIZE_MIB_DEFAULT, ARGUMENTS_SIZE_MIB_MAX
from protocol.private_files import FILE_MODE

INSTANCE_NAME_SIZE_MAX = 64  # characters; the name is a file name, and part of each message between coordinators
KEEP_CHECKPOINTS_DEFAULT = 2  # the newest, and one to fall back on
KEEP_CHECKPOINTS_MAX = 1_000_000  # what is meant beyond this is "all"
KEEP_LOG_DAYS_MAX = 36_500  # a hundred years: beyond it keep_checkpoints = "all" is meant
LOG_TRIGGER_MB_DEFAULT = 1024
LOG_TRIGGER_MB_MAX = 1 << 30
SPILL_LIMIT_MB_DEFAULT = 4096
SIZE_MB_MAX = 1 << 30
CHECKPOINT_AGE_S_MAX = 366 * 86_400
CALLS_MAX = 1_000_000_000  # in a second, or open: what is meant beyond this is no limit
KILLS_BEFORE_VERDICT_DEFAULT = 3  # once may be chance, twice bad luck
KILLS_BEFORE_VERDICT_MAX = 1000
NAME_PLACE = "{name}"  # in peer_template
IPC_PATH_SIZE_MAX = 107  # bytes; the kernel's limit for the path of a Unix socket

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_APP = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_PUBLIC_KEY = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_TCP = re.compile(r"tcp://(?P<host>\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9][A-Za-z0-9._%-]*):(?P<port>\d{1,5}|\*)")


LOG_KEY_FILE = "file"  # as log_key: a key in the instance's own folder


class ConfigError(ImmortalError):
    """A setting is not what it must be."""


class _WrongValueError(ValueError):
    """Raised by a check: ``str`` of it is what was expected."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """Limits that few will ever change: the table [tuning]."""

    group_size_kib_max: int = 1024  # input that one commit makes durable
    commit_inline_kib_max: int = 32  # larger groups are committed on a thread
    peer_buffer_mib_max: int = 64  # outputs in memory that one peer has not acknowledged; more goes to disk
    peer_window_kib_max: int = 16_384  # on their way from or to one peer, unacknowledged
    receive_buffer_mib_max: int = 64  # on their way here, of all peers together
    clock_hold_s: int = 600  # a jump of the clock is taken when it has stood for so long


class AppSendMode(enum.StrEnum):
    """What the app of a two-port instance does at its second port, from which it is sent to."""

    CONNECT = "connect"
    LISTEN = "listen"


class AppAuth(enum.StrEnum):
    """How an app shows that it is the instance's own."""

    CHALLENGE = "challenge"  # both prove that they know the coordinator's secret, which is not sent
    SECRET = "secret"  # noqa: S105 (a name) or it may show it, in its Hello: for apps that can't answer a challenge
    NONE = "none"  # it need not: for clients that know only the base protocol


@dataclass(frozen=True, slots=True)
class InstanceSettings:
    """One instance. ``folder`` holds its files of the running time, and its log unless ``log`` says otherwise."""

    name: str
    folder: Path
    log: Path
    peer: str  # an endpoint with a port that is no longer `*`
    app_port: int | None = None  # where the app connects over TCP; None: by the Unix socket alone
    app_host: str = LOCALHOST
    app_send_port: int | None = None  # None: both directions use one connection, to app_port
    app_send_mode: AppSendMode = AppSendMode.CONNECT
    app_socket: str | None = None  # "unix:PATH", absolute: its Unix socket; None: see app_unix_address
    app_auth: AppAuth = AppAuth.CHALLENGE
    app_insecure: bool = False  # app_auth "none" is meant, although others than this machine reach app_host
    keep_checkpoints: int | None = KEEP_CHECKPOINTS_DEFAULT  # None: all of them; with keep_log_days, of these days
    keep_log_days: int | None = None  # the log of so many days is kept in any case; None: time does not count
    log_trigger_mb: int = LOG_TRIGGER_MB_DEFAULT
    spill_limit_mb: int = SPILL_LIMIT_MB_DEFAULT  # MiB on disk that wait for peers; above it the app is slowed
    log_key: str | None = None  # LOG_KEY_FILE, or a file's path: the log is authenticated; None: it needs not be
    log_limit_mb: int | None = None  # MiB: a larger log takes no input from peers; None: no limit but the disk's
    disk_free_mb: int = 0  # MiB: with less left on the log's disk it takes no input from peers either
    metrics: str | None = None  # "HOST:PORT" where Prometheus finds them; None: nowhere
    metrics_token_file: Path | None = None  # who asks for them must bring what stands there; None: nothing
    metrics_certificate_file: Path | None = None  # they are served with TLS, by this certificate and ...
    metrics_key_file: Path | None = None  # ... its key
    checkpoint_age_s: int | None = None  # None: a checkpoint's age alone asks for no other
    kills_before_verdict: int | None = KILLS_BEFORE_VERDICT_DEFAULT  # runs that one message may end; None: any number
    rpc_limit_mb: int = ARGUMENTS_SIZE_MIB_DEFAULT  # MiB: arguments of one call of the app
    replay_check: ReplayCheck | None = None  # None: strict for an app that says a Hello, counts for one that does not
    app: str | None = None  # "module:Class", as last run
    peers: Mapping[str, str] = field(default_factory=dict)  # name: endpoint, of peers that are no part of the registry
    allow: tuple[str, ...] | None = None  # the peers that may call; None: every instance of the registry
    permissions: Mapping[str, Permission] = field(default_factory=dict)  # of those in allow that may not do everything
    peer_keys: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # public keys that no registry file gives
    client_keys: Mapping[str, tuple[str, ...]] = field(
        default_factory=dict
    )  # of clients that have none in the registry
    insecure: bool = False  # peers without keys are meant, although others than this machine are involved
    peer_template: str | None = None  # the endpoint of all others, with {name} in it
    tuning: Tuning = field(default_factory=Tuning)

    @property
    def app_address(self) -> str | None:
        """``HOST:PORT`` where the app connects over TCP; None if there is no port."""
        return None if self.app_port is None else host_port(self.app_host, self.app_port)

    @property
    def app_unix_address(self) -> str | None:
        """``unix:PATH`` of its Unix socket: that of the settings, or app.sock in its folder. None: ports alone.

        That is where there are two of them, and for a client of the base protocol, which has one and proves nothing.
        """
        if self.app_socket is not None:
            return self.app_socket
        if self.app_send_port is not None or (self.app_port is not None and self.app_auth is AppAuth.NONE):
            return None
        return f"{UNIX}{socket_path(self.folder, SOCKET_FILE_NAME)}"

    @property
    def app_addresses(self) -> list[str]:
        """Where the app may connect, the nearest first."""
        return [address for address in (self.app_unix_address, self.app_address) if address is not None]

    @property
    def app_send_address(self) -> str | None:
        """``HOST:PORT`` of the second port; None if there is none."""
        return None if self.app_send_port is None else host_port(self.app_host, self.app_send_port)


# --- checks: each returns the value to use, or says what was expected -------------------------------------------------


def check_instance_name(name: str) -> str:
    """``name``, if an instance can have it; ConfigError otherwise."""
    if len(name) > INSTANCE_NAME_SIZE_MAX:
        raise ConfigError(
            f"the instance name {name[:20]!r}... has {len(name)} characters,"
            f" at most {INSTANCE_NAME_SIZE_MAX} are allowed"
        )
    if not _NAME.fullmatch(name) or name.endswith(".toml"):
        raise ConfigError(
            f"{name!r} is no instance name: letters, digits, '-', '_' and '.', starting with a letter or digit,"
            " not ending in '.toml'"
        )
    return name


def check_app(app: str) -> str:
    """``app``, if it has the form "module:Class"; ConfigError otherwise."""
    if not _APP.fullmatch(app):
        raise ConfigError(f'{app!r} names no app: expected "module:Class"')
    return app


def split_tcp(endpoint: str) -> tuple[str, int] | None:
    """(host without brackets, port) of a tcp endpoint; port 0 stands for `*`. None for any other text."""
    match = _TCP.fullmatch(endpoint)
    if match is None or match["host"] == "*":
        return None
    port = 0 if match["port"] == "*" else int(match["port"])
    if port > 65535 or (port == 0 and match["port"] != "*"):
        return None
    return match["host"].strip("[]"), port


def _endpoint(value: object) -> str:
    expected = _WrongValueError('an endpoint such as "tcp://127.0.0.1:7001" or "ipc:///run/counter.sock"')
    if not isinstance(value, str):
        raise expected
    if value.startswith("ipc://"):
        path = value.removeprefix("ipc://")
        if len(path.encode()) > IPC_PATH_SIZE_MAX:
            raise _WrongValueError(f"a path of at most {IPC_PATH_SIZE_MAX} bytes behind ipc://")
        if not path or "\0" in path:
            raise expected
        return value
    address = split_tcp(value)
    if address is None:
        raise expected
    if address[1] == 0:
        raise _WrongValueError("an endpoint with its port (`*` is for 'immortal register' alone)")
    return value


def _peer_template(value: object) -> str:
    """An endpoint as soon as a name stands for {name}."""
    if not isinstance(value, str) or NAME_PLACE not in value:
        raise _WrongValueError(f'an endpoint with {NAME_PLACE} in it, such as "tcp://{NAME_PLACE}.example:7400"')
    _endpoint(value.replace(NAME_PLACE, "x"))
    return value


def _integer(least: int, most: int) -> Callable[[object], int]:
    def check(value: object) -> int:
        if type(value) is not int or not least <= value <= most:  # a bool is no number
            raise _WrongValueError(f"a whole number from {least} to {most}")
        return value

    return check


def _keep_checkpoints(value: object) -> int | None:
    if value == "all":
        return None
    if type(value) is not int or not 1 <= value <= KEEP_CHECKPOINTS_MAX:
        raise _WrongValueError(f'a whole number from 1 to {KEEP_CHECKPOINTS_MAX}, or "all"')
    return value


def _kills_before_verdict(value: object) -> int | None:
    if value == "never":
        return None
    if type(value) is not int or not 1 <= value <= KILLS_BEFORE_VERDICT_MAX:
        raise _WrongValueError(f'a whole number from 1 to {KILLS_BEFORE_VERDICT_MAX}, or "never"')
    return value


def _host(value: object) -> str:
    if (
        not isinstance(value, str)
        or not value
        or any(character.isspace() or character in "/[]*" for character in value)
    ):
        raise _WrongValueError('an address such as "127.0.0.1", or "localhost" for both loopbacks')
    return value


def _app_send_mode(value: object) -> AppSendMode:
    try:
        return AppSendMode(value)  # type: ignore[arg-type]  # anything may stand in a file
    except ValueError:
        raise _WrongValueError(" or ".join(f'"{mode}"' for mode in AppSendMode)) from None


def check_app_socket(value: object) -> str:
    """ "unix:PATH" with an absolute path, if that can be one; ConfigError otherwise."""
    try:
        return _app_socket(value)
    except _WrongValueError as error:
        raise ConfigError(f"got {_shown(value)}, expected {error}") from None


def _app_socket(value: object) -> str:
    if not isinstance(value, str) or not value.startswith(f"{UNIX}/") or "\0" in value:
        raise _WrongValueError('"unix:" and an absolute path, such as "unix:/run/counter.sock"')
    size_bytes = len(os.fsencode(value.removeprefix(UNIX)))
    if size_bytes > UNIX_PATH_SIZE_BYTES_MAX:
        raise _WrongValueError(f"a path of at most {UNIX_PATH_SIZE_BYTES_MAX} bytes behind {UNIX}, it has {size_bytes}")
    return value


def _app_auth(value: object) -> AppAuth:
    try:
        return AppAuth(value)  # type: ignore[arg-type]  # anything may stand in a file
    except ValueError:
        raise _WrongValueError(" or ".join(f'"{auth}"' for auth in AppAuth)) from None


def _replay_check(value: object) -> ReplayCheck:
    try:
        return ReplayCheck(value)  # type: ignore[arg-type]  # anything may stand in a file
    except ValueError:
        raise _WrongValueError('"strict", "counts" or "off"') from None


def _boolean(value: object) -> bool:
    if not isinstance(value, bool):
        raise _WrongValueError("true or false")
    return value


def _names(value: object) -> tuple[str, ...]:
    expected = _WrongValueError(
        'a list of instance names, such as ["reader", "feeder"], or a table [allow] of names and the methods that each '
        'may call, such as reader = ["total"]'
    )
    if not isinstance(value, list):
        raise expected
    try:
        return tuple(check_instance_name(str(name)) for name in value)
    except ConfigError:
        raise expected from None


def permission_of(value: object) -> Permission:
    """What a value of the table [allow] means; ValueError says what was expected."""
    if isinstance(value, dict):
        if unknown := set(value) - {"methods", "rate", "concurrent"}:
            raise _WrongValueError(f'"methods", "rate" and "concurrent", not "{min(unknown)}"')
        methods = permission_of(value.get("methods", "*")).methods
        return Permission(methods, *(_number_of_calls(value.get(key), key) for key in ("rate", "concurrent")))
    if value == "*":
        return ANYTHING
    if not isinstance(value, list) or not all(_is_method(name) for name in value):
        raise _WrongValueError(
            'a list of names of methods, such as ["place", "total"], with "@query" for all that only read, or "*" for '
            'all of them; or a table with "methods", "rate" (calls in a second) and "concurrent" (open calls)'
        )
    return Permission(frozenset(value))


def _is_method(name: object) -> bool:
    return isinstance(name, str) and (name.isidentifier() or name == QUERIES)


def _number_of_calls(value: object, key: str) -> int | None:
    if value is not None and (type(value) is not int or not 1 <= value <= CALLS_MAX):
        raise _WrongValueError(f'a whole number from 1 to {CALLS_MAX} as "{key}"')
    return value if isinstance(value, int) else None


def _public_keys(value: object) -> tuple[str, ...]:
    found = value if isinstance(value, list) else [value]
    if not found or not all(isinstance(key, str) and _PUBLIC_KEY.fullmatch(key) for key in found):
        raise _WrongValueError("a public key, 40 characters of Z85, or a list of them")
    return tuple(found)


def _metrics(value: object) -> str:
    if not isinstance(value, str) or split_tcp(f"tcp://{value}") is None:
        raise _WrongValueError('HOST:PORT such as "127.0.0.1:9400" (HOST:* takes a free port)')
    return value


def _path(value: object) -> str:
    if not isinstance(value, str) or not value or "\0" in value:
        raise _WrongValueError("a path")
    return value


def _log_key(value: object) -> str:
    if not isinstance(value, str) or "\0" in value or not (value == LOG_KEY_FILE or value.startswith("/")):
        raise _WrongValueError(f'"{LOG_KEY_FILE}", or the absolute path of a file')
    return value


def _app(value: object) -> str:
    if not isinstance(value, str) or not _APP.fullmatch(value):
        raise _WrongValueError('"module:Class"')
    return value


_CHECKS: Mapping[str, Callable[[object], Any]] = {
    "peer": _endpoint,
    "peer_template": _peer_template,
    "allow": _names,
    "insecure": _boolean,
    "app_host": _host,
    "app_port": _integer(1, 65535),
    "app_send_port": _integer(1, 65535),
    "app_send_mode": _app_send_mode,
    "app_socket": _app_socket,
    "app_auth": _app_auth,
    "app_insecure": _boolean,
    "log": _path,
    "log_key": _log_key,
    "keep_checkpoints": _keep_checkpoints,
    "keep_log_days": _integer(1, KEEP_LOG_DAYS_MAX),
    "log_trigger_mb": _integer(1, LOG_TRIGGER_MB_MAX),
    "checkpoint_age_s": _integer(1, CHECKPOINT_AGE_S_MAX),
    "kills_before_verdict": _kills_before_verdict,
    "replay_check": _replay_check,
    "rpc_limit_mb": _integer(1, ARGUMENTS_SIZE_MIB_MAX),
    "spill_limit_mb": _integer(0, SIZE_MB_MAX),
    "log_limit_mb": _integer(1, SIZE_MB_MAX),
    "disk_free_mb": _integer(0, SIZE_MB_MAX),
    "metrics": _metrics,
    "metrics_token_file": _path,
    "metrics_certificate_file": _path,
    "metrics_key_file": _path,
    "app": _app,
}
_TUNING_CHECKS: Mapping[str, Callable[[object], int]] = {
    "group_size_kib_max": _integer(1, 1 << 20),
    "commit_inline_kib_max": _integer(0, 1 << 20),
    "peer_buffer_mib_max": _integer(1, 1 << 20),
    "peer_window_kib_max": _integer(64, 1 << 20),
    "receive_buffer_mib_max": _integer(1, 1 << 20),
    "clock_hold_s": _integer(1, 7 * 86_400),
}
_METRICS_FILES = ("metrics_token_file", "metrics_certificate_file", "metrics_key_file")
_REQUIRED = ("peer",)


# --- reading ---------------------------------------------------------------------------------------------------------


def near_miss(word: str, known: Iterable[str]) -> str:
    """ ": did you mean 'x'?" when ``word`` looks like a known one, else nothing."""
    import difflib  # needed for a misspelt word only

    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f": did you mean {close[0]!r}?" if close else ""


def read_settings(path: Path, name: str) -> InstanceSettings:
    """Read and check the settings file of ``name``. Raises ConfigError, and FileNotFoundError if there is none."""
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError:
        raise
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}, byte {error.start}: the file is not UTF-8") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(_syntax_error(path, text, str(error))) from None
    return check_settings(values, name, path, text)


def check_settings(values: Mapping[str, object], name: str, path: Path, text: str = "") -> InstanceSettings:
    """The settings that ``values`` give. ``path`` is their file, ``text`` its text (for the lines in errors).

    A relative log folder is relative to the folder of the file. Raises ConfigError.
    """
    tables = dict(values)
    tuning = tables.pop("tuning", {})
    if not isinstance(tuning, dict):
        line = line_of(text, "tuning")
        raise ConfigError(f"{_place(path, line)}, field 'tuning': got {_shown(tuning)}, expected a table [tuning]")
    peers = _check_names(tables.pop("peers", {}), "peers", _endpoint, path, text)
    peer_keys = _check_names(tables.pop("peer_keys", {}), "peer_keys", _public_keys, path, text)
    client_keys = _check_names(tables.pop("client_keys", {}), "client_keys", _public_keys, path, text)
    if both := peer_keys.keys() & client_keys.keys():
        place = f"{_place(path, line_of(text, min(both), 'client_keys'))}, field 'client_keys.{min(both)}'"
        raise ConfigError(f"{place}: it stands under [peer_keys] too; a name is an instance's or a client's")
    allowed = None
    if isinstance(tables.get("allow"), dict):
        allowed = _check_names(tables.pop("allow"), "allow", permission_of, path, text)
    checked = _check_table(tables, _CHECKS, path, text, table="", also=("tuning", "peers", "peer_keys", "client_keys"))
    tuned = _check_table(tuning, _TUNING_CHECKS, path, text, table="tuning")
    for required in _REQUIRED:
        if required not in checked:
            raise ConfigError(f"{path}: the field {required!r} is missing")
    _check_app_ports(checked, path, text)
    checked.setdefault("app_auth", default_app_auth(checked.get("app_send_port")))
    _check_app_auth(checked, path, text)
    for file in _METRICS_FILES:
        if file in checked:
            checked[file] = path.parent / checked[file]
    if ("metrics_certificate_file" in checked) != ("metrics_key_file" in checked):
        place = _place(path, line_of(text, "metrics_certificate_file") or line_of(text, "metrics_key_file"))
        raise ConfigError(
            f"{place}: 'metrics_certificate_file' and 'metrics_key_file' go together, one of them is missing"
        )
    folder = path.parent / check_instance_name(name)
    log = path.parent / checked.pop("log", folder / "log")
    if allowed is not None:
        limited = {caller: permission for caller, permission in allowed.items() if permission != ANYTHING}
        checked |= {"allow": tuple(allowed), "permissions": limited}
    checked |= {"peers": peers, "peer_keys": peer_keys, "client_keys": client_keys, "tuning": Tuning(**tuned)}
    return InstanceSettings(name=name, folder=folder, log=log, **checked)


def override(settings: InstanceSettings, **changes: object) -> InstanceSettings:
    """``settings`` with ``changes`` (fields and values), checked as if they stood in the file. Raises ConfigError."""
    changed = dataclasses.replace(settings, **changes)  # type: ignore[arg-type]  # checked in what follows
    values = _values(changed, log=changed.log)
    check_settings(values, settings.name, settings.folder.parent / f"{settings.name}.toml")
    return changed


def _check_table(
    values: Mapping[str, object],
    checks: Mapping[str, Callable[[object], Any]],
    path: Path,
    text: str,
    *,
    table: str,
    also: Iterable[str] = (),
) -> dict[str, Any]:
    checked = {}
    for key, value in values.items():
        name = f"{table}.{key}" if table else key
        place = f"{_place(path, line_of(text, key, table))}, field {name!r}"
        if key not in checks:
            known = ", ".join((*checks, *also))
            hint = near_miss(key, (*checks, *also)) or f": known are {known}"
            raise ConfigError(f"{place}: unknown field{hint}")
        try:
            checked[key] = checks[key](value)
        except _WrongValueError as error:
            raise ConfigError(f"{place}: got {_shown(value)}, expected {error}") from None
    return checked


def _check_names(values: object, table: str, check: Callable[[object], Any], path: Path, text: str) -> dict[str, Any]:
    """A table that says one thing about each peer, by name."""
    if not isinstance(values, dict):
        line = line_of(text, table)
        raise ConfigError(f"{_place(path, line)}, field {table!r}: got {_shown(values)}, expected a table [{table}]")
    for name in values:
        try:
            check_instance_name(name)
        except ConfigError as error:
            raise ConfigError(f"{_place(path, line_of(text, name, table))}, table [{table}]: {error}") from None
    return _check_table(values, dict.fromkeys(values, check), path, text, table=table)


def _check_app_ports(checked: Mapping[str, Any], path: Path, text: str) -> None:
    if "app_send_mode" in checked and "app_send_port" not in checked:
        place = _place(path, line_of(text, "app_send_mode"))
        raise ConfigError(f"{place}, field 'app_send_mode': it needs an 'app_send_port', the port that it is about")
    for needs in ("app_send_port", "app_host"):
        if needs in checked and "app_port" not in checked:
            place = _place(path, line_of(text, needs))
            raise ConfigError(f"{place}, field {needs!r}: it needs an 'app_port'; without, the app has a Unix socket")
    if "app_send_port" in checked and checked["app_send_port"] == checked["app_port"]:
        place = _place(path, line_of(text, "app_send_port"))
        raise ConfigError(
            f"{place}, field 'app_send_port': got {checked['app_port']}, expected another port than 'app_port'"
            " (without 'app_send_port' one connection serves both directions)"
        )


def default_app_auth(app_send_port: int | None) -> AppAuth:
    """Two ports are for clients that know only the base protocol, which has no secret."""
    return AppAuth.CHALLENGE if app_send_port is None else AppAuth.NONE


def _check_app_auth(checked: Mapping[str, Any], path: Path, text: str) -> None:
    place = _place(path, line_of(text, "app_auth"))
    two_ports = "app_send_port" in checked
    if two_ports and checked["app_auth"] is not AppAuth.NONE:
        raise ConfigError(
            f"{place}, field 'app_auth': got {_shown(str(checked['app_auth']))}, expected \"none\" beside an"
            " 'app_send_port': at the second port nothing is shown that a proof could stand in"
        )
    if two_ports and "app_socket" in checked:
        place = _place(path, line_of(text, "app_socket"))
        raise ConfigError(
            f"{place}, field 'app_socket': one connection to it serves both directions, so it goes without an"
            " 'app_send_port'"
        )
    host = checked.get("app_host", LOCALHOST)
    if checked["app_auth"] is AppAuth.NONE and not is_loopback(host) and not checked.get("app_insecure"):
        place = _place(path, line_of(text, "app_host"))
        raise ConfigError(
            f"{place}, field 'app_host': with app_auth \"none\" whoever reaches {host} could be the app of this"
            ' instance: take a loopback address, or app_auth = "challenge"; if it is meant, say app_insecure = true'
        )


def _place(path: Path, line: int | None) -> str:
    return f"{path}, line {line}" if line else str(path)


def _shown(value: object) -> str:
    shown = f'"{value}"' if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else str(value)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."


def line_of(text: str, key: str, table: str = "") -> int | None:
    """The line, from 1, where ``key`` of ``table`` is set; tomllib does not tell. None if it is not found."""
    current = ""
    spelled = rf"(?:{re.escape(key)}|\"{re.escape(key)}\"|'{re.escape(key)}')"
    setting = re.compile(rf"\s*{spelled}\s*[.=]")
    header = re.compile(r"\s*\[\[?\s*[\"']?([^\]\"']+?)[\"']?\s*\]")
    for number, line in enumerate(text.splitlines(), 1):
        if match := header.match(line):
            current = match[1]
            if not table and (current == key or current.startswith(f"{key}.")):
                return number
        elif current == table and setting.match(line):
            return number
    return None


def _syntax_error(path: Path, text: str, message: str) -> str:
    match = re.search(r"\(at line (\d+), column (\d+)\)", message)
    if match is None:  # "at end of document"
        return f"{path}, line {max(1, len(text.splitlines()))}: no valid TOML: {message}"
    reason = message[: match.start()].strip()
    lines = text.splitlines()
    line = int(match[1])
    content = lines[line - 1].strip() if line <= len(lines) else ""
    return f"{path}, line {line}, column {match[2]}: no valid TOML: {reason}" + (f": {content[:80]}" if content else "")


# --- writing ---------------------------------------------------------------------------------------------------------


def settings_text(settings: InstanceSettings, *, log: Path | None) -> str:
    """The settings file's text. Defaults are left out, ``log`` too when it is None."""
    import tomlkit  # here: few commands write settings

    return tomlkit.dumps(_values(settings, log=log))


def text_with_app(text: str, app: str) -> str:
    """The settings file's ``text`` with another ``app`` in it, and all else as somebody wrote it."""
    import tomlkit

    document = tomlkit.parse(text)
    if "app" in document:
        document["app"] = app
        return tomlkit.dumps(document)
    lines = text.splitlines(keepends=True)
    behind = (
        line_of(text, "app_port") or line_of(text, "peer") or 0
    )  # not at the end of the table: comments there are of the next one
    if behind and not lines[behind - 1].endswith("\n"):
        lines[behind - 1] += "\n"
    return "".join([*lines[:behind], tomlkit.dumps({"app": app}), *lines[behind:]])


def text_with_allow(text: str, allow: Mapping[str, Permission]) -> str:
    """The settings file's ``text`` with another ``allow`` in it, as a table, and all else as somebody wrote it."""
    import tomlkit

    document = tomlkit.parse(text)
    document.pop("allow", None)
    table = {caller: _permission_value(permission) for caller, permission in allow.items()}
    rest = tomlkit.dumps(document).rstrip("\n")
    return f"{rest}\n\n{tomlkit.dumps({'allow': table})}"


def _values(settings: InstanceSettings, *, log: Path | None) -> dict[str, Any]:
    values: dict[str, Any] = {"peer": settings.peer}
    if settings.app_port is not None:
        values["app_port"] = settings.app_port
    if settings.app_host != LOCALHOST:
        values["app_host"] = settings.app_host
    if settings.app_send_port is not None:
        values["app_send_port"] = settings.app_send_port
        if settings.app_send_mode is not AppSendMode.CONNECT:
            values["app_send_mode"] = settings.app_send_mode.value
    if settings.app_socket is not None:
        values["app_socket"] = settings.app_socket
    if settings.app_auth is not default_app_auth(settings.app_send_port):
        values["app_auth"] = settings.app_auth.value
    if settings.app_insecure:
        values["app_insecure"] = True
    if log is not None:
        values["log"] = str(log)
    if settings.keep_checkpoints != KEEP_CHECKPOINTS_DEFAULT:
        values["keep_checkpoints"] = "all" if settings.keep_checkpoints is None else settings.keep_checkpoints
    if settings.keep_log_days is not None:
        values["keep_log_days"] = settings.keep_log_days
    if settings.log_trigger_mb != LOG_TRIGGER_MB_DEFAULT:
        values["log_trigger_mb"] = settings.log_trigger_mb
    if settings.kills_before_verdict != KILLS_BEFORE_VERDICT_DEFAULT:
        kills = settings.kills_before_verdict
        values["kills_before_verdict"] = "never" if kills is None else kills
    if settings.rpc_limit_mb != ARGUMENTS_SIZE_MIB_DEFAULT:
        values["rpc_limit_mb"] = settings.rpc_limit_mb
    if settings.replay_check is not None:
        values["replay_check"] = settings.replay_check.value
    if settings.spill_limit_mb != SPILL_LIMIT_MB_DEFAULT:
        values["spill_limit_mb"] = settings.spill_limit_mb
    if settings.log_key is not None:
        values["log_key"] = settings.log_key
    if settings.log_limit_mb is not None:
        values["log_limit_mb"] = settings.log_limit_mb
    if settings.disk_free_mb:
        values["disk_free_mb"] = settings.disk_free_mb
    if settings.metrics is not None:
        values["metrics"] = settings.metrics
    for file in _METRICS_FILES:
        if getattr(settings, file) is not None:
            values[file] = str(getattr(settings, file))
    if settings.checkpoint_age_s is not None:
        values["checkpoint_age_s"] = settings.checkpoint_age_s
    if settings.app is not None:
        values["app"] = settings.app
    if settings.peer_template is not None:
        values["peer_template"] = settings.peer_template
    if settings.allow is not None and not settings.permissions:
        values["allow"] = list(settings.allow)
    if settings.insecure:
        values["insecure"] = True
    if settings.allow is not None and settings.permissions:
        given = {caller: settings.permissions.get(caller, ANYTHING) for caller in settings.allow}
        values["allow"] = {caller: _permission_value(permission) for caller, permission in given.items()}
    if settings.peers:
        values["peers"] = dict(settings.peers)
    if settings.peer_keys:
        values["peer_keys"] = {name: list(keys) for name, keys in settings.peer_keys.items()}
    if settings.client_keys:
        values["client_keys"] = {name: list(keys) for name, keys in settings.client_keys.items()}
    default = Tuning()
    tuned = {limit.name: getattr(settings.tuning, limit.name) for limit in fields(Tuning)}
    tuned = {key: value for key, value in tuned.items() if value != getattr(default, key)}
    if tuned:
        values["tuning"] = tuned
    return values


def _permission_value(permission: Permission) -> object:
    """As it stands in the table [allow]."""
    methods = "*" if permission.methods is None else sorted(permission.methods)
    numbers = {"rate": permission.rate, "concurrent": permission.concurrent}
    given = {key: number for key, number in numbers.items() if number is not None}
    return {"methods": methods, **given} if given else methods


def write_atomically(path: Path, data: bytes, *, mode: int = FILE_MODE) -> None:
    """``path`` holds ``data`` whole, or what it held before, whatever happens. Its folder must exist. Raises OSError.

    It is for its owner alone, where ``mode`` does not say otherwise.
    """
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(file.fileno(), mode)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        reach(FaultPoint.BEFORE_REPLACE)
        os.replace(temporary, path)
        reach(FaultPoint.AFTER_REPLACE)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
