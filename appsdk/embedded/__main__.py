"""Command ``python -m immortal.appsdk.embedded NAME MODULE:CLASS``, which `immortal run --embedded` executes."""

from __future__ import annotations

import sys

import click

from immortal.appsdk.embedded import run
from immortal.appsdk.errors import EXIT_NOT_RUNNABLE
from immortal.appsdk.running.runner import load_or_report
from immortal.coordinator.core.notices import Level
from immortal.coordinator.notices import LOG_LEVELS


@click.command()
@click.argument("name")
@click.argument("target", metavar="MODULE:CLASS")
@click.option("--home", help="The registry folder.")
@click.option("--log-level", type=click.Choice(LOG_LEVELS), default="info")
def main(name: str, target: str, home: str | None, log_level: Level) -> None:
    """Run MODULE:CLASS as the instance NAME, with its coordinator in this process."""
    cls = load_or_report(target)
    if cls is None:
        sys.exit(EXIT_NOT_RUNNABLE)
    run(cls, name, home=home, log_level=log_level)


if __name__ == "__main__":
    main()
