"""Settings files: strict reading, checks, atomic writing. A change keeps all other text, such as comments."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from immortal.coordinator.config.schema import AppAuth, Checkpoints, InstanceSettings, Setting, setting_of, settings_of
from immortal.coordinator.config.socket_addresses import LOCALHOST, is_loopback
from immortal.coordinator.config.values import NO_LOG_KEY, ConfigError, WrongValueError, check_instance_name
from immortal.coordinator.core.limits import ReplayCheck
from immortal.coordinator.core.permissions import ALL_METHODS, ANYTHING, Permission
from immortal.coordinator.fault_points import FaultPoint, reach
from immortal.coordinator.log_url import is_in_folder, log_of_instance
from immortal.protocol.files import FILE_MODE, open_beside, sync_folder
from immortal.protocol.safe_output import did_you_mean


class Source(Struct, frozen=True):
    """Settings file and its text, in which the line numbers for errors are found; "": errors have no line numbers."""

    path: Path
    text: str = ""

    def place(self, key: str, table: str = "") -> str:
        """Return the file and line that set ``key`` of ``table``; without such a line, those of the table."""
        line = line_of(self.text, key, table)
        if line is None and table:
            parent, _, last = table.rpartition(".")
            return self.place(last, parent)
        return f"{self.path}, line {line}" if line else str(self.path)

    def field(self, key: str, table: str = "") -> str:
        return f"{self.place(key, table)}, field {_dotted(table, key)!r}"


def read_toml(path: Path) -> tuple[dict[str, Any], Source]:
    """Read a TOML file. Raises ConfigError, and FileNotFoundError if there is none."""
    try:
        text = path.read_text("utf-8")
        return tomllib.loads(text), Source(path, text)
    except FileNotFoundError:
        raise
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}, byte {error.start}: the file is not UTF-8") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(_syntax_error(path, text, str(error))) from None


def read_table(source: Source, schema: type[Struct], values: Mapping[str, Any], table: str = "") -> dict[str, Any]:
    """Check a table's ``values`` against ``schema``; return the attributes for ``schema``. Raises ConfigError."""
    settings = settings_of(schema)
    for key in values:
        if key not in settings:
            hint = did_you_mean(key, settings) or f": known are {', '.join(settings)}"
            raise ConfigError(f"{source.field(key, table)}: unknown field{hint}")
    found = {key: _read(source, settings[key], key, value, table) for key, value in values.items()}
    for setting in settings.values():
        if setting.is_required and setting.name not in found:
            raise ConfigError(f"{source.path}: the field {_dotted(table, setting.name)!r} is missing")
    return found


def _read(source: Source, setting: Setting, key: str, value: Any, table: str) -> Any:
    if isinstance(value, dict) and "table" in setting.about:
        setting = setting_of(setting.about["table"])
    name = _dotted(table, key)
    if setting.is_table and not isinstance(value, dict):
        raise ConfigError(f"{source.field(key, table)}: got {_shown(value)}, expected a table [{name}]")
    if setting.schema is not None:
        return setting.schema(**read_table(source, setting.schema, value, name))
    if setting.is_table:  # of names
        for each in value:
            try:
                check_instance_name(each)
            except ConfigError as error:
                raise ConfigError(f"{source.place(each, name)}, table [{name}]: {error}") from None
        each_value = setting.each_value
        return {each: _read(source, each_value, each, said, name) for each, said in value.items()}
    try:
        return setting.value_of(value)
    except WrongValueError as error:
        raise ConfigError(f"{source.field(key, table)}: got {_shown(value)}, expected {error}") from None


def read_settings(path: Path, name: str) -> InstanceSettings:
    """Read and check the settings file of ``name``. Raises ConfigError, and FileNotFoundError if there is none."""
    values, source = read_toml(path)
    return check_settings(values, name, path, source.text)


def check_settings(values: Mapping[str, Any], name: str, path: Path, text: str = "") -> InstanceSettings:
    """Check ``values`` and return them as settings. ``path`` is their file, ``text`` its text (for lines in errors).

    Paths are relative to the folder of the file. Raises ConfigError.
    """
    source = Source(path, text)
    given = read_table(source, InstanceSettings, values)
    if given.get("log_key") == NO_LOG_KEY:
        del given["log_key"]
    given.setdefault("app_auth", default_app_auth(given.get("app_send_port")))
    if conflict := next(_conflicts(given, source), None):
        raise ConfigError(conflict)
    if isinstance(allowed := given.get("allow"), dict):
        limited = {caller: permission for caller, permission in allowed.items() if permission != ANYTHING}
        given |= {"allow": tuple(allowed), "permissions": limited}
    folder = path.parent / check_instance_name(name)
    given["log"] = log_of(name, path, given.get("log"))
    given |= {key: path.parent / value for key, value in given.items() if isinstance(value, Path)}
    return InstanceSettings(name=name, folder=folder, **given)


