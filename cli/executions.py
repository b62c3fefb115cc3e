"""Command executions: runs of handlers, by key, handler, state or caller; show, cancel, signal, restart them."""

from __future__ import annotations

import functools
import re
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec

from immortal.cli.handlers import _pass_settings, _reason_option, _request, json_argument
from immortal.cli.options import (
    InstanceCommandGroup,
    Moment,
    complete_instance,
    instance_name,
    settings_with_log,
)
from immortal.coordinator.config import InstanceSettings
from immortal.coordinator.instances import own_logs
from immortal.coordinator.instances.registry import Registry
from immortal.coordinator.log.identity import Time
from immortal.presenters.executions import (
    chosen,
    execution_lines,
    execution_row,
    execution_states,
    execution_view,
    order_for,
)
from immortal.presenters.status import operator_name
from immortal.protocol.command_line import FailedError, counted, echo, echo_json, echo_lines, json_option, print_table
from immortal.protocol.executions import (
    STATES,
    Execution,
    ExecutionsError,
    Query,
    find_in,
    key_of_id,
    label_of,
    merge,
)
from immortal.protocol.safe_output import printable_json
from immortal.replay import AppCommand, ReplayPlan, plan_route, run_replay
from immortal.replay.app_process import default_app
from immortal.replay.plan import usable_checkpoints
from immortal.replay.result import Sink
from immortal.replay.travel.sessions import Sessions

PREVIEW_ROWS = 20
COLUMNS = ("ID", "state", "execution", "called by", "began", "took", "labels")
Function = TypeVar("Function", bound=Callable[..., Any])


