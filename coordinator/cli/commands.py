"""The group of all commands."""

from __future__ import annotations

import importlib

import click

from coordinator.cli.common import Commands
from coordinator.instances.registry import HOME_DEFAULT, HOME_VARIABLE, Registry
from protocol import compiled

_PLACES = {
    "audit": "coordinator.cli.audit:audit",
    "bench": "bench.cli:bench",
    "call": "coordinator.cli.call:call",
    "checkpoint": "coordinator.cli.operate:checkpoint",
    "clock": "coordinator.cli.clock:clock",
    "coordinator": "coordinator.cli.coordinator:coordinator",
    "dead-letters": "coordinator.cli.dead_letters:dead_letters",
    "doctor": "coordinator.cli.doctor:doctor",
    "keys": "coordinator.cli.keys:keys",
    "log": "coordinator.cli.log:log",
    "peers": "coordinator.cli.peers:peers",
    "pipeline": "pipeline.cli:pipeline",
    "recover": "coordinator.cli.recover:recover",
    "register": "coordinator.cli.register:register",
    "replay": "coordinator.cli.replay:replay",
    "restart": "coordinator.cli.lifecycle:restart",
    "run": "coordinator.cli.instances:run",
    "settings": "coordinator.cli.settings:settings",
    "skip": "coordinator.cli.skip:skip",
    "status": "coordinator.cli.status:status",
    "stop": "coordinator.cli.lifecycle:stop",
    "unregister": "coordinator.cli.register:unregister",
    "upgrade": "coordinator.cli.operate:upgrade",
    "verify": "coordinator.cli.replay:verify",
    "what-if": "coordinator.cli.what_if:what_if",
}
"""Each is loaded when it is asked for: what runs one, a coordinator above all, need not hold the others."""


class _Main(Commands):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_PLACES)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in _PLACES:
            return None
        module_name, _, attribute = _PLACES[name].partition(":")
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
