"""What `immortal run` runs: a coordinator and its app, each as a command."""

from __future__ import annotations

import enum
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct, field

from immortal.coordinator.app import secret as app_secret
from immortal.coordinator.config import AppAuth, InstanceSettings, override
from immortal.protocol.limits import NESTING_MAX_DEFAULT
from immortal.protocol.timing_files import FOLDER_NAME

NESTING_VARIABLE = "IMMORTAL_NESTING_MAX"  # for handlers, which send nothing that is nested more deeply
APP_ADDRESS_VARIABLE = "IMMORTAL_APP_ADDRESS"
APP_LOG_FORMAT_VARIABLE = "IMMORTAL_LOG_FORMAT"
APP_LOG_LEVEL_VARIABLE = "IMMORTAL_LOG_LEVEL"
APP_TIMINGS_VARIABLE = "IMMORTAL_TIMINGS"
PYTHON = (sys.executable, "-P")  # no file in the current folder takes the place of a module of Python's or ours


class Role(enum.Enum):
    COORDINATOR = "coordinator"
    APP = "app"

    @property
    def other(self) -> Role:
        return Role.APP if self is Role.COORDINATOR else Role.COORDINATOR


class Command(Struct, frozen=True):
    """How to start one of the two: ``environment`` is set in addition to the supervisor's own."""

    argv: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)


def supervised(settings: InstanceSettings) -> InstanceSettings:
    """``settings`` as they are under `immortal run`: its app knows the secret.

    Raises ConfigError.
    """
    return override(settings, app_auth=AppAuth.CHALLENGE)


def coordinator_command(
    settings: InstanceSettings,
    *,
    log_format: str,
    log_level: str,
    promote: bool = False,
    trust_pickle: bool = False,
    place: Path | None = None,
) -> Command:
    """``place``: the folder of a follower; None: it is none."""
    home = str(settings.folder.parent)
    argv = [*PYTHON, "-m", "immortal.coordinator", "--home", home, "coordinator", settings.name]
    argv += ["--peer", settings.peer, "--app-auth", settings.app_auth.value]
    if settings.insecure:
        argv.append("--insecure")
    if settings.allow_data_loss:
        argv.append("--allow-data-loss")
    if settings.app_socket is not None:
        argv += ["--app-socket", settings.app_socket]
    if settings.replay_check is not None:
        argv += ["--replay-check", settings.replay_check.value]
    if settings.metrics is not None:
        argv += ["--metrics", settings.metrics]
    if trust_pickle:
        argv.append("--trust-pickle")
    if place is not None:
        argv += ["--follow", "--place", str(place)]
    options = ["--log-format", log_format, "--log-level", log_level, *(["--promote"] if promote else [])]
    return Command([*argv, *options])


def app_command(
    settings: InstanceSettings, app: str, *, strict: bool = False, log_format: str | None = None, log_level: str = ""
) -> Command:
    """``log_format``, ``log_level``: of the lines of its handlers; None, "": as the environment has it."""
    # The SDK wants a fixed hash seed, and would start itself over to get one.
    hash_seed = os.environ.get("PYTHONHASHSEED", "0")
    environment = {APP_ADDRESS_VARIABLE: settings.app_addresses[0], "PYTHONHASHSEED": hash_seed}
    if settings.nesting_max != NESTING_MAX_DEFAULT:
        environment[NESTING_VARIABLE] = str(settings.nesting_max)
    if log_format is not None:
        environment[APP_LOG_FORMAT_VARIABLE] = log_format
    if log_level:
        environment[APP_LOG_LEVEL_VARIABLE] = log_level
    if settings.timings_limit_mb:
        environment[APP_TIMINGS_VARIABLE] = f"{settings.timings_limit_mb << 19}:{settings.folder / FOLDER_NAME}"
    if settings.app_auth is not AppAuth.NONE:
        environment[app_secret.SECRET_FILE_VARIABLE] = str(app_secret.path(settings.folder))
    return Command([*PYTHON, "-m", "immortal.appsdk", app, *(["--strict"] if strict else [])], environment)
