"""clock: what a running instance makes of its machine's clock."""

from __future__ import annotations

import click

from immortal.coordinator.cli.common import name_argument, pass_registry
from immortal.coordinator.cli.records import time_text
from immortal.coordinator.cli.status import clock_problem
from immortal.coordinator.instances.registry import Registry
from immortal.coordinator.operator import control
from immortal.protocol.command_line import echo, echo_json, json_option


@click.command()
@name_argument
@click.option("--accept", is_flag=True, help="The machine's clock is right: take its jump now.")
@json_option
@pass_registry
def clock(registry: Registry, name: str, accept: bool, as_json: bool) -> None:
    """Show the time of a running instance, and whether a jump of its machine's clock is held back.

    A jump is taken by itself once it has stood for a while (clock_hold_s in [tuning]).
    """
    folder = registry.load(name).folder
    answer = control.query(folder, "accept-clock" if accept else "clock")
    if as_json:
        echo_json(answer)
        return
    agrees = "the machine's clock agrees"
    echo(f"{name}: {time_text(answer['time_ns'])}; {clock_problem(answer) if answer['ahead_s'] else agrees}")
