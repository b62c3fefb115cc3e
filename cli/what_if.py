"""Command what-if: replays the logs of an instance or a fleet with other code."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import click
import msgspec

from immortal.cli.options import (
    Moment,
    app_or_hand,
    app_port_option,
    at_least_option,
    check_folder,
    check_page,
    handler_limit_option,
    instance_name,
    name_argument,
    pass_registry,
    progress_bar,
    settings_with_log,
    trust_pickle_option,
)
from immortal.coordinator.config.values import check_app
from immortal.coordinator.core.output.output_check import Divergence, OutputDivergenceError
from immortal.coordinator.instances import own_logs
from immortal.coordinator.instances.registry import Registry
from immortal.coordinator.log.identity import Time, parse_duration_ns
from immortal.coordinator.service.process import die_with_parent
from immortal.presenters.what_if import DIFFERENT, Report
from immortal.protocol.command_line import FailedError, echo, echo_json, echo_lines, json_option
from immortal.protocol.decoding import DecodeError, decode_json, parse_json_argument
from immortal.protocol.distribution import add_extra
from immortal.protocol.errors import ImmortalError
from immortal.protocol.files import write_whole
from immortal.protocol.safe_output import printable
from immortal.replay import OWN_VERSION, AppCommand
from immortal.replay.app_process import OwnCode, code_at_end
from immortal.replay.comparison import Side
from immortal.replay.what_if import plan_what_if, run_what_if, try_upgrade

if TYPE_CHECKING:
    from immortal.replay.fleet.model import Answer, Call
    from immortal.replay.fleet.outcome import FleetOutcome

_code_option = click.option(
    "--code",
    type=click.Path(exists=True, path_type=Path),
    help="Folder or wheel to import the code to try from.",
)


class _Version(click.ParamType):  # type: ignore[type-arg]
    """A version number; the option without a value stands for the version of the app."""

    name = "version"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        return OWN_VERSION if value is OWN_VERSION else int(click.IntRange(min=1).convert(value, param, ctx))


class _WhatIf(click.Command):
    """Command what-if; with --fleet it runs another command, which has other options."""

    fleet: ClassVar[click.Command]

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        if "--fleet" not in args:
            return super().make_context(info_name, args, parent, **extra)
        own = [arg for arg in args if arg != "--fleet"]
        context = _fleet.make_context(f"{info_name} --fleet", list(own), parent, **extra)
        context.meta["arguments"] = own
        return context


@click.command("what-if", cls=_WhatIf)
@name_argument
@click.option(
    "--app",
    "new_app",
    required=True,
    metavar="MODULE:CLASS",
    callback=app_or_hand,
    help="Code to try; - waits for an app started by hand.",
)
@_code_option
@click.option(
    "--old-app", metavar="MODULE:CLASS", callback=app_or_hand, help="Code to compare with.  [default: NAME's own]"
)
@app_port_option()
@app_port_option("old-app")
@click.option("--from", "checkpoint_id", type=click.IntRange(min=0), help="Checkpoint to begin at, not the oldest.")
@click.option("--to", "last_sequence_id", type=click.IntRange(min=0), help="Last record to handle.")
@click.option(
    "--upgrade",
    "upgrade_to",
    is_flag=False,
    flag_value=OWN_VERSION,
    type=_Version(),
    metavar="[VERSION]",
    help="Let the new code upgrade the state first, to VERSION or to its own version.",
)
@click.option(
    "--limit", type=click.IntRange(min=1), default=10, show_default=True, help="Differences to print in full, at most."
)
@at_least_option(1)
@handler_limit_option
@click.option("--fleet", is_flag=True, help="Follow changed calls through all services: see what-if --fleet --help.")
@trust_pickle_option
@json_option
@pass_registry
def what_if(
    registry: Registry,
    name: str,
    new_app: str,
    code: Path | None,
    old_app: str | None,
    app_port: tuple[int, int | None] | None,
    old_app_port: tuple[int, int | None] | None,
    checkpoint_id: int | None,
    last_sequence_id: int | None,
    upgrade_to: int | None,
    limit: int,
    at_least: int,
    handler_limit_s: float,
    fleet: bool,
    trust_pickle: bool,
    as_json: bool,
) -> None:
    """Compare what other code would have done with the log of NAME.

    The recorded inputs go through the old and the new code, side by side; calls that failed then are tried again.
    Nothing is sent, and the log is only read.

    Exit status: 0 if nothing would be different, 3 if something would (also a call that now fails or no longer fails,
    or a record that ends the new code), 1 if this can't be tried or fewer than --at-least messages were compared.
    """
    settings = settings_with_log(registry, name)
    with (
        own_logs.open_reader(settings, trust_pickle=trust_pickle) as reader,
        tempfile.TemporaryDirectory(prefix="immortal-") as folder,
    ):
        route = plan_what_if(reader, checkpoint_id=checkpoint_id, last_sequence_id=last_sequence_id)
        old = OwnCode(old_app) if old_app else code_at_end(settings, reader.summary(), route)
        if old.note:
            echo(f"note: the old side runs {old.note}", err=True)
        command = partial(AppCommand.of, settings=settings, handler_limit_s=handler_limit_s)
        apps = {
            Side.OLD: command(old.app, code=old.archive, ports=old_app_port),
            Side.NEW: command(new_app, code=code, ports=app_port),
        }
        blob_paths = {side: Path(folder, side.value) for side in Side}
        try:
            with progress_bar("replaying") as progress:
                outcome = run_what_if(
                    reader,
                    route,
                    apps,
                    upgrade_to=upgrade_to,
                    limit=limit,
                    blob_paths=blob_paths,
                    progress=progress,
                    announce=lambda side, address: echo(f"waiting for the {side.value} app at {address}", err=True),
                )
        except OutputDivergenceError as error:
            raise FailedError(_divergence_text(error.divergence, name, old.app)) from None
        if upgrade_to is not None and checkpoint_id is None and not outcome.upgrade_error:
            outcome.upgrade_now_error = try_upgrade(reader, route, apps[Side.NEW], upgrade_to)
        report = Report(name, apps, outcome, reader, limit, blob_paths, at_least=at_least)
        echo_lines(report.warnings, err=True)
        if as_json:
            echo_json(report.values())
        else:
            echo_lines(report.lines())
    sys.exit(report.exit_status)


def _divergence_text(divergence: Divergence, name: str, old_app: str) -> str:
    stream = f"the calls to {divergence.destination!r}" if divergence.destination else "the calls to itself"
    return (
        f"{old_app} does not repeat what the log of {name!r} has: of {stream}, numbers {divergence.after_position + 1}"
        f" to {divergence.position} are different or missing. So there is nothing to compare with: give the code that"
        f" made this log with --old-app, or see 'immortal verify {name}'"
    )


# what-if --fleet: runs changed code over the logs of all services that its changed calls reach.


_HASH_SEED = "PYTHONHASHSEED"


class _Change(click.ParamType):  # type: ignore[type-arg]
    name = "name=module:class"

    def convert(
        self, value: str | tuple[str, str], param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, str]:
        if isinstance(value, tuple):
            return value
        name, equals, app = value.partition("=")
        if not equals:
            self.fail(f"{value!r}: a service and its new class were expected, such as shop=shop_v2:Shop", param, ctx)
        try:
            return str(instance_name(click.get_current_context(), click.Argument(["name"]), name)), check_app(app)
        except ImmortalError as error:
            self.fail(str(error), param, ctx)


_EFFECTS = ("fail", "by-key", "ask")


def _orders(ctx: click.Context, parameter: click.Parameter, value: str | None) -> list[int] | None:
    """Parse the value of --orders: "A-B" means the orders A to B, and order 0 to compare with; "" means none."""
    if not value:
        return None if value is None else []
    first, _, last = value.partition("-")
    if not (first.isdecimal() and last.isdecimal()):
        raise click.BadParameter(f"{value!r}: the numbers of orders were expected, such as 1-20")
    return sorted({0, *range(int(first), int(last) + 1)})


def function_name(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    words = _EFFECTS if parameter.name == "effects" else ()
    if value is not None and ":" not in value and value not in words:
        expected = " or ".join((*words, "a function"))
        raise click.BadParameter(f"{value!r}: {expected} was expected, as module:function")
    return value


def _duration_ns(ctx: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    duration_ns = None if value is None else parse_duration_ns(value)
    if value is not None and duration_ns is None:
        raise click.BadParameter(f"{value!r}: a duration was expected, such as 90s, 10m, 2h or 1d")
    return duration_ns


@click.command("what-if --fleet")
@click.option(
    "--change",
    "changes",
    type=_Change(),
    multiple=True,
    required=True,
    metavar="NAME=MODULE:CLASS",
    help="Service, and the code to try for it; repeatable.",
)
@_code_option
@click.option("--from", "begin", type=Moment(), metavar="TIME", help="Begin at the newest checkpoint before this time.")
@click.option("--to", "end", type=Moment(), metavar="TIME", help="Leave out records after this time.")
@click.option(
    "--effects",
    default="fail",
    show_default=True,
    callback=function_name,
    metavar="fail|by-key|ask|MODULE:FUNCTION",
    help="How to answer effects without a result in the logs.",
)
@click.option(
    "--answer", callback=function_name, metavar="MODULE:FUNCTION", help="Answers new calls to services without a log."
)
@click.option(
    "--check", callback=function_name, metavar="MODULE:FUNCTION", help="Function that checks the services' states."
)
@handler_limit_option
@click.option("--seeds", type=click.IntRange(min=1), default=1, show_default=True, help="Number of orders to try.")
@click.option("--details", is_flag=True, help="Add each difference, and calls by the hour, to --json.")
@click.option("--without", multiple=True, metavar="NAME", help="Service to treat as one without a log; repeatable.")
@click.option("--orders", callback=_orders, hidden=True)  # of a task on Spark
@click.option(
    "--delays",
    type=click.Choice(["recorded", "shortest", "longest"]),
    default="recorded",
    show_default=True,
    help="Delay of new messages: as recorded for their stream, or the shortest or longest possible.",
)
@click.option(
    "--bisect",
    "git_range",
    metavar="A..B",
    help="Find the first commit in this range of the git repository that makes a difference, or breaks --check.",
)
@click.option(
    "--html", "page", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Write a page with charts."
)
@click.option(
    "--parquet",
    "tables",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Write Parquet tables: differences, states and outcomes.",
)
@click.option("--live", is_flag=True, help="Follow the running services: compare each record as it is logged.")
@click.option(
    "--for",
    "duration_ns",
    callback=_duration_ns,
    metavar="DURATION",
    help="With --live: end after this time, such as 1h.",
)
@click.option(
    "--consequences", is_flag=True, help="With --live: replay the whole fleet from time to time, to show what follows."
)
@click.option(
    "--memory-limit",
    "memory_limit_mib",
    type=click.IntRange(min=64),
    metavar="MIB",
    help="With --live: memory limit of the process with both codes; above it, they begin again.  [default: 2048]",
)
@click.option("--shadow", hidden=True, help="Order to a process of --live.")
@trust_pickle_option
@json_option
@pass_registry
@click.pass_context
def _fleet(
    ctx: click.Context,
    registry: Registry,
    changes: tuple[tuple[str, str], ...],
    code: Path | None,
    begin: int | Time | None,
    end: int | Time | None,
    effects: str,
    answer: str | None,
    check: str | None,
    handler_limit_s: float,
    seeds: int,
    details: bool,
    without: tuple[str, ...],
    orders: list[int] | None,
    delays: str,
    git_range: str | None,
    page: Path | None,
    tables: Path | None,
    live: bool,
    duration_ns: int | None,
    consequences: bool,
    memory_limit_mib: int | None,
    shadow: str | None,
    trust_pickle: bool,
    as_json: bool,
) -> None:
    """Compare what a fleet did with what it would have done with other code.

    Changed calls travel: the other services' own code handles and answers them. Inputs from outside are the recorded
    ones. Nothing is sent, and logs are only read.

    With --live, the changed code shadows the running services until Ctrl-C: it gets each input as it is logged.

    Exit status: 0 if nothing would be different, 3 if something would, 1 if this can't be tried.
    """
    if not live and (consequences or duration_ns is not None or memory_limit_mib is not None):
        raise click.UsageError("--for, --consequences and --memory-limit are for --live")
    if live:
        not_live = {"--to": end, "--bisect": git_range, "--parquet": tables}
        of_fleet = {"--check": check, "--answer": answer, "--effects": effects != "fail", "--seeds": seeds > 1}
        of_fleet |= {"--delays": delays != "recorded", "--without": bool(without), "--details": details}
        given = [option for option, value in {**not_live, **({} if consequences else of_fleet)}.items() if value]
        if given or effects == "ask":
            which = " without --consequences" if of_fleet.keys() & given else ""
            raise click.UsageError(f"{', '.join(given) or '--effects ask'}: not with --live{which}")
    if seeds > 1 and delays != "recorded":
        raise click.UsageError(f"--delays {delays} leaves one order, and --seeds tries many: give one of the two")
    if git_range is not None:
        if page is not None or tables is not None or effects == "ask":
            raise click.UsageError("--bisect can't be combined with --html, --parquet or --effects ask")
        sys.exit(_bisect(ctx, git_range, code or Path(), is_of_check=check is not None, as_json=as_json))
    if effects == "ask" and not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise FailedError("--effects ask: there is no terminal to ask at: give fail, by-key or MODULE:FUNCTION")
    for option, path, extra, packages in (
        ("--html", page, "spark", ("jinja2", "matplotlib")),
        ("--parquet", tables, "sql", ("pyarrow",)),
    ):
        if path is not None and (missing := [name for name in packages if find_spec(name) is None]):
            raise FailedError(f"{option} needs {', '.join(missing)}: {add_extra(extra)}")
    if page is not None:
        check_page("--html", page)
    if tables is not None:
        check_folder("--parquet", tables)
        if tables.exists():
            raise FailedError(f"{tables} is there already: give another name, or remove it first")
    begin_ns, end_ns = times_of(begin, end)
    if live:
        from immortal.cli.what_if_live import MEMORY_MIB, run_live, run_shadows

        if shadow is None:
            own = ctx.meta["arguments"]
            whole = [
                *_without(own, ("--for", "--html", "--from", "--memory-limit"), ("--live", "--consequences", "--json")),
                "--json",
            ]
            follow_on = (lambda more: _command(ctx, [*whole, *more])) if consequences else None
            how = dict(changes), duration_ns, page
            sys.exit(run_live(lambda more: _command(ctx, [*own, *more]), *how, consequences=follow_on, as_json=as_json))
        limits = handler_limit_s, memory_limit_mib or MEMORY_MIB
        sys.exit(run_shadows(registry.home, dict(changes), shadow, code, begin_ns, *limits, trust_pickle))
    cluster = ctx.meta.get("cluster")  # of what_if_spark
    if cluster is None and (status := in_child(ctx, asks=effects == "ask")) is not None:
        sys.exit(status)
    from immortal.replay.fleet.opening import load_function, what_if
    from immortal.replay.fleet.player import seal_process
    from immortal.replay.fleet.report import outcome_lines

    run: Callable[..., FleetOutcome] = what_if if cluster is None else cluster.what_if
    # What the user's modules and handlers print is left out: each run would print it again.
    with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):
        if cluster is None:
            seal_process(handler_limit_s)
        of_user = [None if one is None or one in _EFFECTS else load_function(one) for one in (effects, answer, check)]
        outcome = run(
            registry.home,
            dict(changes),
            code=code,
            begin_ns=begin_ns,
            to_ns=end_ns,
            effects=of_user[0] or (_ask_at_terminal() if effects == "ask" else effects),
            answer=of_user[1],
            check=of_user[2],
            seeds=seeds,
            delays=delays,
            trust_pickle=trust_pickle,
            details=details or page is not None or tables is not None,
            without=without,
            orders=orders,
        )
    if end is not None and not outcome.is_different and not any(one.messages for one in outcome.services):
        raise FailedError("--to: the changed services have no message up to that time: give a later one")
    if as_json:
        unread = {"unreadable": msgspec.to_builtins(cluster.unreadable)} if cluster and cluster.unreadable else {}
        echo_json(msgspec.to_builtins(outcome) | unread)
    else:
        echo_lines(outcome_lines(outcome))
    if page is not None:
        from immortal.presenters.what_if_fleet import fleet_page

        write_whole(page, fleet_page(outcome, dict(changes)))
    if tables is not None:
        from immortal.presenters.what_if_tables import write_tables

        write_tables(outcome, tables)
    sys.exit(DIFFERENT if outcome.is_different else 0)


_WhatIf.fleet = _fleet


def times_of(begin: int | Time | None, end: int | Time | None) -> list[int | None]:
    """Return the times of --from and --to in ns since the Unix epoch. Raises FailedError for a record's number."""
    times = []
    for option, moment in (("--from", begin), ("--to", end)):
        if isinstance(moment, int):
            raise FailedError(f"{option} {moment}: a time was expected, such as 2026-05-01T12:00")
        times.append(None if moment is None else moment.ns)
    return times


