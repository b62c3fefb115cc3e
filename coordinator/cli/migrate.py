"""migrate: an instance goes on at another machine, which follows its log."""

from __future__ import annotations

import time

import click

from immortal.coordinator.cli.common import name_argument, operator_name, pass_registry
from immortal.coordinator.instances.registry import Registry
from immortal.coordinator.log.open import place_of
from immortal.coordinator.operator import control
from immortal.protocol.command_line import FailedError, echo, echo_json, json_option
from immortal.protocol.shown import printable

TIMEOUT_S = 10.0
POLL_S = 0.02


@click.command()
@name_argument
@click.option("--to", default="", metavar="HOST", help="The machine; by default any that has caught up with the log.")
@click.option("--wait", is_flag=True, help=f"Wait as long as the move takes.  [default: {TIMEOUT_S:g} s]")
@json_option
@pass_registry
def migrate(registry: Registry, name: str, to: str, wait: bool, as_json: bool) -> None:
    """Hand an instance over to another machine that follows its log, and wait until it works there.

    Its log is one that other machines reach (PostgreSQL). Who had the instance ends with status 4; with
    'immortal run --restart' it follows from then on. HOST is a host name, or all of what 'immortal status' shows of a
    standby: "HOST (process PID)".
    """
    settings = registry.load(name)
    place = place_of(settings.log)
    if not place.is_shared:
        raise FailedError(
            f"the log of {name!r} is in a folder, which no other machine reaches: 'immortal log copy {name} --to "
            "postgresql://... --switch' brings it into a database, once it is stopped"
        )
    try:
        answer = control.query(settings.folder, "hand-over", argument={"to": to, "who": operator_name()})
    except control.NotRunningError:
        holder = place.holder()
        where = "it runs nowhere" if holder is None else f"{holder} has it: ask there"
        raise FailedError(f"{name!r} does not run here, so nothing can be handed over; {where}") from None
    except control.RefusedError as error:
        raise FailedError(error.reason) from None
    if "error" in answer:
        raise FailedError(str(answer["error"]))
    heir, deadline_s = str(answer["to"]), time.monotonic() + TIMEOUT_S
    while place.holder() != heir or place.endpoint() is None:
        if not wait and time.monotonic() > deadline_s:
            raise FailedError(
                f"{heir} has not taken {name!r} over within {TIMEOUT_S:g} s; the move goes on, and"
                f" {place.holder() or 'nobody'} has it so far: 'immortal status {name}' says who; --wait waits longer"
            )
        time.sleep(POLL_S)
    if as_json:
        echo_json({"name": name, "to": heir, "peer": place.endpoint()})
    else:
        echo(printable(f"{name}: {heir} has it now, at {place.endpoint()}"))
