"""Which project is meant, and what it runs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from immortal.coordinator.config import ConfigError, check_instance_name
from immortal.coordinator.instances.registry import HOME_DEFAULT, HOME_VARIABLE
from immortal.coordinator.project.listing import Listing, list_module
from immortal.coordinator.project.schema import FILE_NAME, GivenService, read_project


class ProjectError(ConfigError):
    """There is no such project, or it does not say what is to run."""


class PlannedService(msgspec.Struct, frozen=True, kw_only=True):
    """One instance. ``app``: "module:Class". ``version``: of its class. ``files``: those that its code is made of.
    ``calls``: the instances that it calls. ``effects``: what runs in place of which functions, while it is developed.
    ``settings``: those that the project gives, as they stand in a file."""

    name: str
    app: str
    version: int
    files: tuple[str, ...]
    calls: tuple[str, ...]
    environment: Mapping[str, str] = {}
    effects: Mapping[str, str] = {}
    settings: Mapping[str, Any] = {}


class Project:
    """``file``: immortal.toml, or one file of Python: all services in it, with the usual settings."""

    def __init__(self, file: Path, home: Path | None = None) -> None:
        self.file = file
        self.folder = file.parent
        self.home = home or self.folder / HOME_DEFAULT

    @property
    def is_module(self) -> bool:
        return self.file.suffix == ".py"

    def services(self) -> list[PlannedService]:
        """Imports the project's modules, in processes of their own. Raises ConfigError, ListingError."""
        if self.is_module:
            return self._services_of_module()
        listings: dict[object, Listing] = {}
        planned: dict[str, PlannedService] = {}
        for given in read_project(self.file)[1]:
            module, _, class_name = given.app.partition(":")
            if not class_name:
                module = _module_of(given.app)
            key = module, *sorted(given.environment.items())
            if key not in listings:
                listings[key] = list_module(module, self.folder, self.environment(given.environment))
            stand_ins = self._files_of(name.partition(":")[0] for name in given.effects.values())
            for one in _planned(given, module, class_name, listings[key], stand_ins):
                if one.name in planned:
                    raise ProjectError(f"{given.place}: there is an instance {one.name!r} already, by another table")
                planned[one.name] = one
        return list(planned.values())

    def _files_of(self, modules: Iterable[str]) -> set[str]:
        """Of those that are in the project's folder."""
        files = {self.folder / f"{module.replace('.', '/')}.py" for module in modules}
        return {os.path.realpath(file) for file in files if file.is_file()}

    def _services_of_module(self) -> list[PlannedService]:
        module = _module_of(self.file.name)
        found = list_module(module, self.folder, self.environment({}))
        planned: list[PlannedService] = []
        for class_name, service in found.services.items():
            if service.is_own:
                given = GivenService(_instance_name(class_name), f"{module}:{class_name}", str(self.file))
                planned += _planned(given, module, class_name, found)
        if not planned:
            raise ProjectError(f"{self.file} has no service: a class below immortal.Immortal")
        return planned

    def names(self) -> list[str]:
        """Of all instances, without an import of any code where immortal.toml says them. Raises as :meth:`services`."""
        if self.is_module:
            return [one.name for one in self._services_of_module()]
        return [name for given in read_project(self.file)[1] for name in _names(given)]

    def name(self) -> str:
        """What it is called: by immortal.toml, or as its folder. Raises ConfigError."""
        given = None if self.is_module else read_project(self.file)[0]
        return given or re.sub(r"[^A-Za-z0-9._-]+", "-", self.folder.name).strip("-.") or "project"

    def environment(self, own: Mapping[str, str]) -> dict[str, str]:
        """For the processes of a service whose table says ``own``."""
        return {**os.environ, HOME_VARIABLE: str(self.home), **own}


def find_project(given: Path | None, home: Path | None = None) -> Project:
    """``given``: an immortal.toml, its folder, or a file of Python; None: the immortal.toml of the current folder, or
    of the next one above that has any. ``home``: of its registry, if not .immortal beside it. Raises ProjectError.
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
        raise ProjectError(f"{path} is no project: an {FILE_NAME}, its folder, or a file of Python were expected")
    return Project(path, home)


def _planned(
    given: GivenService, module: str, class_name: str, listing: Listing, files: Iterable[str] = ()
) -> Iterator[PlannedService]:
    """``files``: that its code is made of, besides those of the module."""
    own = [name for name, service in listing.services.items() if service.is_own]
    if not class_name:
        if len(own) != 1:
            choices = " or ".join(f'"{module}:{name}"' for name in own)
            raise ProjectError(
                f"{given.place}: {given.app} has {len(own)} services, expected one"
                + (f"; say which: app = {choices}" if own else "")
            )
        class_name = own[0]
    if class_name not in listing.services:
        known = ", ".join(own) or "none"
        raise ProjectError(f"{given.place}: {module!r} has no service {class_name!r}; there are: {known}")
    service = listing.services[class_name]
    for name in _names(given):
        yield PlannedService(
            name=check_instance_name(name),
            app=f"{module}:{class_name}",
            version=service.version,
            files=tuple(sorted({*listing.files, *files})),
            calls=tuple(service.peers),
            environment=given.environment,
            effects=given.effects,
            settings=given.settings,
        )


def _names(given: GivenService) -> list[str]:
    if given.count == 1:
        return [given.name]
    return [f"{given.name}-{number}" for number in range(1, given.count + 1)]


def _module_of(file: str) -> str:
    module = file.removesuffix(".py").replace("/", ".")
    if not all(part.isidentifier() for part in module.split(".")):
        raise ProjectError(f"{file!r} can't be imported: a module's name has letters, digits and '_'")
    return module


def _instance_name(class_name: str) -> str:
    """ "OrderBook" becomes "order_book"."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", class_name).lower()
