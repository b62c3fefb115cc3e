"""Command coordinator: one process, with no more of the command line than this module."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from immortal.cli.options import (
    follow_option,
    given_options,
    log_output_options,
    name_argument,
    pass_registry,
    promote_option,
    start_option,
    trust_pickle_option,
)
from immortal.coordinator.config import override
from immortal.coordinator.core.notices import Level
from immortal.coordinator.instances.registry import Registry

_PORT = click.IntRange(1, 65535)


@click.command()
@name_argument
@start_option("peer")
@start_option("app_socket")
@start_option("app_auth")
@start_option("insecure")
@start_option("allow_data_loss")
@promote_option
@follow_option
@click.option("--place", hidden=True, type=click.Path(path_type=Path), help="Of a follower; from 'immortal run'.")
@click.option(
    "--app-port", type=_PORT, help="With --follow: TCP port for the follower's app, instead of a Unix socket."
)
@click.option("--app-send-port", type=_PORT, help="With --follow: second port, for an app with two connections.")
@start_option("replay_check")
@start_option("metrics")
@trust_pickle_option
@log_output_options
@pass_registry
def coordinator(
    registry: Registry,
    /,
    name: str,
    promote: bool,
    follow: bool,
    place: Path | None,
    app_port: int | None,
    app_send_port: int | None,
    trust_pickle: bool,
    log_format: str,
    log_level: Level,
    **options: Any,
) -> None:
    """Run a coordinator alone, for an app that is started separately.

    The app needs IMMORTAL_APP_ADDRESS (the coordinator's address) and IMMORTAL_APP_SECRET_FILE (HOME/NAME/app_secret).
    With --follow, socket and secret are in HOME/NAME/followers/1 or the next free number; the first line of output
    gives the folder. After a takeover, apps can also connect at the instance's own address.

    Exit status: 0 after a clean stop, 3 if the log can't be replayed as it is, 4 if another process now writes the log,
    1 after any other error.
    """
    from immortal.coordinator.instances.registry import claim_place, follower_settings
    from immortal.coordinator.notices import configure
    from immortal.coordinator.service.runtime import run_coordinator

    settings = override(registry.load(name), **given_options(options))
    log = configure(name, level=log_level, log_format=log_format)
    at = None
    if app_send_port is not None and app_port is None:
        raise click.UsageError("--app-send-port needs --app-port, the port that the app sends to")
    if app_port is not None and not follow:
        raise click.UsageError(
            f"--app-port needs --follow: the port for the app of {name!r} itself is in its settings (app_port)"
        )
    if follow:
        folder = place or claim_place(settings).folder
        at = follower_settings(settings, folder, app_port=app_port, app_send_port=app_send_port)
    sys.exit(run_coordinator(settings, registry, log, promote=promote, trust_pickle=trust_pickle, follower_settings=at))