# --- settings that depend on each other -------------------------------------------------------------------------------


def log_of(name: str, path: Path, written: str | None) -> str:
    """Return the log of ``name``. ``path``: its settings file; ``written``: the setting ``log`` there, if any."""
    log = str(path.parent / name / "log") if written is None else written
    return str(path.parent / log) if is_in_folder(log) else log_of_instance(log, name)


def default_app_auth(app_send_port: int | None) -> AppAuth:
    """Return the default of app_auth: two ports are for clients of the base protocol, which has no secret."""
    return AppAuth.CHALLENGE if app_send_port is None else AppAuth.NONE


def _conflicts(given: Mapping[str, Any], source: Source) -> Iterator[str]:
    """Yield an error text for each conflict between settings."""
    if both := given.get("peer_keys", {}).keys() & given.get("client_keys", {}).keys():
        field = source.field(min(both), "client_keys")
        yield f"{field}: it stands under [peer_keys] too; a name is an instance's or a client's"
    two_ports = "app_send_port" in given
    if "app_send_mode" in given and not two_ports:
        yield f"{source.field('app_send_mode')}: it needs an 'app_send_port', the port that it is about"
    for needs in ("app_send_port", "app_host"):
        if needs in given and "app_port" not in given:
            yield f"{source.field(needs)}: it needs an 'app_port'; without, the app has a Unix socket"
    if two_ports and given["app_send_port"] == given["app_port"]:
        yield (
            f"{source.field('app_send_port')}: got {given['app_port']}, expected another port than 'app_port'"
            " (without 'app_send_port' one connection serves both directions)"
        )
    auth = given["app_auth"]
    if two_ports and auth is not AppAuth.NONE:
        yield (
            f'{source.field("app_auth")}: got {_shown(str(auth))}, expected "none" beside an'
            " 'app_send_port': at the second port nothing is shown that a proof could stand in"
        )
    if two_ports and "app_socket" in given:
        yield (
            f"{source.field('app_socket')}: one connection to it serves both directions, so it goes without an"
            " 'app_send_port'"
        )
    host = given.get("app_host", LOCALHOST)
    if auth is AppAuth.NONE and not is_loopback(host) and not given.get("app_insecure"):
        yield (
            f'{source.field("app_host")}: with app_auth "none" whoever reaches {host} could be the app of this'
            ' instance: take a loopback address, or app_auth = "challenge"; if it is meant, say app_insecure = true'
        )
    together = ("metrics_certificate_file", "metrics_key_file")
    alone = [file for file in together if file in given]
    if len(alone) == 1:
        yield f"{source.place(alone[0])}: {' and '.join(map(repr, together))} go together, one of them is missing"
    key = given.get("encryption_key", "")
    if key.startswith("/") and Path(os.path.realpath(key)).is_relative_to(os.path.realpath(source.path.parent)):
        yield f"{source.field('encryption_key')}: the key lies in the home whose log it encrypts: keep it elsewhere"
    if given.get("checkpoints") is not Checkpoints.ON_STANDBY:
        return
    place = source.field("checkpoints")
    if is_in_folder(given.get("log", "")):
        yield f'{place}: "on-standby" is for a log in a database, as in log = "postgresql://..."'
    for setting, does in (("log_key", "authenticate"), ("encryption_key", "encrypt")):
        if setting in given:
            yield f'{place}: "on-standby" goes without a {setting}: only who writes a log can {does} it'
    if given.get("replay_check") is ReplayCheck.OFF:
        yield (
            f'{place}: "on-standby" goes without replay_check = "off": a state is taken of a follower because its calls'
            " are seen to be the same"
        )


# --- lines in errors --------------------------------------------------------------------------------------------------


def _dotted(table: str, key: str) -> str:
    return f"{table}.{key}" if table else key


def _shown(value: object) -> str:
    shown = f'"{value}"' if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else str(value)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."


