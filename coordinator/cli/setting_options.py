"""Options for settings: type, range, default and help as :mod:`immortal.coordinator.config.schema` says them."""

from __future__ import annotations

import enum
import os
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from immortal.coordinator.config import InstanceSettings
from immortal.coordinator.config.app_hosts import UNIX
from immortal.coordinator.config.setting import Setting, settings_of
from immortal.coordinator.config.values import WrongValueError
from immortal.coordinator.log_url import is_in_folder

_SETTING = re.compile(r"(?<![/\w])[a-z]+(_[a-z]+)+")  # in a text; options have names of their own
_Function = TypeVar("_Function", bound=Callable[..., Any])


class _Number(click.IntRange):
    """A whole number in the setting's range, or a word of its own."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting.least, setting.most)
        self._words = [setting.about[word] for word in ("none", "free") if word in setting.about]
        self.name = " or ".join([setting.about["unit"] or "integer", *self._words])

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value in self._words:
            return value
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as error:
            also = "".join(f", and is not {word!r} either" for word in self._words)
            self.fail(f"{error.message.rstrip('.')}{also}", param, ctx)


class _Text(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions of click only
    """What the setting's kind takes. A path may be relative to the working directory."""

    def __init__(self, setting: Setting) -> None:
        self.name = setting.about["metavar"]
        self._setting = setting

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        about, meant = self._setting.about, value
        if "free" in about:
            return value  # for the registry to complete, and to judge
        is_place = about.get("path") == "log" and not is_in_folder(value)
        if "path" in about and not is_place and value not in ("", UNIX, about.get("bare")):
            prefix = UNIX if value.startswith(UNIX) else ""
            meant = prefix + os.path.abspath(value.removeprefix(prefix))
        try:
            self._setting.value_of(meant)
        except WrongValueError as error:
            self.fail(f"got {value!r}, expected {error}", param, ctx)
        if about.get("path") in ("folder", "log") and os.path.isfile(meant):
            self.fail(f"{meant} is a file, expected a folder", param, ctx)
        return meant


def _option(setting: Setting, default: str | None = None) -> Callable[[_Function], _Function]:
    details: dict[str, Any] = {"required": setting.is_required and default is None}
    if setting.type is bool:
        details |= {"is_flag": True, "default": None}
    elif setting.type is int:
        details["type"] = _Number(setting)
    elif isinstance(setting.type, type) and issubclass(setting.type, enum.Enum):
        details["type"] = click.Choice([choice.value for choice in setting.type])
    else:
        details |= {"type": _Text(setting), "metavar": setting.about["metavar"]}
        if "bare" in setting.about:
            details |= {"is_flag": False, "flag_value": setting.about["bare"]}
    shown = "" if details["required"] or setting.type is bool else f"  [default: {default or setting.default_text}]"
    return click.option(_flag(setting.name), help=_SETTING.sub(_as_option, f"{setting.text}{shown}"), **details)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _as_option(match: re.Match[str]) -> str:
    return _flag(match[0]) if match[0] in settings_of(InstanceSettings) else match[0]


def start_option(name: str) -> Callable[[_Function], _Function]:
    """The option that changes setting ``name`` for one start; None where it is not given."""
    return _option(settings_of(InstanceSettings)[name], "that of the settings")


def register_options(function: _Function) -> _Function:
    """One for each setting that has a single value, as it stands in a file; None where it is not given."""
    for setting in reversed(list(settings_of(InstanceSettings).values())):
        if setting.is_single:
            function = _option(setting)(function)
    return function


def said(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of ``options`` that were given."""
    return {name: value for name, value in options.items() if value is not None}