def _bisect(ctx: click.Context, git_range: str, code: Path, *, is_of_check: bool, as_json: bool) -> int:
    from immortal.replay.fleet.bisect import Commit, bisect, files_of
    from immortal.replay.fleet.outcome import FleetOutcome
    from immortal.replay.fleet.report import outcome_lines
    from immortal.replay.plan import ReplayError

    cluster = ctx.meta.get("cluster")  # of what_if_spark
    arguments = _without(ctx.meta["arguments"], ("--bisect", "--code"), ("--json",))

    def trial(commit: Commit) -> FleetOutcome | ReplayError:
        with files_of(code, commit.id) as folder:
            done = _run_child(ctx, [*arguments, "--code", str(folder), "--json"])
        if done.returncode not in (0, DIFFERENT):
            lines = done.stderr.decode("utf-8", "replace").splitlines() or [f"status {done.returncode}"]
            return ReplayError(lines[-1].removeprefix("Error: "))  # a wrong option prints its usage first
        try:
            return decode_json(done.stdout, type=FleetOutcome)
        except DecodeError:
            return ReplayError(f"its process ended with status {done.returncode}, and printed nothing")

    def is_bad(outcome: FleetOutcome) -> bool:
        return outcome.broken is not None if is_of_check else outcome.is_different

    def report_commit(commit: Commit) -> None:
        echo(f"{commit}: {commit.found}{f' ({commit.problem})' if commit.problem else ''}", err=True)

    if cluster is None:
        found = bisect(code, git_range, lambda commits: map(trial, commits), is_bad, report_commit)
    else:
        found = bisect(code, git_range, partial(cluster.trials, code), is_bad, report_commit, at_once=cluster.at_once)
    what = "breaks the check" if is_of_check else "makes a difference"
    if as_json:
        echo_json(msgspec.to_builtins(found))
    elif found.first is None or found.outcome is None:
        echo(f"none of {found.commits:,} commits {what}")
    else:
        echo(f"the first of {found.commits:,} commits that {what}: {found.first}")
        echo(f"by {found.first.author}, {found.first.date}")
        for commit in found.unknown:
            echo(f"or {commit}, which can't be tried")
        echo("")
        echo_lines(outcome_lines(found.outcome))
    return 0 if found.first is None else DIFFERENT


