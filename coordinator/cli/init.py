"""init: a project that runs."""

from __future__ import annotations

import os
from pathlib import Path

import click

from immortal.coordinator.project.new_project import TEMPLATES, make_project
from immortal.protocol.command_line import echo


@click.command()
@click.argument("name", required=False)
@click.option(
    "--template",
    type=click.Choice(TEMPLATES),
    default=TEMPLATES[0],
    show_default=True,
    help="shop: two services that call each other; agent: steps with a model; worker: a queue of jobs.",
)
def init(name: str | None, template: str) -> None:
    """Make a project that runs, with a test, in the folder NAME, or in this one.

    What is there is never written over.
    """
    folder = Path(name).absolute() if name else Path.cwd()
    files = make_project(folder, folder.name, template)
    for file in files:
        echo(os.path.relpath(file))
    change = f"cd {os.path.relpath(folder)} && " if name else ""
    echo(f"run it with: {change}immortal dev")
