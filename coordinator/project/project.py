"""Projects: find one, read its immortal.toml, list its services; write a new one from a template.

    name = "shop"                   of the project; without: its folder's

    [services.stock]                the instance "stock"
    app = "shop:Stock"              its class, or a file that has one service
    keep_checkpoints = "all"        any setting of an instance

    [services.stock.environment]
    CURRENCY = "EUR"

The user's modules are imported in processes of their own, never in this one.

The templates of `immortal init` are folders of files beside this module. In a template @name@ stands for the project's
name, and @package@ for the name of its package.
"""

from __future__ import annotations

import itertools
import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Struct, field

from immortal.coordinator.config import check_instance_name
from immortal.coordinator.config.schema import InstanceSettings, settings_of
from immortal.coordinator.config.settings_file import Source, read_table, read_toml, write_atomically
from immortal.coordinator.config.values import (
    LOG_KEY_FILE,
    NO_LOG_KEY,
    ConfigError,
    Log,
    Name,
    WrongValueError,
    check_app,
    doc,
    kind,
    split_tcp,
    whole,
)
from immortal.coordinator.instances.registry import HOME_DEFAULT, HOME_VARIABLE
from immortal.protocol import decoding
from immortal.protocol.errors import ImmortalError


class ProjectError(ConfigError):
    """Raised if a project does not exist, or its services are missing or wrong."""


class ServiceSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Instance that a project runs. ``app``: "module:Class". ``versions``: versions of the app that its class can run,
    its own first. ``files``: files of its code. ``calls``: instances that it calls. ``effects``: functions and their
    replacements in development. ``settings``: settings that the project gives, in the form of a settings file."""

    name: str
    app: str
    versions: tuple[int, ...]
    files: tuple[str, ...]
    calls: tuple[str, ...]
    environment: Mapping[str, str] = {}
    effects: Mapping[str, str] = {}
    settings: Mapping[str, Any] = {}

    @property
    def version(self) -> int:
        """Version of the class."""
        return self.versions[0]

    def runs_as(self, other: ServiceSpec) -> bool:
        """Return True if ``other`` runs in the same way. Shards are not compared: an app keeps that of its start."""
        shard = {SHARD_VARIABLE: ""}
        one, two = (msgspec.structs.replace(spec, environment={**spec.environment, **shard}) for spec in (self, other))
        return one == two


class Project:
    """Project of ``file``: an immortal.toml, or one Python file, whose services all have the default settings.

    ``home``: its registry, .immortal beside the file by default.
    """

    def __init__(self, file: Path, home: Path | None = None) -> None:
        self.file = file
        self.folder = file.parent
        self.home = home or self.folder / HOME_DEFAULT

    @property
    def is_module(self) -> bool:
        return self.file.suffix == ".py"

    def services(self) -> list[ServiceSpec]:
        """Return all services, importing modules in other processes. Raises ConfigError, ModuleImportError."""
        if self.is_module:
            return self._services_of_module()
        listings: dict[object, ModuleListing] = {}
        planned: dict[str, ServiceSpec] = {}
        for given in self.tables():
            for one in self._specs_of(given, listings):
                if one.name in planned:
                    raise ProjectError(f"{given.place}: another table already defines an instance {one.name!r}")
                planned[one.name] = one
        return list(planned.values())

    def _specs_of(self, given: ServiceTable, listings: dict[object, ModuleListing]) -> list[ServiceSpec]:
        """Return the instances of one table. ``listings``: imported modules, by module and environment."""
        module, _, class_name = given.app.partition(":")
        if not class_name:
            module = _module_of(given.app)
        key = module, *sorted(given.environment.items())
        if key not in listings:
            listings[key] = discover_services(module, self.folder, self.environment(given.environment))
        stand_ins = self._files_of(name.partition(":")[0] for name in given.effects.values())
        planned = list(_specs_of(given, module, class_name, listings[key], stand_ins))
        self._require_shards(given, planned)
        return planned

    def _registered(self, given: ServiceTable) -> list[str]:
        """Return the names of the table's registered instances, also of instances above its count."""
        names = itertools.takewhile(self._is_registered, (f"{given.name}-{number}" for number in itertools.count(1)))
        return [*filter(self._is_registered, (given.name,)), *names]

    def _require_shards(self, given: ServiceTable, planned: Sequence[ServiceSpec]) -> None:
        """Check that a keyed class has exactly the registered shards, if there are any. Raises ProjectError."""
        registered, names = self._registered(given), [one.name for one in planned]
        if SHARD_VARIABLE in planned[0].environment and registered and not given.count_before and registered != names:
            raise ProjectError(
                f"{given.place}: count = {given.count} for {given.name!r}, whose keys are in {', '.join(registered)}. "
                f"Set count as it was: 'immortal shards {given.name} --count {given.count}' moves the keys. Or drop "
                f"shards: 'immortal unregister NAME'"
            )

    def tables(self) -> list[ServiceTable]:
        """Return the tables of an immortal.toml. Raises ConfigError."""
        return [self._with_leaving(one) if one.count_before else one for one in read_project(self.file)[1]]

    def table(self, name: str) -> ServiceTable:
        """Return the table [services.NAME]. Raises ConfigError."""
        tables = {} if self.is_module else {one.name: one for one in self.tables()}
        if name not in tables:
            raise ProjectError(f"{self.file} has no table [services.{name}]; it has {', '.join(tables) or 'none'}")
        return tables[name]

    def _with_leaving(self, given: ServiceTable) -> ServiceTable:
        """Add the registered shards above the count, whose keys move to others. Without any, no keys move."""
        registered = self._registered(given)
        leaving = [one for one in registered if one not in _shard_names(given.name, given.count)]
        before = given.count_before if registered else 0
        return msgspec.structs.replace(given, count_before=before, leaving=tuple(leaving))

    def set_count(self, name: str, count: int, before: int = 0) -> tuple[str, ...]:
        """Write the count of instances into the table of a keyed class; return the shards that will have no keys.

        ``before``: the former count, while keys move. While a returned shard is registered, the table keeps one."""
        given = msgspec.structs.replace(self.table(name), count=count, count_before=before or count)
        left = self._with_leaving(given).leaving
        document = self._document()
        table = document["services"][name]
        table["count"] = count
        table.pop("count_before", None)
        if before or left:
            table["count_before"] = before or count
        self._write(document)
        return left

    def _is_registered(self, name: str) -> bool:
        return (self.home / f"{name}.toml").exists()

    def _files_of(self, modules: Iterable[str]) -> set[str]:
        """Return the real paths of those ``modules`` that are files in the project's folder."""
        files = {self.folder / f"{module.replace('.', '/')}.py" for module in modules}
        return {os.path.realpath(file) for file in files if file.is_file()}

    def _services_of_module(self) -> list[ServiceSpec]:
        module = _module_of(self.file.name)
        found = discover_services(module, self.folder, self.environment({}))
        planned: list[ServiceSpec] = []
        for class_name, service in found.services.items():
            if service.is_own:
                name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", class_name).lower()  # order_book for OrderBook
                given = ServiceTable(name, f"{module}:{class_name}", str(self.file))
                planned += _specs_of(given, module, class_name, found)
                self._require_shards(given, planned[-1:])
        if not planned:
            raise ProjectError(f"{self.file} has no service: a class below immortal.Immortal")
        return planned

    def names(self) -> list[str]:
        """Return the names of all instances; with an immortal.toml no code is imported. Raises as :meth:`services`."""
        if self.is_module:
            return [one.name for one in self._services_of_module()]
        return [name for given in self.tables() for name in _names(given)]

    def name(self) -> str:
        """Return the project's name, by immortal.toml or its folder. Raises ConfigError."""
        given = None if self.is_module else read_project(self.file)[0]
        return given or re.sub(r"[^A-Za-z0-9._-]+", "-", self.folder.name).strip("-.") or "project"

    def _table_of(self, name: str) -> ServiceTable:
        return next(one for one in self.tables() if name in _names(one))

    def service(self, name: str, app: str | None = None) -> ServiceSpec:
        """Return the instance ``name``. ``app``: another class for it. Raises as :meth:`services`."""
        given = self._table_of(name)
        given = msgspec.structs.replace(given, app=app or given.app)
        return next(one for one in self._specs_of(given, {}) if one.name == name)

    def set_app(self, name: str, app: str) -> str:
        """Write the class of the instance ``name`` into immortal.toml; return the class that was there.

        Raises ConfigError, also if other instances share the table.
        """
        given = self._table_of(name)
        if given.app == app:
            return app
        if given.count > 1:
            raise ProjectError(
                f'{given.place}: {given.count} instances run {given.app}; write app = "{app}" there, then'
                " 'immortal up --upgrade' upgrades all of them"
            )
        document = self._document()
        document["services"][given.name]["app"] = app
        self._write(document)
        return given.app

    def _document(self) -> Any:
        import tomlkit  # here: few commands write settings

        return tomlkit.parse(self.file.read_text("utf-8"))

    def _write(self, document: Any) -> None:
        text = document.as_string().encode()
        write_atomically(self.file, text, mode=stat.S_IMODE(self.file.stat().st_mode))

    def environment(self, overrides: Mapping[str, str]) -> dict[str, str]:
        """Return the environment for the processes of a service; ``overrides``: the variables of its table."""
        return {**os.environ, HOME_VARIABLE: str(self.home), **overrides}