def _without(arguments: list[str], options: tuple[str, ...], flags: tuple[str, ...]) -> list[str]:
    kept, left = [], iter(arguments)
    for one in left:
        if one in options:
            next(left, None)
        elif one not in flags and one.partition("=")[0] not in options:
            kept.append(one)
    return kept


def _ask_at_terminal() -> Answer:
    """Return a function that asks at the terminal for the results of effects; equal effects are asked for once."""
    from immortal.replay.fleet.model import NoResultError

    known: dict[str, str] = {}

    def ask(call: Call) -> Any:
        request = f"{call.service}: {call}"
        while request not in known:
            try:
                text = click.prompt(printable(f"{request}: its result as JSON, or fail, or skip"), err=True).strip()
            except click.Abort:
                raise KeyboardInterrupt from None  # which is no failure of the effect
            try:
                if text not in ("fail", "skip"):
                    call.fits(parse_json_argument(text))
            except (DecodeError, TypeError) as error:
                echo(f"{text!r} is not a result: {error}", err=True)
            else:
                known[request] = text
        if known[request] == "skip":
            raise NoResultError
        if known[request] == "fail":
            raise RuntimeError("failed, as you answered")
        return parse_json_argument(known[request])

    return ask


def _command(ctx: click.Context, arguments: list[str]) -> dict[str, Any]:
    """Return the options for subprocess.run that start this command with other ``arguments``."""
    home, words = str(ctx.find_root().params["home"]), (ctx.info_name or "").split()
    command = [sys.executable, "-P", "-m", "immortal", "--home", home, *words, *arguments]
    ends_with_us = die_with_parent(os.getpid())  # code that hangs would go on for ever
    return {"args": command, "env": {**os.environ, _HASH_SEED: "0"}, "preexec_fn": ends_with_us}


def _run_child(ctx: click.Context, arguments: list[str], *, asks: bool = False) -> subprocess.CompletedProcess[bytes]:
    stderr = None if asks else subprocess.PIPE
    return subprocess.run(**_command(ctx, arguments), stdout=subprocess.PIPE, stderr=stderr, check=False)


def in_child(ctx: click.Context, *, asks: bool = False) -> int | None:
    """Run this command in a child process with the hash seed of apps; return its status. Return None in the child.

    So sets have the same order as in apps, and code that ends the process is reported. ``asks``: it asks at a terminal.
    """
    if os.environ.get(_HASH_SEED) == "0":
        return None
    done = _run_child(ctx, ctx.meta["arguments"], asks=asks)
    for output, is_error in ((done.stdout, False), (done.stderr or b"", True)):
        echo_lines(output.decode("utf-8", "replace").splitlines(), err=is_error)
    if done.returncode < 0 or done.returncode not in (0, 1, 2, DIFFERENT):
        raise FailedError(
            f"the code ended the process of {ctx.info_name} (status {done.returncode}), and its results are lost: try"
            " an earlier time for --to"
        )
    return done.returncode