class _Group(InstanceCommandGroup):
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Accept ``NAME... --where ... --json`` and ``NAME ID`` too."""
        names: list[str] = []
        while args and not args[0].startswith("-") and not (names and (args[0] in self.commands or _is_id(args[0]))):
            names.append(args[0])
            args = args[1:]
        joined = [",".join(names)] if names else []
        if args and args[0].startswith("-"):
            args = [*args, *joined]
        else:
            args = [*joined, *(["show"] if args and _is_id(args[0]) else []), *args]
        return click.Group.parse_args(self, ctx, args)


def _is_id(text: str) -> bool:
    return re.fullmatch("[0-9]+(:[0-9]+)?", text) is not None


def _names(ctx: click.Context, parameter: click.Parameter, value: str | None) -> list[str]:
    names = [instance_name(ctx, parameter, one) for one in (value or "").split(",") if one]
    return [one for one in names if one is not None]


def _query_options(function: Function) -> Function:
    """Add the options that select executions; the command gets a Query."""

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
            raise click.UsageError("--since and --until take times, such as 2026-11-28T16:30, or 2h ago as 2h")
        try:
            labels = tuple(label_of(one) for one in where)
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
        click.option("--text", default="", metavar="TEXT", help="Only those with TEXT in their arguments."),
        click.option("--until", type=Moment(), metavar="TIME", help="Only those that started at TIME or before."),
        click.option("--since", type=Moment(), metavar="TIME", help="Only those that started at TIME or later."),
        click.option(
            "--caller", help="Only those called by this instance, by ~CLIENT, or, with '', by the instance itself."
        ),
        click.option("--handler", default="", help="Only those of this handler, such as ship or Shop.ship."),
        click.option("--where", multiple=True, metavar="LABEL=VALUE", help="Only those with this label; repeatable."),
    ):
        with_query = option(with_query)
    return with_query  # type: ignore[return-value]


def _confirmation_options(function: Function) -> Function:
    function = click.option("--yes", is_flag=True, help="Do not ask for confirmation.")(function)
    return click.option("--dry-run", is_flag=True, help="Show what would be done, without doing it.")(function)


_state_option = click.option(
    "--state", default="", type=click.Choice(["", *STATES]), help="Only those in this state.", metavar="|".join(STATES)
)


@click.group(cls=_Group, invoke_without_command=True, subcommand_metavar="[ID | COMMAND [ARGS]...]")
@click.argument("name", metavar="[NAME]...", required=False, callback=_names, shell_complete=complete_instance)
@_query_options
@_state_option
@click.option(
    "--limit", type=click.IntRange(1, 1_000_000), default=100, show_default=True, help="Largest number to show."
)
@json_option
@click.pass_context
def executions(ctx: click.Context, name: list[str], query: Query, state: str, limit: int, as_json: bool) -> None:
    """List executions of NAMEs, or of all instances, the newest first.

    An execution is a run of an 'async def' handler, or a call of a 'def' handler with labels. With an ID, show one
    execution and its steps. The instances need not run.
    """
    if ctx.invoked_subcommand is not None:
        if len(name) != 1:
            raise click.UsageError(
                f"{ctx.invoked_subcommand}: exactly one NAME was expected before it, not {len(name)}"
            )
        ctx.params["name"] = name[0]
        return
    query.state, query.limit = state, limit + 1
    registry = ctx.ensure_object(Registry)
    folders = {one: registry.load(one).folder for one in name or registry.names()}
    found = find_in(folders, query, is_named=bool(name))
    if as_json:
        echo_json([one.plain() if len(name) == 1 else {"instance": of, **one.plain()} for of, one in found[:limit]])
        return
    _print([one for _, one in found[:limit]], None if len(name) == 1 else [of for of, _ in found[:limit]])
    if len(found) > limit:
        echo(f"... and more: show more than {limit} with --limit, or older ones with --until")


def _print(found: list[Execution], instances: list[str] | None = None) -> None:
    if not found:
        echo("no execution matches")
        return
    rows = [execution_row(one) for one in found]
    if instances is not None:
        rows = [(name, *row) for name, row in zip(instances, rows, strict=True)]
    print_table(COLUMNS if instances is None else ("instance", *COLUMNS), rows, right=("ID", "took"))


_id_argument = click.argument("wanted", metavar="ID")


@executions.command()
@_id_argument
@click.option(
    "--states", "shows_states", is_flag=True, help="Replay the log, and show how the execution changed the state."
)
@json_option
@_pass_settings
@click.pass_obj
def show(registry: Registry, settings: InstanceSettings, wanted: str, shows_states: bool, as_json: bool) -> None:
    """Show an execution: its steps, effects with attempts, calls to other services, and what it waits for."""
    view = execution_view(registry, settings, key_of_id(wanted))
    states = _states(registry, settings.name, view["execution"]) if shows_states else None
    if as_json:
        echo_json(_plain(view) | ({} if states is None else {"states": states}))
        return
    echo_lines(execution_lines(settings.name, view))
    if states is not None:
        echo("")
        echo("  state before its first step and after its last" + ("" if states["changes"] else ": the same"))
        for one in states["changes"]:
            echo(f"    {one['path']}: {one['old'] or 'absent'} -> {one['new'] or 'absent'}")
        if states["changes_more"]:
            echo("    ... and more")


def _states(registry: Registry, name: str, execution: Execution) -> dict[str, Any]:
    with closing(Sessions(registry.home)) as sessions:
        return execution_states(sessions, name, execution)


def _plain(value: Any) -> Any:
    if isinstance(value, Execution):
        return value.plain()
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list) else value


# --- many at once ----------------------------------------------------------------------------------------------------


_ids_argument = click.argument("ids", nargs=-1, metavar="[ID]...")


@executions.command()
@_ids_argument
@_query_options
@_reason_option
@_confirmation_options
@_pass_settings
def cancel(
    settings: InstanceSettings, ids: tuple[str, ...], query: Query, reason: str, dry_run: bool, yes: bool
) -> None:
    """Cancel the executions with these IDs, or all waiting ones that match, as 'immortal handlers NAME cancel'.

    They are shown first. Each request is logged and audited. Exit status: 1 if one of them was not carried out.
    """
    _order_all(settings, "cancel", query, ids, {"reason": reason}, dry_run=dry_run, yes=yes)


@executions.command()
@_ids_argument
@_query_options
@_reason_option
@_confirmation_options
@_pass_settings
def terminate(
    settings: InstanceSettings, ids: tuple[str, ...], query: Query, reason: str, dry_run: bool, yes: bool
) -> None:
    """End executions that ignore their cancellation, as 'immortal handlers NAME terminate'.

    No further code of theirs runs, not even a 'finally'. Otherwise like 'cancel'.
    """
    _order_all(settings, "terminate", query, ids, {"reason": reason}, dry_run=dry_run, yes=yes)


@executions.command()
@click.argument("event")
@click.argument("value", default="null")
@_query_options
@_confirmation_options
@_pass_settings
def signal(settings: InstanceSettings, event: str, value: str, query: Query, dry_run: bool, yes: bool) -> None:
    """Send EVENT with VALUE (JSON) to all waiting executions that match, as 'immortal handlers NAME signal'."""
    given = {"event": event, "value": json_argument("VALUE", value)}
    _order_all(settings, "signal", query, (), given, dry_run=dry_run, yes=yes)


@executions.command()
@_ids_argument
@_query_options
@_state_option
@click.option("--arguments", metavar="JSON", help="New arguments, all of them: '[17, \"tea\"]'.")
@click.option(
    "--from-step",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Keep the results of the steps before this one.",
)
@_confirmation_options
@_pass_settings
def restart(
    settings: InstanceSettings,
    ids: tuple[str, ...],
    query: Query,
    state: str,
    arguments: str | None,
    from_step: int,
    dry_run: bool,
    yes: bool,
) -> None:
    """Run 'async def' executions again: those with these IDs, or all ended ones that match.

    Each becomes a new execution that names its origin; nobody waits for its result. Effects of the first run are not
    undone: the new one repeats them from --from-step on. Earlier steps are not repeated and keep their results, unless
    the handler now does something else there.
    """
    query.state = state
    given = None if arguments is None else json_argument("--arguments", arguments)
    if given is not None and not isinstance(given, list):
        raise click.UsageError(f"--arguments {(arguments or '')[:60]!r}: a JSON list of all arguments was expected")
    request = {"arguments": given, "from_step": from_step}
    _order_all(settings, "restart", query, ids, request, dry_run=dry_run, yes=yes)


def _order_all(
    settings: InstanceSettings,
    verb: str,
    query: Query,
    ids: tuple[str, ...],
    given: dict[str, Any],
    *,
    dry_run: bool,
    yes: bool,
) -> None:
    found = chosen(settings, verb, query, ids)
    _print(found[:PREVIEW_ROWS])
    if len(found) > PREVIEW_ROWS:
        echo(f"... and {len(found) - PREVIEW_ROWS:,} more")
    requests = [order_for(settings, verb, one, given) for one in found]
    arguments = "" if given.get("arguments") is None else f" with {printable_json(given['arguments'])}"
    step = f" from step {given['from_step']}" if given.get("from_step", 1) > 1 else ""
    what = f"{verb} {counted(len(found), 'execution')}{arguments}{step}"
    if dry_run and found:
        echo(f"would {what}")
    if dry_run or not found or not (yes or click.confirm(f"{what.capitalize()}?", abort=True)):
        return
    refused = 0
    for one, request in zip(found, requests, strict=True):
        answer = _request(settings, verb, {**request, "who": operator_name()})
        refused += not answer["done"]
        echo(f"{one.id}: {answer['text']}")
    if refused:
        raise FailedError(f"{refused} of {counted(len(found), 'order')} were not carried out")


@executions.command()
@_pass_settings
@click.pass_obj
def rebuild(registry: Registry, settings: InstanceSettings) -> None:
    """Add missing executions to the list, by a replay from the oldest checkpoint. NAME may be running."""
    settings_with_log(registry, settings.name)
    if settings.encryption_key:
        raise FailedError(
            f"the log of {settings.name!r} is encrypted, so no list of executions is kept, since that would be readable"
        )
    with own_logs.open_reader(settings, check=False) as reader, tempfile.TemporaryDirectory() as folder:
        summary = reader.summary()
        usable = usable_checkpoints(summary)
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
