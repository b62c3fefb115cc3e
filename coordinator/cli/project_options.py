"""What the commands for projects share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from immortal.coordinator.cli.common import Function
from immortal.coordinator.instances.registry import Registry, RegistryError
from immortal.protocol.shared_home import is_url

if TYPE_CHECKING:
    from immortal.coordinator.project.project import Project


def project_option(function: Function) -> Function:
    return click.option(
        "--project",
        "path",
        type=click.Path(path_type=Path),
        help="An immortal.toml, its folder, or a file of Python.  [default: that of this folder or of one above]",
    )(function)


def project_of(ctx: click.Context, path: Path | None) -> tuple[Project, Registry]:
    """The project that is meant, and its registry: that of --home where it is given. Raises ProjectError."""
    from immortal.coordinator.project.project import find_project

    main = ctx.find_root()
    if is_url(main.params["home"]):
        raise RegistryError(
            "a project has a registry of its own, in a folder: leave --home and IMMORTAL_HOME out, or name a folder;"
            " services of many machines are run one by one, with 'immortal run'"
        )
    given = main.get_parameter_source("home") not in (None, ParameterSource.DEFAULT)
    project = find_project(path, Path(main.params["home"]).absolute() if given else None)
    return project, Registry(project.home)
