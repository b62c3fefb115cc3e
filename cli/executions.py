"""executions: what has run and what waits, by key, handler, state or caller; to look at, cancel, signal, restart."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec

from immortal.appsdk.state.journal import decode_journal
from immortal.cli.handlers import _ask, _order, _pass_settings, _settings_of
from immortal.cli.options import InstanceCommandGroup, Moment, name_argument, settings_with_log
from immortal.coordinator.config import InstanceSettings
from immortal.coordinator.instances import own_logs
from immortal.coordinator.instances.registry import Registry
from immortal.coordinator.log.moment import Time
from immortal.presenters.executions import execution_lines, execution_row, execution_view
from immortal.presenters.status import operator_name
from immortal.protocol import decoding
from immortal.protocol.command_line import FailedError, counted, echo, echo_json, json_option, print_table
from immortal.protocol.executions import (
    STATES,
    Execution,
    ExecutionsError,
    Query,
    key_of_id,
    label_of,
    merge,
    open_index,
)
from immortal.protocol.safe_output import printable
from immortal.protocol.system_methods import REASON_CHARACTERS_MAX

AT_ONCE_MAX = 1000  # executions that one command cancels or signals
PREVIEW_ROWS = 20
COLUMNS = ("ID", "state", "execution", "called by", "began", "took", "labels")
Function = TypeVar("Function", bound=Callable[..., Any])


class _Group(InstanceCommandGroup):
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Accept ``NAME --where ... --json`` and ``NAME ID`` too."""
        if len(args) > 1 and not args[0].startswith("-") and args[1].startswith("-"):
            args = [*args[1:], args[0]]
        elif len(args) > 1 and args[1][:1].isdecimal():
            args = [args[0], "show", *args[1:]]
        return click.Group.parse_args(self, ctx, args)


def _query_options(function: Function) -> Function:
    """Options that say which executions; the command gets a Query."""

    @functools.wraps(function)
    def with_query(
        *arguments: Any,
        where: tuple[str, ...],
        handler: str,
        caller: str | None,
        since: int | Time | None,
        until: int | Time | None,
        text: str,
        **options: Any,
    ) -> Any:
        if isinstance(since, int) or isinstance(until, int):
            raise click.UsageError("--since and --until take times, such as 2026-11-28T16:30")
        try:
            labels = [label_of(one) for one in where]
        except ExecutionsError as error:
            raise click.UsageError(f"--where {error}") from None
        query = Query(
            where=labels,
            handler=handler,
            caller=caller,
            since_ns=None if since is None else since.ns,
            until_ns=None if until is None else until.ns,
            text=text,
        )
        return function(*arguments, query=query, **options)

    for option in (
        click.option("--text", default="", metavar="TEXT", help="With TEXT in the arguments."),
        click.option("--until", type=Moment(), metavar="TIME", help="Begun at TIME or before."),
        click.option("--since", type=Moment(), metavar="TIME", help="Begun at TIME or later."),
        click.option("--caller", help="Called by: an instance, '~' and a client's ID, '' for itself."),
        click.option("--handler", default="", help="Of this handler, such as ship or Shop.ship."),
        click.option("--where", multiple=True, metavar="LABEL=VALUE", help="With this label; may be repeated."),
    ):
        with_query = option(with_query)
    return with_query  # type: ignore[return-value]


def _asking_options(function: Function) -> Function:
    function = click.option("--yes", is_flag=True, help="Do it without asking.")(function)
    return click.option("--dry-run", is_flag=True, help="Show what would be done, and do nothing.")(function)


