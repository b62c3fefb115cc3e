"""register, unregister, run."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

import click

from coordinator import control, upgrade_mark
from coordinator.cli.common import (
    app_auth_option,
    app_name,
    app_socket_option,
    echo,
    insecure_option,
    log_options,
    metrics_option,
    name_argument,
    pass_registry,
    promote_option,
    replay_check_option,
    trust_pickle_option,
)
from coordinator.config import (
    CHECKPOINT_AGE_S_MAX,
    KEEP_CHECKPOINTS_DEFAULT,
    KEEP_CHECKPOINTS_MAX,
    KEEP_LOG_DAYS_MAX,
    KILLS_BEFORE_VERDICT_DEFAULT,
    KILLS_BEFORE_VERDICT_MAX,
    LOG_KEY_FILE,
    LOG_TRIGGER_MB_DEFAULT,
    LOG_TRIGGER_MB_MAX,
    SIZE_MB_MAX,
    SPILL_LIMIT_MB_DEFAULT,
    AppSendMode,
    InstanceSettings,
    override,
)
from coordinator.core.limits import ReplayCheck
from coordinator.registry import Registry, RegistryError
from coordinator.upgrade_mark import UpgradeMark
from protocol.errors import ImmortalError
from protocol.limits import ARGUMENTS_SIZE_MIB_DEFAULT, ARGUMENTS_SIZE_MIB_MAX


class _OrWord(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions of click only
    """A whole number in a range, or one word, which stands for ``meaning``."""

    def __init__(self, word: str, least: int, most: int, meaning: int | None = None) -> None:
        self.name = f"integer or {word}"
        self._word = word
        self._meaning = meaning
        self._range = click.IntRange(least, most)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        if value is None or value == self._word:
            return self._meaning
        try:
            return int(self._range.convert(value, param, ctx))
        except click.BadParameter as error:
            self.fail(f"{error.message.rstrip('.')}, and is not {self._word!r} either", param, ctx)


def _log_key_path(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    return value if value is None or value == LOG_KEY_FILE else os.path.abspath(value)


@click.command()
@name_argument
@click.option(
    "--peer", required=True, metavar="ENDPOINT", help="Where peers reach it: tcp://127.0.0.1:* takes a free port."
)
@click.option(
    "--app-port",
    type=_OrWord("*", 1, 65535, 0),
    help="Where its app may connect over TCP; '*' takes a free port.  [default: by a Unix socket alone; with "
    "--app-send-port or --app-auth none '*']",
)
@click.option(
    "--app-send-port",
    type=_OrWord("*", 1, 65535, 0),
    help="For an app that uses two ports: where it is sent to. '*' takes a free one.  [default: --app-port for both]",
)
@click.option(
    "--app-send-mode",
    type=click.Choice([mode.value for mode in AppSendMode]),
    help="What the app does at --app-send-port: connect, or listen until its coordinator connects.  [default: connect]",
)
@app_socket_option
@app_auth_option("challenge, with --app-send-port none")
@click.option(
    "--log", type=click.Path(file_okay=False, path_type=Path), help="The log's folder.  [default: HOME/NAME/log]"
)
@click.option(
    "--log-key",
    is_flag=False,
    flag_value=LOG_KEY_FILE,
    metavar="[FILE]",
    callback=_log_key_path,
    help="Authenticate its log with a key, in HOME/NAME/keys/log_key or in FILE: nobody else can write it then.",
)
@click.option(
    "--keep-checkpoints",
    type=_OrWord("all", 1, KEEP_CHECKPOINTS_MAX),
    default=str(KEEP_CHECKPOINTS_DEFAULT),
    show_default=True,
    help="How many are kept, with the log after the oldest of them; all: for time travel.",
)
@click.option(
    "--keep-log-days",
    type=click.IntRange(1, KEEP_LOG_DAYS_MAX),
    help="Keep beside them what it takes to replay the last so many days; with --keep-checkpoints all: only that."
    "  [default: time does not count]",
)
@click.option(
    "--log-trigger-mb",
    type=click.IntRange(1, LOG_TRIGGER_MB_MAX),
    default=LOG_TRIGGER_MB_DEFAULT,
    show_default=True,
    help="A checkpoint is taken after so much log.",
)
@click.option(
    "--checkpoint-age-s",
    type=click.IntRange(1, CHECKPOINT_AGE_S_MAX),
    help="... or when the last one is so old and there is anything new.  [default: age does not count]",
)
@click.option(
    "--kills-before-verdict",
    type=_OrWord("never", 1, KILLS_BEFORE_VERDICT_MAX),
    default=str(KILLS_BEFORE_VERDICT_DEFAULT),
    show_default=True,
    help="A message that ends so many runs of the app in a row is not given to it again; never: it always is.",
)
@replay_check_option("strict, counts for an app that says no Hello")
@click.option(
    "--rpc-limit-mb",
    type=click.IntRange(1, ARGUMENTS_SIZE_MIB_MAX),
    help=f"The arguments of one call of its app may have so many MiB.  [default: {ARGUMENTS_SIZE_MIB_DEFAULT}]",
)
@click.option(
    "--spill-limit-mb",
    type=click.IntRange(0, SIZE_MB_MAX),
    help="Calls that wait for peers may take so much of the disk; beyond it the app is slowed."
    f"  [default: {SPILL_LIMIT_MB_DEFAULT}]",
)
@click.option(
    "--log-limit-mb",
    type=click.IntRange(1, SIZE_MB_MAX),
    help="A log of more than this takes no input from peers until the app catches up.  [default: no limit]",
)
@click.option(
    "--disk-free-mb",
    type=click.IntRange(0, SIZE_MB_MAX),
    help="Nor does one whose disk has less than this left.  [default: 0]",
)
@pass_registry
def register(
    registry: Registry,
    name: str,
    peer: str,
    app_port: int | None,
    app_send_port: int | None,
    app_send_mode: str | None,
    app_socket: str | None,
    app_auth: str | None,
    log: Path | None,
    log_key: str | None,
    keep_checkpoints: int | None,
    keep_log_days: int | None,
    log_trigger_mb: int,
    checkpoint_age_s: int | None,
    kills_before_verdict: int | None,
    replay_check: str | None,
    rpc_limit_mb: int | None,
    spill_limit_mb: int | None,
    log_limit_mb: int | None,
    disk_free_mb: int | None,
) -> None:
    """Write the settings of a new instance, and make its keys."""
    from coordinator import keys, own_logs

    if app_send_mode is not None and app_send_port is None:
        raise click.UsageError("--app-send-mode needs --app-send-port, the port that it is about")
    settings = registry.register(
        name,
        peer,
        app_port=app_port,
        app_send_port=app_send_port,
        app_send_mode=app_send_mode,
        app_socket=app_socket,
        app_auth=app_auth,
        log=log,
        log_key=log_key,
        keep_checkpoints=keep_checkpoints,
        keep_log_days=keep_log_days,
        log_trigger_mb=log_trigger_mb,
        checkpoint_age_s=checkpoint_age_s,
        kills_before_verdict=kills_before_verdict,
        replay_check=replay_check,
        rpc_limit_mb=rpc_limit_mb,
        spill_limit_mb=spill_limit_mb,
        log_limit_mb=log_limit_mb,
        disk_free_mb=disk_free_mb,
    )
    keys.make(settings.folder)
    own_logs.OwnLogs(settings.folder).begin()
    app = " and ".join(settings.app_addresses)
    start = f"immortal run {name} MODULE:CLASS"
    if settings.app_send_port is not None:
        does = "listens" if settings.app_send_mode is AppSendMode.LISTEN else "connects, too,"
        app += f" ({does} at {settings.app_send_address})"
        start = f"immortal coordinator {name}"
    echo(f"registered {name}: peers at {settings.peer}, app at {app}")
    echo(f"settings in {_relative(registry.path(name))}; start it with: {start}")


@click.command()
@name_argument
@click.option("--delete-log", is_flag=True, help="Delete its log as well: its whole state, for good.")
@pass_registry
def unregister(registry: Registry, name: str, delete_log: bool) -> None:
    """Remove an instance's settings; its log stays unless --delete-log is given."""
    log = registry.unregister(name, delete_log=delete_log)
    kept = f"; its log stays in {_relative(log)}" if log.exists() else ""
    echo(f"unregistered {name}{kept}")