def find_project(given: Path | None, home: Path | None = None) -> Project:
    """Find a project. ``given``: an immortal.toml, its folder, or a Python file; None: the immortal.toml of the current
    folder, or of the next one above that has any. ``home``: its registry's folder, if not .immortal beside it.

    Raises ProjectError.
    """
    if given is None:
        here = Path.cwd()
        for folder in (here, *here.parents):
            if (folder / FILE_NAME).is_file():
                return Project(folder / FILE_NAME, home)
        raise ProjectError(
            f"there is no {FILE_NAME} in {here} or above: 'immortal init' makes a project, 'immortal dev FILE.py' runs"
            " the services of one file"
        )
    path = given.absolute()
    if path.is_dir():
        path /= FILE_NAME
    if not path.is_file():
        raise ProjectError(f"there is no {path}")
    if path.suffix not in (".py", ".toml"):
        raise ProjectError(f"{path} is not a project: an {FILE_NAME}, its folder, or a Python file was expected")
    return Project(path, home)


def _specs_of(
    given: ServiceTable, module: str, class_name: str, listing: ModuleListing, files: Iterable[str] = ()
) -> Iterator[ServiceSpec]:
    """Yield the instances of one table. ``files``: further files of their code, in addition to the module's."""
    own = [name for name, service in listing.services.items() if service.is_own]
    if not class_name:
        if len(own) != 1:
            choices = " or ".join(f'"{module}:{name}"' for name in own)
            raise ProjectError(
                f"{given.place}: {given.app} has {len(own)} services, expected one"
                + (f"; choose one: app = {choices}" if own else "")
            )
        class_name = own[0]
    if class_name not in listing.services:
        known = ", ".join(own) or "none"
        raise ProjectError(f"{given.place}: {module!r} has no service {class_name!r}; there are: {known}")
    service = listing.services[class_name]
    numbers, before = _shard_names(given.name, given.count), given.count_before
    shards = {name: f"{number or 1}/{given.count}" for name, number in numbers.items()}
    if before:  # running shards keep the count that they were started with
        shards = {name: f"{number}/{given.count}/{before}" for name, number in numbers.items()}
        shards |= {name: f"{number or 1}/{before}" for name, number in _shard_names(given.name, before).items()}
    for name in _names(given):
        shard = {SHARD_VARIABLE: shards.get(name, "")} if service.is_keyed else {}
        yield ServiceSpec(
            name=check_instance_name(name),
            app=f"{module}:{class_name}",
            versions=tuple(service.versions),
            files=tuple(sorted({*listing.files, *files})),
            calls=tuple(service.peers),
            environment={**given.environment, **shard},
            effects=given.effects,
            settings=given.settings,
        )


def _names(given: ServiceTable) -> list[str]:
    return [*_shard_names(given.name, given.count), *given.leaving]


def _shard_names(name: str, count: int) -> dict[str, int]:
    """Return the numbers of a service's instances by name: from 1; 0 for one alone."""
    return {name: 0} if count == 1 else {f"{name}-{number}": number for number in range(1, count + 1)}


