"""The group of all commands."""

from __future__ import annotations

import importlib.util

import click

from coordinator.cli.common import Commands
from coordinator.cli.instances import coordinator, register, run, unregister
from coordinator.cli.log import log
from coordinator.cli.status import status
from coordinator.registry import HOME_DEFAULT, HOME_VARIABLE, Registry


class _Main(Commands):
    """Adds `bench`, which is loaded only when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        bench = ["bench"] if importlib.util.find_spec("coordinator.cli.bench") else []
        return sorted([*super().list_commands(ctx), *bench])

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name == "bench" and importlib.util.find_spec("coordinator.cli.bench"):
            command = getattr(importlib.import_module("coordinator.cli.bench"), "bench", None)
            return command if isinstance(command, click.Command) else None
        return super().get_command(ctx, name)


@click.group(cls=_Main, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--home",
    envvar=HOME_VARIABLE,
    default=HOME_DEFAULT,
    show_default=True,
    type=click.Path(file_okay=False),
    help=f"The registry folder; or set {HOME_VARIABLE}.",
)
@click.version_option(package_name="immortal", prog_name="immortal")
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
