"""Commands replay and verify: time travel, and the proof that it is exact. Both only read the log, also a live one."""

from __future__ import annotations

import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import click
from msgspec import to_builtins

from immortal.appsdk.errors import EXIT_INTERRUPTED
from immortal.cli.options import (
    Moment,
    app_or_hand,
    app_port_option,
    at_least_option,
    check_folder,
    debugpy_option,
    handler_limit_option,
    name_argument,
    pass_registry,
    progress_bar,
    settings_with_log,
    timeout_option,
    trust_pickle_option,
)
from immortal.coordinator.config import InstanceSettings
from immortal.coordinator.instances import own_logs
from immortal.coordinator.instances.registry import Registry, RegistryError
from immortal.coordinator.log.identity import Time
from immortal.coordinator.log.open import open_reader, place_of
from immortal.coordinator.log.reader import LogReader
from immortal.coordinator.log.record_contents import first_record_at
from immortal.protocol.command_line import FailedError, RecordPlace, counted, echo, echo_json, echo_lines, json_option
from immortal.protocol.files import opener, removed_on_error, write_whole
from immortal.protocol.safe_output import printable_json
from immortal.protocol.verdicts import Verdict
from immortal.replay import BY_HAND, AppCommand, ReplayError, ReplayPlan, ReplayResult, plan_route, run_replay
from immortal.replay.app_process import OwnCode, code_at_end, default_app, show_state
from immortal.replay.plan import AppExitedError, unshowable_state_text
from immortal.replay.result import CountingSink, summary_json, summary_lines, too_little_text
from immortal.replay.travel.sessions import Sessions
from immortal.replay.verify import ProvingSink, state_problem, verify_section, verify_sections
from immortal.replay.verify_report import Report
from immortal.replay.why import READS_MAX, STEPS_MAX, Explainer

DIVERGED = 3


_app_option = click.option(
    "--app",
    metavar="MODULE:CLASS",
    callback=app_or_hand,
    help="Code to run; - waits for an app started by hand.  [default: the instance's own]",
)
_checkpoint_option = click.option(
    "--checkpoint", "checkpoint_id", type=click.IntRange(min=0), metavar="N", help="Checkpoint to begin at."
)


class RecordOrTime(RecordPlace):
    """Parameter type of a place in the log, or a time."""

    name = "record[:message]|time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not re.fullmatch("[0-9]+(:[0-9]*)?", str(value)):
            return Moment().convert(value, param, ctx)
        return super().convert(value, param, ctx)


def _record_at(settings: InstanceSettings, time: Time) -> int:
    """Return the last record of that time or before. Raises ReplayError."""
    with own_logs.open_reader(settings, check=False) as reader:
        found = first_record_at(reader, time.ns + 1) - 1
        if found < reader.summary().first_sequence_id:
            raise ReplayError(f"the log of {settings.name} has no record of that time or before")
    return found


