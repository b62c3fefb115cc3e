"""doctor."""

from __future__ import annotations

import click

from coordinator.cli.common import name_argument, pass_registry
from coordinator.instances.registry import Registry
from protocol.command_line import echo, echo_json, json_option


@click.command()
@name_argument
@json_option
@pass_registry
def doctor(registry: Registry, name: str, as_json: bool) -> None:
    """Say what the crash of one machine would lose of NAME, by where its log is and how that is set up."""
    from coordinator.log.open import place_of

    place = place_of(registry.load(name).log)
    lines = place.durability()
    if as_json:
        echo_json({"log": place.where, "writer": place.holder(), "crashes": lines})
        return
    echo(f"{name}: its log is in {place.where}, written by {place.holder() or 'nobody now'}")
    for line in lines:
        echo(f"  {line}")