def _module_of(file: str) -> str:
    module = file.removesuffix(".py").replace("/", ".")
    if not all(part.isidentifier() for part in module.split(".")):
        raise ProjectError(f"{file!r} can't be imported: a module's name has letters, digits and '_'")
    return module


FILE_NAME = "immortal.toml"
PEER_DEFAULT = "tcp://127.0.0.1:*"
COUNT_MAX = 1000
SHARD_VARIABLE = "IMMORTAL_SHARD"  # of the app: appsdk/running/options.py
_FILE = re.compile(r"(?:[A-Za-z_]\w*/)*[A-Za-z_]\w*\.py")
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_UNIQUE_SETTINGS = ("app_port", "app_send_port", "app_socket", "log", "log_key")  # no two instances can have the same


def _app(value: object) -> str:
    if not isinstance(value, str):
        raise WrongValueError
    try:
        return value if _FILE.fullmatch(value) else check_app(value)
    except ConfigError:
        raise WrongValueError from None


def _peer(value: object) -> str:
    """Check an endpoint in the form of 'immortal register', in which * stands for a free port."""
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
            raise WrongValueError(f"a text for each name, but {name!r} has none")
    return tuple(value.items())


def _effects(value: object) -> tuple[tuple[str, str], ...]:
    if not isinstance(value, dict):
        raise WrongValueError
    for text in (*value, *value.values()):
        if not isinstance(text, str) or not _FUNCTION.fullmatch(text):
            raise WrongValueError(f"functions as module:function, not {text!r}")
    return tuple(value.items())


class Service(InstanceSettings, frozen=True, kw_only=True):
    """Schema of a table [services.NAME]: all settings of an instance, and those of running it in a project."""

    name: str = ""  # the table's
    folder: Path = Path()
    log: Annotated[Log, doc("The log's folder, or its URL: lmdb:FOLDER.", default="HOME/NAME/log")] = ""
    peer: Annotated[
        str,
        kind("ENDPOINT", 'an endpoint such as "tcp://127.0.0.1:7001", or "tcp://127.0.0.1:*"', read=_peer),
        doc("Address for its peers; * takes a free port."),
    ] = PEER_DEFAULT
    app: Annotated[
        str | None,
        kind("", '"module:Class", or a file of this folder with one service, such as "shop.py"', read=_app),
        doc("Its class."),
    ] = None
    count: Annotated[int, whole(1, COUNT_MAX), doc("Number of instances: NAME-1, NAME-2 and so on.")] = 1
    count_before: Annotated[
        int, whole(0, COUNT_MAX), doc("Count before 'immortal shards NAME --count', which sets it.", default="none")
    ] = 0
    environment: Annotated[
        tuple[tuple[str, str], ...],
        kind("", 'a table of names and texts, such as { CURRENCY = "EUR" }', read=_environment),
        doc("Environment variables of its processes."),
    ] = ()
    effects: Annotated[
        tuple[tuple[str, str], ...],
        kind("", 'a table of functions, such as { "shop:charge" = "fakes:charge" }', read=_effects),
        doc("Functions that replace those of effects, in 'immortal dev' alone."),
    ] = ()


class ProjectFile(Struct, frozen=True, kw_only=True):
    name: Annotated[Name | None, doc("Name of the project.", default="the folder's name")] = None
    services: Annotated[Mapping[str, Service], doc("Its services, by name.")] = field(default_factory=dict)


class ServiceTable(Struct, frozen=True):
    """Table [services.NAME] as read. ``settings``: those of its instances, in the form of a settings file. ``place``:
    file and line, for errors. ``count_before``: former count while keys move, else 0; ``leaving``: the instances that
    have no keys afterwards."""

    name: str
    app: str
    place: str = ""
    count: int = 1
    environment: Mapping[str, str] = {}
    effects: Mapping[str, str] = {}
    settings: Mapping[str, Any] = {}
    count_before: int = 0
    leaving: tuple[str, ...] = ()


