"""systemd: a project's unit files."""

from __future__ import annotations

from pathlib import Path

import click

from immortal.coordinator.cli.project_options import project_of, project_option
from immortal.protocol.command_line import echo


@click.command()
@project_option
@click.option("--output", type=click.Path(file_okay=False, path_type=Path), help="Write them into this folder.")
@click.option("--user", "for_user", is_flag=True, help="For your own systemd, not the machine's.")
@click.pass_context
def systemd(ctx: click.Context, path: Path | None, output: Path | None, for_user: bool) -> None:
    """Print systemd's unit files of a project: a service for each instance, and a target for all.

    What is not registered is registered. Files that are there are written over.
    """
    from immortal.coordinator.project.registering import register
    from immortal.coordinator.project.units import units

    project, registry = project_of(ctx, path)
    services = project.services()
    for service in services:
        if said := register(registry, service):
            echo(f"{service.name}: {said}", err=True)
    texts = units(project, services, for_user=for_user)
    for name, text in texts.items():
        if output is None:
            echo(f"# {name}")
            for line in text.splitlines():
                echo(line)
            echo("")
        else:
            output.mkdir(parents=True, exist_ok=True)
            (output / name).write_text(text, "utf-8")
            echo(str(output / name))
    manager = "systemctl --user" if for_user else "systemctl"
    everything = " ".join(texts)
    echo(f"{manager} daemon-reload && {manager} enable --now {everything}", err=True)
