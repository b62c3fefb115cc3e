"""coordinator: one process, which holds no more of the command line than this."""

from __future__ import annotations

import sys

import click

from coordinator.cli.common import (
    app_auth_option,
    app_socket_option,
    insecure_option,
    log_options,
    metrics_option,
    name_argument,
    pass_registry,
    promote_option,
    replay_check_option,
    trust_pickle_option,
)
from coordinator.config import AppAuth, override
from coordinator.core.limits import ReplayCheck
from coordinator.registry import Registry


@click.command()
@name_argument
@app_socket_option
@app_auth_option("that of the settings")
@insecure_option
@promote_option
@replay_check_option("that of the settings")
@metrics_option
@trust_pickle_option
@log_options
@pass_registry
def coordinator(
    registry: Registry,
    name: str,
    app_socket: str | None,
    app_auth: str | None,
    insecure: bool,
    promote: bool,
    replay_check: str | None,
    metrics: str | None,
    trust_pickle: bool,
    log_format: str,
    log_level: str,
) -> None:
    """Run a coordinator alone, for an app that is started by other means.

    The app finds it by IMMORTAL_APP_ADDRESS, and its secret by IMMORTAL_APP_SECRET_FILE: HOME/NAME/app_secret.
    """
    from coordinator.logs import configure
    from coordinator.runtime import run_coordinator

    settings = registry.load(name)
    if app_socket is not None:
        settings = override(settings, app_socket=app_socket)
    if app_auth is not None:
        settings = override(settings, app_auth=AppAuth(app_auth))
    if insecure:
        settings = override(settings, insecure=True)
    if metrics is not None:
        settings = override(settings, metrics=metrics)
    if replay_check is not None:
        settings = override(settings, replay_check=ReplayCheck(replay_check))
    configure(name, level=log_level, log_format=log_format)
    sys.exit(run_coordinator(settings, registry, promote=promote, trust_pickle=trust_pickle))