@click.command()
@name_argument
@_checkpoint_option
@click.option(
    "--to",
    "last",
    type=RecordOrTime(),
    metavar="SEQ[:MESSAGE]|TIME",
    help="End after this record, this message in it, or the last record up to this time.",
)
@_app_option
@app_port_option()
@click.option("--break", "breaks", is_flag=True, help="Stop in the debugger at the message given by --to.")
@debugpy_option("Like --break, for VS Code or another debugpy client: wait for it at PORT of this machine.")
@click.option("--state", "shows_state", is_flag=True, help="Print the state at the end, as JSON.")
@click.option(
    "--state-file", type=click.Path(dir_okay=False, path_type=Path), help="Write that state in the app's own encoding."
)
@click.option("--lines", is_flag=True, help="Show the app's output, also that of immortal.logger.")
@click.option("--follow", is_flag=True, help="Keep replaying new records until Ctrl-C or --to.")
@click.option("--strict", is_flag=True, help="Refuse an app that does what a replay can't repeat.")
@handler_limit_option
@trust_pickle_option
@json_option
@pass_registry
def replay(
    registry: Registry,
    name: str,
    checkpoint_id: int | None,
    last: tuple[int, int | None] | Time | None,
    app: str | None,
    app_port: tuple[int, int | None] | None,
    breaks: bool,
    debugpy: int | None,
    shows_state: bool,
    state_file: Path | None,
    lines: bool,
    follow: bool,
    strict: bool,
    handler_limit_s: float,
    trust_pickle: bool,
    as_json: bool,
) -> None:
    """Replay the log of NAME into a copy of its app, up to any record.

    The replay begins at the newest checkpoint before its end. --to 12:3 ends after message 3 of record 12, both counted
    from 0 ('immortal log show' lists them). Nothing is sent to anybody, and no hook of the app runs.

    --break stops at the first line of that message's handler, or at the await after which an async handler continues.

    The calls that the app makes are compared with the log, as in a recovery. If they differ, no state is shown for the
    instance's own code (status 1); the state of other code (--app) is marked as one that never existed (status 3).

    Exit status: 0 if the replay is complete, 1 if it fails, or if a call fails that did not fail then, 3 if calls
    differ.
    """
    option = "--break" if debugpy is None else "--debugpy"
    breaks = breaks or debugpy is not None
    if breaks and last is None:
        raise click.UsageError(f"{option} needs --to SEQ[:MESSAGE]: the message to stop at")
    if breaks and app == BY_HAND:
        raise click.UsageError(f"{option} starts the app in this terminal: it can't be combined with --app -")
    settings = settings_with_log(registry, name)
    if isinstance(last, Time):
        last = _record_at(settings, last), None
    sequence_id, message = last or (None, None)
    plan = ReplayPlan(checkpoint_id, sequence_id, message, before_last=breaks, follow=follow)
    outputs = CountingSink()

    def tells(verdict: Verdict) -> bool:
        return not breaks or verdict.task > 0 or verdict.key[:2] != (sequence_id, message or 0)

    with ExitStack() as stack:
        reader = stack.enter_context(own_logs.open_reader(settings, trust_pickle=trust_pickle))
        summary = reader.summary()
        route = plan_route(plan, reader, summary)
        is_own = app is None
        own = OwnCode(app) if app is not None else code_at_end(settings, summary, route)
        app, code = own.app, own.archive
        if own.note:
            echo(f"note: replays {own.note}", err=True)
        proving = ProvingSink(reader, route, outputs)
        break_at = last if breaks else None
        command = AppCommand.of(
            app,
            strict=strict,
            lines=lines,
            break_at=break_at,
            debugpy=debugpy,
            settings=settings,
            code=code,
            ports=app_port,
            handler_limit_s=handler_limit_s,
        )
        blob = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="immortal-replay-"))) / "state"
        stop = stack.enter_context(_signals(follow=follow, in_debugger=breaks))
        advance = None if breaks or lines else stack.enter_context(progress_bar("replaying"))
        try:
            result = run_replay(
                reader,
                route,
                command,
                proving,
                blob_path=blob,
                progress=advance,
                stop=stop,
                announce=_announce(name),
                sends_verdict=tells,  # the message to stop at is called, whatever became of it
            )
        except AppExitedError as error:
            if breaks and error.exit_status == EXIT_INTERRUPTED:
                return  # the user has left the debugger
            raise
        problem = "" if breaks else proving.problem(name, result)
        if is_own and (shows_state or state_file is not None) and result.failure is None and result.records:
            problem = problem or state_problem(
                reader,
                route,
                AppCommand.of(app, settings=settings, code=code, handler_limit_s=handler_limit_s),
                own.first,
            )
        if problem and is_own and (shows_state or state_file is not None):
            raise FailedError(unshowable_state_text(name, problem))
        if result.failure is None and state_file is not None:
            is_file = state_file.is_file() or not state_file.exists()  # no pipe
            with (
                removed_on_error(state_file) if is_file else nullcontext(),
                open(blob, "rb") as made,
                open(state_file, "wb", opener=opener) as kept,
            ):
                shutil.copyfileobj(made, kept)
        state = _state(result, app, code) if result.failure is None and shows_state else None
    if as_json:
        found = summary_json(name, result, outputs) | {"diverged": problem}
        echo_json(found | ({"state": state} if shows_state else {}))
    else:
        echo_lines(summary_lines(name, result, outputs), err=shows_state)
        if problem:
            echo(f"  DIVERGED: {problem}; {name} never was in this state", err=shows_state)
        if state is not None:
            echo_lines(printable_json(state, indent=2).split("\n"))
    sys.exit(1 if result.failure is not None or result.news else DIVERGED if problem else 0)