@click.group(cls=_Group, invoke_without_command=True, subcommand_metavar="[ID | COMMAND [ARGS]...]")
@name_argument
@_query_options
@click.option("--state", default="", type=click.Choice(["", *STATES]), help="In this state.", metavar="|".join(STATES))
@click.option("--limit", type=click.IntRange(1, 1_000_000), default=100, show_default=True, help="Show so many.")
@json_option
@click.pass_context
def executions(ctx: click.Context, name: str, query: Query, state: str, limit: int, as_json: bool) -> None:
    """List what handlers of NAME have run and what waits, the newest first; with an ID, show one with its steps.

    Listed are runs of 'async def' handlers, and calls of a 'def' with labels. NAME need not run.
    """
    if ctx.invoked_subcommand is not None:
        return
    settings = _settings_of(ctx)
    query.state, query.limit = state, limit + 1
    with open_index(settings.folder, settings.name) as index:
        found = index.find(query)
    if as_json:
        echo_json([one.plain() for one in found[:limit]])
        return
    _print(found[:limit])
    if len(found) > limit:
        echo(f"... and more: --limit shows more than {limit}, --until older ones")


def _print(found: list[Execution]) -> None:
    if not found:
        echo("no execution is like that")
    else:
        print_table(COLUMNS, [execution_row(one) for one in found], right=("ID", "took"))


_id_argument = click.argument("wanted", metavar="ID")


@executions.command()
@_id_argument
@json_option
@_pass_settings
@click.pass_obj
def show(registry: Registry, settings: InstanceSettings, wanted: str, as_json: bool) -> None:
    """Show one: its steps, effects with their attempts, calls across services, what it waits for."""
    view = execution_view(registry, settings, key_of_id(wanted))
    if as_json:
        echo_json(_plain(view))
        return
    for line in execution_lines(settings.name, view):
        echo(printable(line))


def _plain(value: Any) -> Any:
    if isinstance(value, Execution):
        return value.plain()
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list) else value


# --- many at once ----------------------------------------------------------------------------------------------------


@executions.command()
@_query_options
@click.option("--reason", default="", metavar="TEXT", help="Why: the handlers and their callers are told.")
@_asking_options
@_pass_settings
def cancel(settings: InstanceSettings, query: Query, reason: str, dry_run: bool, yes: bool) -> None:
    """Cancel all that wait and are like that, after showing them: as 'immortal handlers NAME cancel' each.

    Each order is in the log and in the audit. The exit status is 1 if not all were carried out.
    """
    if len(reason) > REASON_CHARACTERS_MAX:
        raise click.UsageError(f"--reason has {len(reason)} characters: {REASON_CHARACTERS_MAX} at most were expected")
    _order_all(settings, query, "cancel", {"reason": reason}, dry_run=dry_run, yes=yes)


@executions.command()
@click.argument("event")
@click.argument("value", default="null")
@_query_options
@_asking_options
@_pass_settings
def signal(settings: InstanceSettings, event: str, value: str, query: Query, dry_run: bool, yes: bool) -> None:
    """Give all that wait and are like that the EVENT, with VALUE, which is JSON: as 'immortal handlers NAME signal'."""
    _order_all(settings, query, "signal", {"event": event, "value": _json(value)}, dry_run=dry_run, yes=yes)


def _json(text: str) -> Any:
    try:
        return decoding.parse_json_argument(text)
    except ValueError as error:
        raise click.UsageError(f"{text[:100]!r} is not JSON: {error}; a text needs its own quotes: '\"yes\"'") from None


def _order_all(
    settings: InstanceSettings, query: Query, verb: str, request: Mapping[str, Any], *, dry_run: bool, yes: bool
) -> None:
    if query == Query():
        raise click.UsageError(f"say which to {verb}: --where LABEL=VALUE, --handler, --caller, --since, --text")
    query.state, query.limit = "waiting", AT_ONCE_MAX + 1
    with open_index(settings.folder, settings.name) as index:
        found = [one for one in index.find(query) if one.key > 0]
    if len(found) > AT_ONCE_MAX:
        raise FailedError(f"more than {AT_ONCE_MAX:,} wait and are like that: narrow it down, such as by --since")
    _print(found[:PREVIEW_ROWS])
    if len(found) > PREVIEW_ROWS:
        echo(f"... and {len(found) - PREVIEW_ROWS:,} more")
    if not found or not _goes_on(f"{verb} {counted(len(found), 'execution')}", dry_run=dry_run, yes=yes):
        return
    refused = 0
    for one in found:
        answer = _ask(settings, verb, {"task": one.key, **request, "who": operator_name()})
        refused += not answer["done"]
        echo(printable(f"{one.id}: {answer['text']}"))
    if refused:
        raise FailedError(f"{refused} of {counted(len(found), 'order')} not carried out")


