"""Arguments, options and parameter types that commands share."""

from __future__ import annotations

import contextlib
import enum
import functools
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import click

from immortal.coordinator.config import ConfigError, InstanceSettings, check_instance_name
from immortal.coordinator.config.schema import Setting, settings_of
from immortal.coordinator.config.socket_addresses import UNIX
from immortal.coordinator.config.values import WrongValueError, check_app
from immortal.coordinator.instances.registry import Registry, RegistryError
from immortal.coordinator.log.identity import MomentError, Time, parse_moment
from immortal.coordinator.log_url import is_in_folder
from immortal.coordinator.notices import LOG_FORMATS, LOG_LEVELS
from immortal.coordinator.operator import control
from immortal.protocol.command_line import Commands, FailedError
from immortal.protocol.distribution import add_extra
from immortal.protocol.errors import ImmortalError

Function = TypeVar("Function", bound=Callable[..., Any])


def instance_name(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Validate an instance's name, as a click callback; an impossible name is a usage error."""
    if value is None:
        return None
    try:
        return check_instance_name(value)
    except ConfigError as error:
        hint = "; URLs of logs are for 'immortal log diff' and 'immortal pipeline'" if "://" in value else ""
        raise click.BadParameter(f"{error}{hint}") from None


def instance_names(ctx: click.Context, parameter: click.Parameter, value: tuple[str, ...]) -> tuple[str | None, ...]:
    """Validate several names, as a click callback, and keep each once."""
    return tuple(instance_name(ctx, parameter, one) for one in dict.fromkeys(value))


def app_name(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Validate an app's name (MODULE:CLASS), as a click callback."""
    try:
        return None if value is None else check_app(value)
    except ConfigError as error:
        raise click.BadParameter(str(error)) from None


def app_or_hand(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Validate an app's name as :func:`app_name`, or accept "-": an app that is started by hand."""
    return value if value == "-" else app_name(ctx, parameter, value)


class _Ports(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions of click only
    """Parameter type of an app's port, and its send port after a colon: (port, send port or None)."""

    name = "port[:send port]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int | None]:
        found = [int(part) for part in value.split(":") if part.isascii() and part.isdecimal() and len(part) < 6]
        if len(found) != value.count(":") + 1 or len(found) > 2 or not all(0 < port < 65536 for port in found):
            self.fail(f"{value!r}: one or two ports were expected, such as 2000 or 2000:2001", param, ctx)
        return found[0], found[1] if len(found) > 1 else None


def app_port_option(name: str = "app") -> Callable[[Function], Function]:
    """Return the option for the ports of an app that is started by hand; None: free ports."""
    return click.option(
        f"--{name}-port",
        type=_Ports(),
        metavar="PORT[:SEND_PORT]",
        help=f"Port at which the app of '--{name} -' connects.",
    )


def message_id(ctx: click.Context, parameter: click.Parameter, value: Any) -> Any:
    """Parse SEQ:INDEX, or several, to (record, message), as a click callback."""
    if value is None:
        return None
    return tuple(_message_id(text) for text in value) if isinstance(value, tuple) else _message_id(value)


def _message_id(text: str) -> tuple[int, int]:
    sequence_id, colon, index = text.partition(":")
    if not (colon and all(part.isascii() and part.isdecimal() and len(part) < 19 for part in (sequence_id, index))):
        raise click.BadParameter(
            f"{text!r}: the number of a record and of a message in it were expected, such as 312:0"
        )
    return int(sequence_id), int(index)


def complete_instance(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the registered instances that begin with ``incomplete``, for a shell; [] if the registry is unreadable."""
    with contextlib.suppress(ImmortalError):
        names = Registry(ctx.find_root().params["home"]).names()
        return [name for name in names if name.startswith(incomplete)]
    return []


name_argument = click.argument("name", callback=instance_name, shell_complete=complete_instance)


def timeout_option(default: float, help_text: str = "Seconds to wait.") -> Callable[[Function], Function]:
    return click.option(
        "--timeout-s",
        type=click.FloatRange(min=0, min_open=True),
        default=default,
        show_default=True,
        help=help_text,
    )


def ask_coordinator(
    settings: InstanceSettings,
    verb: str,
    request: Mapping[str, Any],
    *,
    timeout_s: float = control.QUERY_TIMEOUT_S,
    not_running: str = "",
) -> dict[str, Any]:
    """Return the answer of a running coordinator. ``not_running``: the error's text if it runs on no machine.

    Raises FailedError with the coordinator's refusal, ControlError.
    """
    try:
        answer = control.query(settings.folder, verb, timeout_s, argument=dict(request))
    except control.NotRunningError as error:
        if error.is_elsewhere or not not_running:
            raise
        raise FailedError(not_running) from None
    except control.RefusedError as error:
        raise FailedError(error.reason) from None
    if "error" in answer:
        raise FailedError(str(answer["error"]))
    return answer


class InstanceCommandGroup(Commands):
    """Group of commands that takes an instance's name; without a subcommand it shows part of the instance."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Accept ``NAME --json`` too: click's groups take options only before their arguments."""
        if len(args) == 2 and args[1].startswith("-"):
            args = [args[1], args[0]]
        return super().parse_args(ctx, args)


def pass_settings_of(load: Callable[[Registry, str], InstanceSettings]) -> Callable[[Callable[..., None]], Any]:
    """Make a decorator for commands of such a group: they get their instance's settings from ``load``."""

    def pass_settings(function: Callable[..., None]) -> Callable[..., None]:
        @click.pass_context
        @functools.wraps(function)
        def with_settings(ctx: click.Context, *arguments: Any, **options: Any) -> None:
            assert ctx.parent is not None
            function(load(ctx.ensure_object(Registry), ctx.parent.params["name"]), *arguments, **options)

        return with_settings

    return pass_settings


def log_output_options(function: Function) -> Function:
    function = click.option(
        "--log-level", type=click.Choice(LOG_LEVELS), default="info", show_default=True, help="Lowest level to log."
    )(function)
    return click.option(
        "--log-format",
        type=click.Choice(LOG_FORMATS),
        default="human",
        show_default=True,
        help="Format of the log output.",
    )(function)


promote_option = click.option(
    "--promote",
    is_flag=True,
    help="After a recovery, start to work without waiting for a checkpoint; for large states.",
)
follow_option = click.option(
    "--follow",
    is_flag=True,
    help="While another process runs the instance, follow its log, and take over when that process is gone.",
)
trust_pickle_option = click.option(
    "--trust-pickle",
    is_flag=True,
    help="Also unpickle states from a log that was not created in this home. This can run code from that log.",
)


def at_least_option(default: int) -> Callable[[Function], Function]:
    """Return the option for how many messages must be compared for the verdict "the same"."""
    return click.option(
        "--at-least",
        type=click.IntRange(min=0),
        default=default,
        show_default=True,
        metavar="MESSAGES",
        help="Exit with 1 if fewer messages were compared and no difference was found.",
    )


handler_limit_option = click.option(
    "--handler-limit",
    "handler_limit_s",
    type=click.FloatRange(min=0.1),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="Time limit for a handler, after which it counts as one that hangs. The import of a module has a minute.",
)


def debugpy_option(help_text: str) -> Callable[[Function], Function]:
    def checked(ctx: click.Context, parameter: click.Parameter, port: int | None) -> int | None:
        if port is not None and find_spec("debugpy") is None:
            raise FailedError(f"--debugpy needs debugpy, which is not installed: {add_extra('debug')}")
        return port

    return click.option(
        "--debugpy", type=click.IntRange(1, (1 << 16) - 1), metavar="PORT", callback=checked, help=help_text
    )


def settings_with_log(registry: Registry, name: str) -> InstanceSettings:
    """Return the settings of an instance that has a log. Raises RegistryError if it has none, ConfigError."""
    from immortal.coordinator.log.open import log_exists

    settings = registry.load(name)
    if not log_exists(settings.log):
        raise RegistryError(f"{settings.name!r} has not been started yet: there is no log in {settings.log}")
    return settings


pass_registry = click.make_pass_decorator(Registry)


# Options for settings: type, range, default and help are those of :mod:`immortal.coordinator.config.schema`.


_SETTING = re.compile(r"(?<![/\w])[a-z]+(_[a-z]+)+")  # in a text; options have names of their own


class _Number(click.IntRange):
    """Parameter type of a whole number in the setting's range, or a word of its own."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting.least, setting.most)
        self._words = [setting.about[word] for word in ("none", "free") if word in setting.about]
        self.name = " or ".join([setting.about["unit"] or "integer", *self._words])

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value in self._words:
            return value
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as error:
            also = "".join(f", and is not {word!r} either" for word in self._words)
            self.fail(f"{error.message.rstrip('.')}{also}", param, ctx)


class _Text(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions of click only
    """Parameter type of a text setting. A path can be relative to the working directory."""

    def __init__(self, setting: Setting) -> None:
        self.name = setting.about["metavar"]
        self._setting = setting

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        about, meant = self._setting.about, value
        if "free" in about:
            return value  # the registry completes and checks it
        is_place = about.get("path") == "log" and not is_in_folder(value)
        if "path" in about and not is_place and value not in ("", UNIX, *about.get("words", ())):
            prefix = UNIX if value.startswith(UNIX) else ""
            meant = prefix + os.path.abspath(value.removeprefix(prefix))
        try:
            self._setting.value_of(meant)
        except WrongValueError as error:
            self.fail(f"got {value!r}, expected {error}", param, ctx)
        if about.get("path") in ("folder", "log") and os.path.isfile(meant):
            self.fail(f"{meant} is a file, expected a folder", param, ctx)
        return meant


def _option(setting: Setting, default: str | None = None) -> Callable[[Function], Function]:
    details: dict[str, Any] = {"required": setting.is_required and default is None}
    if setting.type is bool:
        details |= {"is_flag": True, "default": None}
    elif setting.type is int:
        details["type"] = _Number(setting)
    elif isinstance(setting.type, type) and issubclass(setting.type, enum.Enum):
        details["type"] = click.Choice([choice.value for choice in setting.type])
    else:
        details |= {"type": _Text(setting), "metavar": setting.about["metavar"]}
        if "bare" in setting.about:
            details |= {"is_flag": False, "flag_value": setting.about["bare"]}
    shown = "" if details["required"] or setting.type is bool else f"  [default: {default or setting.default_text}]"
    return click.option(_flag(setting.name), help=_SETTING.sub(_as_option, f"{setting.text}{shown}"), **details)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _as_option(match: re.Match[str]) -> str:
    return _flag(match[0]) if match[0] in settings_of(InstanceSettings) else match[0]


def start_option(name: str) -> Callable[[Function], Function]:
    """Return the option that changes setting ``name`` for one start; None if it is not given."""
    return _option(settings_of(InstanceSettings)[name], "from the settings")


def register_options(function: Function) -> Function:
    """Add an option for each setting that has a single value, as in a file; None if it is not given."""
    for setting in reversed(list(settings_of(InstanceSettings).values())):
        if setting.is_single:
            function = _option(setting)(function)
    return function


def given_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that were given."""
    return {name: value for name, value in options.items() if value is not None}


# A moment of a log as people type it: a record's number, or a time.


class Moment(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions of click only
    """Parameter type of a moment: a sequence ID as an int, or a :class:`Time`. A time without a zone is UTC."""

    name = "record|time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | Time:
        if isinstance(value, int | Time):
            return value
        try:
            return parse_moment(str(value))
        except MomentError as error:
            self.fail(str(error), param, ctx)


# A progress bar for long work: on stderr, and only on a terminal.


DELAY_S = 1.0  # shorter work shows no bar

Advance = Callable[[int, int | None], None]
"""Function of (done, total); total None: unknown."""


PAGE_MARK = b'<meta name="generator" content="immortal">'  # of pipeline/report/page.html


def check_folder(option: str, file: Path) -> None:
    """Raise FailedError before any work if the folder of a file to be written is missing."""
    if not file.parent.is_dir():
        raise FailedError(f"{option} {file}: the folder {file.parent} does not exist: create it, or give another path")


def check_page(option: str, file: Path) -> None:
    """Raise FailedError before any work if a page can't be written, or would replace a file that is no page of ours."""
    check_folder(option, file)
    if file.is_file() and PAGE_MARK not in file.read_bytes():
        raise FailedError(f"{file} exists and was not written by immortal: give another name, or remove it first")


@contextmanager
def progress_bar(description: str) -> Iterator[Advance]:
    """Yield a function that shows progress; call it from one thread at a time. The bar disappears at the end."""
    if sys.stderr is None or not sys.stderr.isatty():  # None: it was closed, as by 2>&-
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    progress = Progress(*columns, console=Console(stderr=True), transient=True)
    task = progress.add_task(description, total=None)
    due_s = time.monotonic() + DELAY_S

    def advance(done: int, total: int | None) -> None:
        if not progress.live.is_started and time.monotonic() >= due_s:
            progress.start()
        progress.update(task, completed=done, total=total)

    try:
        yield advance
    finally:
        progress.stop()