@click.command()
@name_argument
@click.argument("path")
@click.option(
    "--at", type=RecordOrTime(), metavar="SEQ[:MESSAGE]|TIME", help="Moment to explain the value at.  [default: now]"
)
@click.option("--steps", type=click.IntRange(1, 200), default=STEPS_MAX, show_default=True, help="Messages to go back.")
@click.option(
    "--reads",
    type=click.IntRange(min=0),
    default=READS_MAX,
    show_default=True,
    help="Values read by these messages to explain as well.",
)
@click.option("--minimal", is_flag=True, help="Find the fewest inputs of NAME that give this value.")
@click.option(
    "--export",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write these inputs as a pytest test.",
)
@timeout_option(600.0, "Seconds that one replay may take.")
@json_option
@pass_registry
def why(
    registry: Registry,
    name: str,
    path: str,
    at: tuple[int, int | None] | Time | None,
    steps: int,
    reads: int,
    minimal: bool,
    export: Path | None,
    timeout_s: float,
    as_json: bool,
) -> None:
    """Explain a value of NAME: which message and line set it.

    PATH is a value of the state: 'total', 'sold["tea"]', 'orders[7].price'. The search goes back from service to
    service to an input from outside: a request, an impulse, a timer, the result of an effect. Below that, it lists what
    set the values that these messages read, the nearest first. Logs are only read, and the apps' code runs on them. The
    search ends, with a note, at a service whose log is not on this machine.

    --minimal leaves out as many inputs of NAME as it can, from its oldest checkpoint on. --export writes the rest as a
    test that begins with the first start.
    """
    if export is not None and export.exists():
        raise FailedError(f"{export} is there already: give another name, or remove it first")
    if export is not None:
        check_folder("--export", export)
    settings = settings_with_log(registry, name)
    if isinstance(at, Time):
        at = _record_at(settings, at), None
    with closing(Sessions(registry.home, question_s=0.8 * timeout_s, answer_s=timeout_s)) as sessions:
        explainer = Explainer(registry, sessions, steps, reads)
        found = explainer.explain(name, path, *at or (None, None))
        fewest = explainer.minimal(found) if minimal or export is not None else None
    if as_json:
        echo_json(to_builtins(found) | ({} if fewest is None else {"minimal": to_builtins(fewest)}))
    else:
        echo_lines([*found.lines(), *(() if fewest is None else fewest.lines())])
    if fewest is not None and export is not None:
        write_whole(export, fewest.test_source(), is_new=True)


