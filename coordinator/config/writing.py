"""Settings files are written whole or not at all; what somebody wrote into one by hand stays."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from immortal.coordinator.config.reading import check_settings, default_app_auth, line_of
from immortal.coordinator.config.schema import InstanceSettings
from immortal.coordinator.config.setting import settings_of
from immortal.coordinator.core.permissions import ALL_METHODS, ANYTHING, Permission
from immortal.coordinator.fault_points import FaultPoint, reach
from immortal.protocol.private_files import FILE_MODE, open_beside


def override(settings: InstanceSettings, **changes: object) -> InstanceSettings:
    """``settings`` with ``changes`` (as attributes or as in a file), checked as if they stood in the file.

    Raises ConfigError.
    """
    unchanged = {key: value for key, value in _values(settings, log=settings.log).items() if key not in changes}
    values = unchanged | file_values(changes)
    return check_settings(values, settings.name, settings.folder.parent / f"{settings.name}.toml")


def file_values(attributes: Mapping[str, object]) -> dict[str, Any]:
    """As ``attributes`` of InstanceSettings stand in a file. One that is None and has no word for that does not."""
    known = settings_of(InstanceSettings)
    values = {key: known[key].in_file(value) if key in known else value for key, value in attributes.items()}
    return {key: value for key, value in values.items() if value is not None}


def _said(table: Struct) -> dict[str, Any]:
    """What of ``table`` is no default, as it stands in a file."""
    said: dict[str, Any] = {}
    for setting in settings_of(type(table)).values():
        value = getattr(table, setting.name)
        if value != setting.default:
            said[setting.name] = _said(value) if setting.schema is not None else setting.in_file(value)
    return said


def _values(settings: InstanceSettings, *, log: str | None) -> dict[str, Any]:
    values = _said(settings)
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
    """The settings file's text. Defaults are left out, ``log`` too when it is None."""
    import tomlkit  # here: few commands write settings

    return tomlkit.dumps(_values(settings, log=log))


def text_with(text: str, field: str, value: str) -> str:
    """The settings file's ``text`` with another ``field`` of one value in it, and all else as somebody wrote it."""
    import tomlkit

    document = tomlkit.parse(text)
    if field in document:
        document[field] = value
        return tomlkit.dumps(document)
    lines = text.splitlines(keepends=True)
    # Not at the end of the table: comments there are of the next one.
    behind = line_of(text, "app_port") or line_of(text, "peer") or 0
    if behind and not lines[behind - 1].endswith("\n"):
        lines[behind - 1] += "\n"
    return "".join([*lines[:behind], tomlkit.dumps({field: value}), *lines[behind:]])


def text_with_allow(text: str, allow: Mapping[str, Permission]) -> str:
    """The settings file's ``text`` with another ``allow`` in it, as a table, and all else as somebody wrote it."""
    import tomlkit

    document = tomlkit.parse(text)
    document.pop("allow", None)
    rest = tomlkit.dumps(document).rstrip("\n")
    return f"{rest}\n\n{tomlkit.dumps({'allow': _allow_value(allow)})}"


def _allow_value(allow: Mapping[str, Permission]) -> dict[str, object]:
    return {caller: _permission_value(permission) for caller, permission in allow.items()}


def _permission_value(permission: Permission) -> object:
    """As it stands in the table [allow]."""
    numbers = {"rate": permission.rate, "concurrent": permission.concurrent}
    given = {key: number for key, number in numbers.items() if number is not None}
    if permission.methods is None:
        return given
    methods = ALL_METHODS if ALL_METHODS in permission.methods else sorted(permission.methods)
    return {"methods": methods, **given} if given else methods


def write_atomically(path: Path, data: bytes, *, mode: int = FILE_MODE) -> None:
    """``path`` holds ``data`` whole, or what it held before, whatever happens. Its folder must exist. Raises OSError.

    It is for its owner alone, where ``mode`` does not say otherwise.
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
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
