"""What the commands share: arguments, options, and whose log it is."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any, TypeVar

import click

from immortal.coordinator.config import ConfigError, InstanceSettings, check_instance_name
from immortal.coordinator.config.values import check_app
from immortal.coordinator.instances.registry import Registry, RegistryError
from immortal.coordinator.notices import LOG_FORMATS, LOG_LEVELS
from immortal.protocol.command_line import Commands
from immortal.protocol.errors import ImmortalError

Function = TypeVar("Function", bound=Callable[..., Any])


def instance_name(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """A click callback: an impossible name is wrong usage."""
    if value is None:
        return None
    try:
        return check_instance_name(value)
    except ConfigError as error:
        hint = "; URLs of logs are for 'immortal log diff' and 'immortal pipeline'" if "://" in value else ""
        raise click.BadParameter(f"{error}{hint}") from None


def app_name(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """A click callback, as the one above."""
    try:
        return None if value is None else check_app(value)
    except ConfigError as error:
        raise click.BadParameter(str(error)) from None


def app_or_hand(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """As :func:`app_name`; or "-": an app that is started by hand."""
    return value if value == "-" else app_name(ctx, parameter, value)


def message_id(ctx: click.Context, parameter: click.Parameter, value: Any) -> Any:
    """A click callback: SEQ:INDEX, or some of them, as (record, message)."""
    if value is None:
        return None
    return tuple(_message_id(text) for text in value) if isinstance(value, tuple) else _message_id(value)


def _message_id(text: str) -> tuple[int, int]:
    sequence_id, colon, index = text.partition(":")
    if not (colon and all(part.isascii() and part.isdecimal() and len(part) < 19 for part in (sequence_id, index))):
        raise click.BadParameter(f"{text!r}: a record's number and a message's in it were expected, such as 312:0")
    return int(sequence_id), int(index)


def complete_instance(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """For a shell: the registered instances that begin so. None where the registry can't be read."""
    with contextlib.suppress(ImmortalError):
        names = Registry(ctx.find_root().params["home"]).names()
        return [name for name in names if name.startswith(incomplete)]
    return []


def name_argument(function: Function) -> Function:
    return click.argument("name", callback=instance_name, shell_complete=complete_instance)(function)


class CommandsOfName(Commands):
    """A group that takes an instance's name, and by itself shows something of it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Also ``NAME --json``: of itself a group takes options only in front of its arguments."""
        if len(args) == 2 and args[1].startswith("-"):
            args = [args[1], args[0]]
        return super().parse_args(ctx, args)


def log_options(function: Function) -> Function:
    function = click.option(
        "--log-level", type=click.Choice(LOG_LEVELS), default="info", show_default=True, help="What is logged at least."
    )(function)
    return click.option(
        "--log-format", type=click.Choice(LOG_FORMATS), default="human", show_default=True, help="The form of the log."
    )(function)


def promote_option(function: Function) -> Function:
    return click.option(
        "--promote",
        is_flag=True,
        help="After a recovery, begin to work before a checkpoint is taken: for large states.",
    )(function)


def follow_option(function: Function) -> Function:
    return click.option(
        "--follow",
        is_flag=True,
        help="While another process runs the instance, follow its log, ready to take over when that is gone.",
    )(function)


def trust_pickle_option(function: Function) -> Function:
    return click.option(
        "--trust-pickle",
        is_flag=True,
        help="Read states that pickle wrote also of a log that this home did not make: that runs what is in them.",
    )(function)


def settings_with_log(registry: Registry, name: str) -> InstanceSettings:
    """Raises RegistryError where the instance has not been started yet, ConfigError."""
    from immortal.coordinator.log import log_exists

    settings = registry.load(name)
    if not log_exists(settings.log):
        raise RegistryError(f"{settings.name!r} has not been started yet: there is no log in {settings.log}")
    return settings


def operator_name() -> str:
    """Who runs this command, for the log."""
    import pwd

    try:
        login = os.getlogin()
    except OSError:  # no terminal
        try:
            login = pwd.getpwuid(os.getuid()).pw_name
        except KeyError:
            login = "somebody"
    return f"{login} (uid {os.getuid()}, process {os.getpid()})"


pass_registry = click.make_pass_decorator(Registry)
