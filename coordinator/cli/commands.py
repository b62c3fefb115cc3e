"""The group of all commands."""

from __future__ import annotations

import importlib

import click

from coordinator.cli.common import Commands
from coordinator.cli.instances import coordinator, register, run, unregister
from coordinator.cli.log import log
from coordinator.cli.status import status
from coordinator.registry import HOME_DEFAULT, HOME_VARIABLE, Registry
from protocol import compiled

_LOADED_WHEN_ASKED_FOR = {
    "audit": "coordinator.cli.audit:audit",
    "bench": "coordinator.cli.bench:bench",
    "call": "coordinator.cli.call:call",
    "checkpoint": "coordinator.cli.operate:checkpoint",
    "dead-letters": "coordinator.cli.dead_letters:dead_letters",
    "keys": "coordinator.cli.keys:keys",
    "peers": "coordinator.cli.peers:peers",
    "pipeline": "pipeline.cli:pipeline",
    "recover": "coordinator.cli.recover:recover",
    "replay": "coordinator.cli.replay:replay",
    "restart": "coordinator.cli.lifecycle:restart",
    "clock": "coordinator.cli.clock:clock",
    "skip": "coordinator.cli.skip:skip",
    "stop": "coordinator.cli.lifecycle:stop",
    "upgrade": "coordinator.cli.operate:upgrade",
    "verify": "coordinator.cli.replay:verify",
    "what-if": "coordinator.cli.what_if:what_if",
}
"""What needs modules that the everyday commands do not: they start faster without."""


class _Main(Commands):
    """Loads some commands only when they are asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *_LOADED_WHEN_ASKED_FOR])

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        place = _LOADED_WHEN_ASKED_FOR.get(name)
        if place is None:
            return super().get_command(ctx, name)
        module_name, _, attribute = place.partition(":")
        command = getattr(importlib.import_module(module_name), attribute)
        return command if isinstance(command, click.Command) else None


@click.group(cls=_Main, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--home",
    envvar=HOME_VARIABLE,
    default=HOME_DEFAULT,
    show_default=True,
    type=click.Path(file_okay=False),
    help=f"The registry folder; or set {HOME_VARIABLE}.",
)
@click.version_option(
    package_name="immortal", prog_name="immortal", message=f"%(prog)s, version %(version)s, {compiled.describe()}"
)
@click.pass_context
def main(ctx: click.Context, home: str) -> None:
    """Virtual resiliency: services that survive kill -9 with nothing lost and nothing doubled."""
    ctx.obj = Registry(home)


main.add_command(register)
main.add_command(unregister)
main.add_command(run)
main.add_command(coordinator)
main.add_command(status)
main.add_command(log)