@click.command()
@name_argument
@click.argument("app", metavar="[MODULE:CLASS]", required=False, callback=app_name)
@click.option("--restart", is_flag=True, help="When the coordinator dies, start both again; when the app dies, that.")
@click.option("--strict", is_flag=True, help="Refuse an app whose handlers do what no replay can repeat.")
@insecure_option
@promote_option
@replay_check_option("that of the settings")
@metrics_option
@trust_pickle_option
@log_options
@pass_registry
def run(
    registry: Registry,
    name: str,
    app: str | None,
    restart: bool,
    strict: bool,
    insecure: bool,
    promote: bool,
    replay_check: str | None,
    metrics: str | None,
    trust_pickle: bool,
    log_format: str,
    log_level: str,
) -> None:
    """Run an instance: its coordinator and its app, as two processes that live and die together.

    Without MODULE:CLASS it is the one of the last run. 'immortal stop NAME', SIGTERM or Ctrl-C stop both cleanly, with
    a checkpoint; 'immortal restart NAME' starts both again.
    """
    from coordinator.logs import configure
    from coordinator.peer_security import check_start
    from coordinator.supervisor import Command, Role, Supervisor, app_command, coordinator_command, supervised

    settings = registry.load(name)
    _refuse_two_ports(settings)
    control.refuse_running(settings.folder)
    mark = upgrade_mark.read(settings.folder)
    upgrading = mark is not None and mark.pending
    app = app or (mark.app if mark is not None and upgrading else None) or settings.app
    if app is None:
        raise RegistryError(f"{name!r} has not been run yet: say what its app is ('immortal run {name} MODULE:CLASS')")
    if mark is not None and upgrading:
        upgrade_mark.write(settings.folder, UpgradeMark(mark.to, app))  # registered once the upgrade is durable
    else:
        settings = registry.remember_app(name, app)
    own = supervised(override(settings, insecure=True) if insecure else settings)
    own = own if metrics is None else override(own, metrics=metrics)
    own = own if replay_check is None else override(own, replay_check=ReplayCheck(replay_check))
    registry.refuse_open_folder(name)
    check_start(own)  # a restart would find the same
    now = app

    def commands() -> dict[Role, Command]:
        """With the app as it is wanted by now: that of an upgrade, or the registered one, which was before it."""
        nonlocal now, upgrading
        with contextlib.suppress(ImmortalError):  # as it was: the coordinator reads the same, and says what is wrong
            mark = upgrade_mark.read(settings.folder)
            upgrading = mark is not None and mark.pending
            now = (mark.app if mark is not None and upgrading else None) or registry.load(name).app or now
        return {
            Role.COORDINATOR: coordinator_command(
                own, log_format=log_format, log_level=log_level, promote=promote, trust_pickle=trust_pickle
            ),
            Role.APP: app_command(own, now, strict=strict),
        }

    def gave_up_upgrade() -> bool:
        upgrade_mark.give_up(settings.folder, "the app gave it up; its own lines say why")
        return upgrading

    events = configure(name, level=log_level, log_format=log_format)
    announced = control.supervised(settings.folder)
    supervisor = Supervisor(commands, events, restart=restart, gave_up_upgrade=gave_up_upgrade, announced=announced)
    sys.exit(supervisor.run())


def _refuse_two_ports(settings: InstanceSettings) -> None:
    if settings.app_send_port is not None:
        raise RegistryError(
            f"{settings.name!r} is for an app that uses two ports (app_send_port), which the apps of 'immortal run' do"
            f" not: start 'immortal coordinator {settings.name}' and the app by itself, or register it without"
        )


def _relative(path: Path) -> str:
    """As a person would write it, where that is shorter."""
    relative = os.path.relpath(path)
    return relative if not relative.startswith("..") else str(path)