@click.command()
@name_argument
@_checkpoint_option
@_app_option
@app_port_option()
@click.option(
    "--peer-log",
    "peer_logs",
    multiple=True,
    metavar="NAME_OR_FOLDER",
    help="Log of a receiver, which shows the calls as they were sent; repeatable.",
)
@click.option("--all", "everything", is_flag=True, help="Replay from every kept checkpoint, not only the last.")
@click.option("--to", "last", type=click.IntRange(min=0), metavar="SEQ", help="End after this record.")
@at_least_option(0)
@handler_limit_option
@trust_pickle_option
@json_option
@pass_registry
def verify(
    registry: Registry,
    name: str,
    checkpoint_id: int | None,
    app: str | None,
    app_port: tuple[int, int | None] | None,
    peer_logs: tuple[str, ...],
    everything: bool,
    last: int | None,
    at_least: int,
    handler_limit_s: float,
    trust_pickle: bool,
    as_json: bool,
) -> None:
    """Check that a replay of NAME repeats what it did.

    The log is replayed from checkpoint to checkpoint, and after the last one. Calls are compared with the log, the
    state with the next checkpoint, and the state before each query with the state after it, since queries may not
    change it. An app may end with status 0 at the last record of the log, as it did then.

    Exit status: 0 if all is the same, 3 if not, 1 if this can't be checked or fewer than --at-least messages were
    compared.
    """
    if checkpoint_id is not None and everything:
        raise click.UsageError("give one of --checkpoint and --all")
    settings = settings_with_log(registry, name)
    is_same, is_forgotten, messages = True, True, 0
    described = []
    warnings: dict[str, None] = {}
    with ExitStack() as stack:
        reader = stack.enter_context(own_logs.open_reader(settings, trust_pickle=trust_pickle))
        receivers = {peer.identity.instance_name: peer for peer in _peers(registry, peer_logs, stack, settings)}
        summary = reader.summary()
        found = verify_sections(
            reader, summary, checkpoint_id=checkpoint_id, everything=everything, last_sequence_id=last
        )
        for note in [] if as_json else found.notes:
            echo(f"note: {note}")
        for start, end in found.pairs:
            version = start.version if end is None else end.version
            chosen = app or default_app(name, settings.app, summary, version)
            with progress_bar(f"from checkpoint {start.checkpoint_id}") as advance:
                section = verify_section(
                    reader,
                    start,
                    end,
                    AppCommand.of(
                        chosen,
                        checks_queries=True,
                        settings=settings,
                        ports=app_port,
                        handler_limit_s=handler_limit_s,
                    ),
                    last_sequence_id=last,
                    receivers=receivers,
                    progress=advance,
                    announce=_announce(name),
                )
            is_same = is_same and section.is_same
            is_forgotten = is_forgotten and (section.is_same or bool(section.result.forgotten))
            messages += section.result.messages
            warnings |= dict.fromkeys(section.result.warnings)
            report = Report(name, section, reader)
            if as_json:
                described.append(report.to_json())
            else:
                echo_lines(report.lines())
    if as_json:
        echo_json(
            {
                "instance": name,
                "same": is_same,
                "messages": messages,
                "sections": described,
                "warnings": list(warnings),
                "notes": list(found.notes),
            }
        )
    else:
        if is_forgotten and not is_same:
            echo(f"{name}: NOT the same, but only where handlers ask for data of forgotten persons: a possible reason")
        else:
            echo_lines(_verdict(name, is_same=is_same, messages=messages, warnings=list(warnings)))
    if is_same and messages < at_least:
        raise FailedError(f"{name}: {too_little_text(messages, at_least)}")
    sys.exit(0 if is_same else DIVERGED)


def _verdict(name: str, *, is_same: bool, messages: int, warnings: list[str]) -> Iterator[str]:
    if is_same:
        yield f"{name}: the same, in {counted(messages, 'message')}"
        return
    yield f"{name}: NOT the same: it does what a replay can't repeat, or its code was changed without an upgrade"
    if warnings:
        yield "found in its code:"
        yield from (f"  {warning}" for warning in warnings)


def _state(result: ReplayResult, app: str, code: Path | None) -> dict[str, Any]:
    """Return the state as text; for an app without the SDK only its size and checksum."""
    target = result.label if app == BY_HAND else app
    if result.description is not None and result.blob_path is not None and target:
        try:
            return show_state(target, result.blob_path, code)
        except ReplayError:
            if app != BY_HAND:
                raise  # otherwise its class can be on another machine
    return {"size_bytes": result.blob_size_bytes, "check": f"{result.blob_check or 0:016x}"}


def _announce(name: str) -> Callable[[str], None]:
    def announce(address: str) -> None:
        variable = "" if " " in address else f" (IMMORTAL_APP_ADDRESS={address})"  # two ports are no SDK app's
        echo(f"waiting for an app of {name} at {address}{variable}", err=True)

    return announce


def _peers(
    registry: Registry, peer_logs: tuple[str, ...], stack: ExitStack, own: InstanceSettings
) -> Iterator[LogReader]:
    """Yield readers of the logs that were given by an instance's name or as a folder."""
    for given in peer_logs:
        place = own_logs.place_of(registry.load(given)) if given in registry.names() else place_of(given)
        if not place.exists():
            raise RegistryError(f"{given!r} is neither a registered instance with a log nor the folder of one")
        if place.key == place_of(own.log).key:
            raise click.UsageError(f"--peer-log {given}: this is the log of {own.name!r} itself, which is always used")
        yield stack.enter_context(open_reader(place))


@contextmanager
def _signals(*, follow: bool, in_debugger: bool) -> Iterator[Callable[[], bool]]:
    """Let Ctrl-C end the following, and a second one all; in the debugger it is the app's. Yields if to end."""
    asked = 0

    def take(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked += 1
        if follow and asked > 1:
            raise KeyboardInterrupt

    if not (follow or in_debugger):
        yield lambda: False
        return
    before = signal.signal(signal.SIGINT, take)
    try:
        yield lambda: follow and asked > 0
    finally:
        signal.signal(signal.SIGINT, before)
