"""coordinator: one process, which holds no more of the command line than this."""

from __future__ import annotations

import sys
from typing import Any

import click

from coordinator.cli.common import log_options, name_argument, pass_registry, promote_option, trust_pickle_option
from coordinator.cli.setting_options import said, start_option
from coordinator.config import override
from coordinator.core.notices import Level
from coordinator.instances.registry import Registry


@click.command()
@name_argument
@start_option("app_socket")
@start_option("app_auth")
@start_option("insecure")
@promote_option
@start_option("replay_check")
@start_option("metrics")
@trust_pickle_option
@log_options
@pass_registry
def coordinator(
    registry: Registry,
    /,
    name: str,
    promote: bool,
    trust_pickle: bool,
    log_format: str,
    log_level: Level,
    **options: Any,
) -> None:
    """Run a coordinator alone, for an app that is started by other means.

    The app finds it by IMMORTAL_APP_ADDRESS, and its secret by IMMORTAL_APP_SECRET_FILE: HOME/NAME/app_secret.
    """
    from coordinator.notices import configure
    from coordinator.service.runtime import run_coordinator

    settings = override(registry.load(name), **said(options))
    log = configure(name, level=log_level, log_format=log_format)
    sys.exit(run_coordinator(settings, registry, log, promote=promote, trust_pickle=trust_pickle))