def read_project(path: Path) -> tuple[str | None, list[ServiceTable]]:
    """Read an immortal.toml; return the project's name, if given, and its services.

    Raises ConfigError, FileNotFoundError.
    """
    values, source = read_toml(path)
    found = ProjectFile(**read_table(source, ProjectFile, values))
    if not found.services:
        raise ConfigError(f'{path}: there is no service: a table such as [services.shop] with app = "shop:Shop"')
    return found.name, [
        _table_of(source, name, service, values["services"][name]) for name, service in found.services.items()
    ]


def _table_of(source: Source, name: str, service: Service, values: Mapping[str, Any]) -> ServiceTable:
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
    fixed = [key for key in _UNIQUE_SETTINGS if key in settings and settings[key] != "file"]
    fixed += ["peer"] if address is None or address[1] else []
    if service.count > 1 and fixed:
        raise ConfigError(f"{source.field(fixed[0], table)}: {service.count} instances can't share one; leave it out")
    for key, value in settings.items():
        if known[key].about.get("path") and isinstance(value, str) and _is_path(key, value):
            settings[key] = str(source.path.parent.absolute() / value)
    return ServiceTable(
        name=name,
        app=service.app,
        place=source.place(name, "services"),
        count=service.count,
        count_before=service.count_before,
        environment=dict(service.environment),
        effects=dict(service.effects),
        settings=settings,
    )


def _is_path(key: str, value: str) -> bool:
    """Return True if ``value`` is a path relative to the file, and no URL or special word."""
    return (
        not value.startswith(("/", "unix:"))
        and "://" not in value
        and (key != "log_key" or value not in (LOG_KEY_FILE, NO_LOG_KEY))
    )


class ModuleImportError(ImmortalError):
    """Raised if a module can't be imported; the text holds the traceback of the user's code."""


class DiscoveredService(msgspec.Struct, frozen=True):
    """Service class in a module. ``versions``: versions of the app that it can run, its own first. ``peers``: instances
    that it calls. ``is_own``: the module defines it, in its newest version. ``is_keyed``: each key has a state."""

    versions: list[int]
    peers: list[str]
    is_own: bool
    is_keyed: bool = False


class ModuleListing(msgspec.Struct, frozen=True):
    """Services of a module by class name, and the ``files`` of the project that the module imports."""

    services: dict[str, DiscoveredService]
    files: list[str]


def discover_services(module: str, folder: Path, environment: Mapping[str, str]) -> ModuleListing:
    """Import ``module`` of ``folder`` in a process with ``environment``. Raises ModuleImportError."""
    argv = [sys.executable, "-P", "-m", "immortal.appsdk.running.listing", module]
    done = subprocess.run(
        argv,
        cwd=folder,
        env={**environment, "PYTHONBREAKPOINT": "0"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    if done.returncode != 0:
        errors = done.stderr.decode("utf-8", "replace").strip()
        raise ModuleImportError(errors or f"importing {module} ended its process with status {done.returncode}")
    return decoding.decode_json(done.stdout, type=ModuleListing)


_FOLDER = Path(__file__).parent / "templates"
_COMMON = "common"  # folder of the files that all projects get
_SUFFIX = ".template"  # so that no tool reads a template as a file of this repository
TEMPLATES = ("shop", "agent", "worker")


class NewProjectError(ImmortalError):
    """Raised if a project can't be created: the name is wrong, or a file exists already."""


def make_project(folder: Path, name: str, template: str) -> list[Path]:
    """Write the files of ``template`` into ``folder``, which is created if missing; return their paths.

    Existing files are not overwritten. Raises NewProjectError, OSError.
    """
    package = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    if not package or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise NewProjectError(
            f"{name!r} is not a project name: letters, digits, '-', '_' and '.', starting with a letter or digit"
        )
    files = {
        folder / file: text.replace("@name@", name).replace("@package@", package) for file, text in _texts(template)
    }
    if there := [file for file in files if file.exists()]:
        raise NewProjectError(f"{there[0]} is there already, nothing was written: 'immortal init NAME' makes a folder")
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in files.items():
        with file.open("x", encoding="utf-8") as new:
            new.write(text)
    return list(files)


def _texts(template: str) -> Iterator[tuple[str, str]]:
    for part in (template, _COMMON):
        for file in sorted((_FOLDER / part).iterdir()):
            if file.name.endswith(_SUFFIX):
                yield file.name.removesuffix(_SUFFIX), file.read_text("utf-8")