def _goes_on(what: str, *, dry_run: bool, yes: bool) -> bool:
    if dry_run:
        echo(f"would {what}")
        return False
    return yes or click.confirm(f"{what.capitalize()}?", abort=True)


@executions.command()
@_id_argument
@click.option("--arguments", metavar="JSON", help="Others than it had: all of them, such as '[17, \"tea\"]'.")
@click.option(
    "--from-step", type=click.IntRange(1), default=1, show_default=True, help="Keep the results of the steps before."
)
@_asking_options
@_pass_settings
def restart(
    settings: InstanceSettings, wanted: str, arguments: str | None, from_step: int, dry_run: bool, yes: bool
) -> None:
    """Begin an 'async def' execution again: a new one, for which nobody waits, that names its origin.

    What the first one has done is done: the new one does it again, from the given step on. The steps before have the
    results that they had, and are not carried out, unless the handler now does something else there.
    """
    key = key_of_id(wanted)
    with open_index(settings.folder, settings.name) as index:
        found, data, journal = index.get(key), index.data(key), index.journal(key)
    if found is None:
        raise FailedError(f"{settings.name!r} has no execution {wanted}: 'immortal executions {settings.name}'")
    if arguments is not None:
        given = _json(arguments)
        if not isinstance(given, list):
            raise click.UsageError(f"--arguments {arguments[:60]!r}: a list of all arguments was expected")
        data = msgspec.msgpack.encode(given)
    if from_step > 1 and (journal is None or found.state == "waiting"):
        raise FailedError(f"the steps of {wanted} are not kept: it waits, or had none, or has too large ones")
    if data is None:
        raise FailedError(f"the arguments of {wanted} are too large to be kept: give them by --arguments")
    step = f" from step {from_step}" if from_step > 1 else ""
    shown = f"{found.handler}({arguments[1:-1]})" if arguments is not None else found.call
    if _goes_on(f"restart {wanted} as {shown}{step}", dry_run=dry_run, yes=yes):
        request = {"task": key, "method": found.method_id, "arguments": msgspec.to_builtins(data)}
        if from_step > 1:
            given = [entry for entry in decode_journal(journal or b"") if 0 < entry.step < from_step]
            request["journal"] = msgspec.to_builtins(msgspec.msgpack.encode(given))
        _order(settings, "restart", request)


@executions.command()
@_pass_settings
@click.pass_obj
def rebuild(registry: Registry, settings: InstanceSettings) -> None:
    """Add to the list what is in the log and not in it, by a replay from the oldest checkpoint; NAME may run."""
    from immortal.replay import AppCommand, ReplayPlan, plan_route, run_replay
    from immortal.replay.app_process import default_app
    from immortal.replay.result import Sink

    settings_with_log(registry, settings.name)
    with own_logs.open_reader(settings, check=False) as reader, tempfile.TemporaryDirectory() as folder:
        summary = reader.summary()
        usable = [one for one in summary.checkpoints if one.sequence_id + 1 >= summary.first_sequence_id]
        route = plan_route(ReplayPlan(checkpoint_id=usable[0].checkpoint_id if usable else None), reader, summary)
        app = default_app(settings.name, settings.app, summary, route.last_version)
        command = AppCommand.of(app, settings=settings)
        path = Path(folder) / "executions.db"
        environment = {**command.environment, "IMMORTAL_EXECUTIONS": f"0:{path}"}
        result = run_replay(reader, route, msgspec.structs.replace(command, environment=environment), Sink())
        if result.failure is not None:
            raise FailedError(f"the replay ends at record {result.failure.sequence_id}: {result.failure.text}")
        added = merge(settings.folder, path) if path.exists() else 0
    echo(f"{settings.name}: {counted(added, 'execution')} added")