def line_of(text: str, key: str, table: str = "") -> int | None:
    """Return the line, from 1, that sets ``key`` of ``table``; None if there is none. tomllib gives no line numbers."""
    current = ""
    spelled = rf"(?:{re.escape(key)}|\"{re.escape(key)}\"|'{re.escape(key)}')"
    setting = re.compile(rf"\s*{spelled}\s*[.=]")
    header = re.compile(r"\s*\[\[?\s*[\"']?([^\]\"']+?)[\"']?\s*\]")
    for number, line in enumerate(text.splitlines(), 1):
        if match := header.match(line):
            current = match[1]
            if f"{current}.".startswith(f"{_dotted(table, key)}."):
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


def override(settings: InstanceSettings, **changes: object) -> InstanceSettings:
    """Return ``settings`` with ``changes`` (as attributes or as in a file), checked as if they were in the file.

    Raises ConfigError.
    """
    unchanged = {key: value for key, value in _values(settings, log=settings.log).items() if key not in changes}
    values = unchanged | file_values(changes)
    return check_settings(values, settings.name, settings.folder.parent / f"{settings.name}.toml")


def file_values(attributes: Mapping[str, object]) -> dict[str, Any]:
    """Convert ``attributes`` of InstanceSettings to the form of a settings file, which has no None: omit it, or use the
    setting's word for it."""
    known = settings_of(InstanceSettings)
    values = {key: known[key].in_file(value) if key in known else value for key, value in attributes.items()}
    return {key: value for key, value in values.items() if value is not None}


def _non_defaults(table: Struct) -> dict[str, Any]:
    """Return the values of ``table`` that differ from the defaults, in the form of a settings file."""
    said: dict[str, Any] = {}
    for setting in settings_of(type(table)).values():
        value = getattr(table, setting.name)
        if value != setting.default:
            said[setting.name] = _non_defaults(value) if setting.schema is not None else setting.in_file(value)
    return said


def _values(settings: InstanceSettings, *, log: str | None) -> dict[str, Any]:
    values = _non_defaults(settings)
    for worked_out in ("app_auth", "log"):
        values.pop(worked_out, None)
    if settings.app_auth is not default_app_auth(settings.app_send_port):
        values["app_auth"] = settings.app_auth.value
    if log is not None:
        values["log"] = log
    if settings.allow is not None and settings.permissions:
        values["allow"] = _allow_value(
            {caller: settings.permissions.get(caller, ANYTHING) for caller in settings.allow}
        )
    return values


def settings_text(settings: InstanceSettings, *, log: str | None) -> str:
    """Return the text of a settings file, without settings that have their defaults; ``log`` None: without ``log``."""
    import tomlkit  # here: few commands write settings

    return tomlkit.dumps(_values(settings, log=log))


def text_with(text: str, field: str, value: str) -> str:
    """Set one ``field`` to ``value`` in the settings file's ``text``; return the new text, unchanged elsewhere."""
    import tomlkit

    document = tomlkit.parse(text)
    if field in document:
        document[field] = value
        return tomlkit.dumps(document)
    lines = text.splitlines(keepends=True)
    # Not at the end of the table: comments there belong to the next one.
    behind = line_of(text, "app_port") or line_of(text, "peer") or 0
    if behind and not lines[behind - 1].endswith("\n"):
        lines[behind - 1] += "\n"
    return "".join([*lines[:behind], tomlkit.dumps({field: value}), *lines[behind:]])


def text_with_allow(text: str, allow: Mapping[str, Permission]) -> str:
    """Set the table ``allow`` in the settings file's ``text``; return the new text, unchanged elsewhere."""
    import tomlkit

    document = tomlkit.parse(text)
    document.pop("allow", None)
    rest = tomlkit.dumps(document).rstrip("\n")
    return f"{rest}\n\n{tomlkit.dumps({'allow': _allow_value(allow)})}"


def _allow_value(allow: Mapping[str, Permission]) -> dict[str, object]:
    return {caller: _permission_value(permission) for caller, permission in allow.items()}


def _permission_value(permission: Permission) -> object:
    """Convert a permission to a value of the table [allow]."""
    numbers = {"rate": permission.rate, "concurrent": permission.concurrent}
    given = {key: number for key, number in numbers.items() if number is not None}
    if permission.methods is None:
        return given
    methods = ALL_METHODS if ALL_METHODS in permission.methods else sorted(permission.methods)
    return {"methods": methods, **given} if given else methods


def write_atomically(path: Path, data: bytes, *, mode: int = FILE_MODE) -> None:
    """Replace the contents of ``path`` by ``data``, completely or not at all, and sync it to the disk. Raises OSError.

    Its folder must exist. By default only its owner can read it.
    """
    descriptor, temporary = open_beside(path)
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
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
