"""immortal.toml: one schema, from which come its checks and what its errors say.

name = "shop"                   of the project; without: its folder's

[services.stock]                the instance "stock"
app = "shop:Stock"              its class, or a file that has one service
keep_checkpoints = "all"        any setting of an instance

[services.stock.environment]
CURRENCY = "EUR"
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from msgspec import Struct, field

from immortal.coordinator.config.reading import Source, read_table, read_toml
from immortal.coordinator.config.schema import InstanceSettings
from immortal.coordinator.config.setting import settings_of
from immortal.coordinator.config.values import (
    ConfigError,
    Log,
    Name,
    WrongValueError,
    check_app,
    kind,
    says,
    split_tcp,
    whole,
)

FILE_NAME = "immortal.toml"
PEER_DEFAULT = "tcp://127.0.0.1:*"
COUNT_MAX = 1000
_FILE = re.compile(r"(?:[A-Za-z_]\w*/)*[A-Za-z_]\w*\.py")
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_OF_ONE = ("app_port", "app_send_port", "app_socket", "log", "log_key")  # no two instances can have the same


def _app(value: object) -> str:
    if not isinstance(value, str):
        raise WrongValueError
    try:
        return value if _FILE.fullmatch(value) else check_app(value)
    except ConfigError:
        raise WrongValueError from None


def _peer(value: object) -> str:
    """As register takes it: with * for a free port."""
    if not isinstance(value, str) or (not value.startswith("ipc://") and split_tcp(value) is None):
        raise WrongValueError
    return value


def _environment(value: object) -> tuple[tuple[str, str], ...]:
    if not isinstance(value, dict):
        raise WrongValueError
    for name, text in value.items():
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            raise WrongValueError(f"names of letters, digits and '_', not {name!r}")
        if not isinstance(text, str) or "\0" in text:
            raise WrongValueError(f"a text for each name, but {name!r} is none")
    return tuple(value.items())


def _effects(value: object) -> tuple[tuple[str, str], ...]:
    if not isinstance(value, dict):
        raise WrongValueError
    for text in (*value, *value.values()):
        if not isinstance(text, str) or not _FUNCTION.fullmatch(text):
            raise WrongValueError(f"functions as module:function, not {text!r}")
    return tuple(value.items())


class Service(InstanceSettings, frozen=True, kw_only=True):
    """One table [services.NAME]: all settings of an instance, and what it takes to run it here."""

    name: str = ""  # the table's
    folder: Path = Path()
    log: Annotated[Log, says("The log's folder, or its URL: lmdb:FOLDER.", default="HOME/NAME/log")] = ""
    peer: Annotated[
        str,
        kind("ENDPOINT", 'an endpoint such as "tcp://127.0.0.1:7001", or "tcp://127.0.0.1:*"', read=_peer),
        says("Where peers reach it; * takes a free port."),
    ] = PEER_DEFAULT
    app: Annotated[
        str | None,
        kind("", '"module:Class", or a file of this folder with one service, such as "shop.py"', read=_app),
        says("Its class."),
    ] = None
    count: Annotated[int, whole(1, COUNT_MAX), says("How many instances there are: NAME-1, NAME-2 and so on.")] = 1
    environment: Annotated[
        tuple[tuple[str, str], ...],
        kind("", 'a table of names and texts, such as { CURRENCY = "EUR" }', read=_environment),
        says("Environment variables of its processes."),
    ] = ()
    effects: Annotated[
        tuple[tuple[str, str], ...],
        kind("", 'a table of functions, such as { "shop:charge" = "fakes:charge" }', read=_effects),
        says("What runs in place of the functions of effects, in 'immortal dev' alone."),
    ] = ()


class ProjectFile(Struct, frozen=True, kw_only=True):
    name: Annotated[Name | None, says("Of the project.", default="that of its folder")] = None
    services: Annotated[Mapping[str, Service], says("Its services, by name.")] = field(default_factory=dict)


class GivenService(Struct, frozen=True):
    """``settings``: those that the table gives, as they stand in a file. ``place``: where it stands, for errors."""

    name: str
    app: str
    place: str = ""
    count: int = 1
    environment: Mapping[str, str] = {}
    effects: Mapping[str, str] = {}
    settings: Mapping[str, Any] = {}


def read_project(path: Path) -> tuple[str | None, list[GivenService]]:
    """The project's name, if ``path`` gives it, and its services. Raises ConfigError, and FileNotFoundError."""
    values, source = read_toml(path)
    found = ProjectFile(**read_table(source, ProjectFile, values))
    if not found.services:
        raise ConfigError(f'{path}: there is no service: a table such as [services.shop] with app = "shop:Shop"')
    return found.name, [
        _given(source, name, service, values["services"][name]) for name, service in found.services.items()
    ]


def _given(source: Source, name: str, service: Service, values: Mapping[str, Any]) -> GivenService:
    table = f"services.{name}"
    if service.app is None:
        raise ConfigError(f'{source.place(name, "services")}: the field {table}.app is missing: app = "module:Class"')
    known = settings_of(InstanceSettings)
    settings = {key: value for key, value in values.items() if key in known and key != "app"}
    if "app_send_port" in settings:
        raise ConfigError(
            f"{source.field('app_send_port', table)}: the apps that a project runs use one connection; start such an"
            " instance by hand"
        )
    address = split_tcp(service.peer)
    fixed = [key for key in _OF_ONE if key in settings and settings[key] != "file"]
    fixed += ["peer"] if address is None or address[1] else []
    if service.count > 1 and fixed:
        raise ConfigError(f"{source.field(fixed[0], table)}: {service.count} instances can't share one; leave it out")
    for key, value in settings.items():
        if known[key].about.get("path") and isinstance(value, str) and _is_path(key, value):
            settings[key] = str(source.path.parent.absolute() / value)
    return GivenService(
        name=name,
        app=service.app,
        place=source.place(name, "services"),
        count=service.count,
        environment=dict(service.environment),
        effects=dict(service.effects),
        settings=settings,
    )


def _is_path(key: str, value: str) -> bool:
    """Whether ``value`` is relative to the file, and no URL or word."""
    return not value.startswith(("/", "unix:")) and "://" not in value and (key, value) != ("log_key", "file")
