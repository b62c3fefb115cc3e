"""Commands recover and skip: what a recovery would do; cut a log before a damaged record; skip a message."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import closing

import click
from msgspec import Struct
from msgspec.structs import asdict, replace

from immortal.cli.options import (
    Advance,
    ask_coordinator,
    message_id,
    name_argument,
    pass_registry,
    progress_bar,
    settings_with_log,
)
from immortal.coordinator.config import InstanceSettings
from immortal.coordinator.core.errors import LogLockedError
from immortal.coordinator.core.interfaces import (
    IMPULSES,
    ONESELF,
    AuditEntry,
    LogStore,
    LogSummary,
    Transaction,
    is_outside,
)
from immortal.coordinator.instances import own_logs
from immortal.coordinator.instances.registry import Registry
from immortal.coordinator.log.cut import CutPlan, CutRefusedError, LogCutter, LostMessages
from immortal.coordinator.log.record_contents import batches, message_at, record_of, waiting_caller
from immortal.coordinator.log.verify import LogVerification
from immortal.coordinator.operator import control
from immortal.presenters.records import rpc_of
from immortal.presenters.status import operator_name
from immortal.protocol.client_frames import CLIENTS
from immortal.protocol.command_line import FailedError, counted, echo, echo_json, echo_lines, json_option
from immortal.protocol.errors import ImmortalError
from immortal.protocol.messages import MessageType, RpcKind
from immortal.protocol.verdicts import LETTER_SIZE_BYTES_MAX, TEXT_CHARACTERS_MAX, Verdict, VerdictKind
from immortal.replay import AppCommand, ReplayPlan, run_replay
from immortal.replay.app_process import default_app
from immortal.replay.plan import ReplayError, StateUnsavedError, plan_route
from immortal.replay.verify import ProvingSink

FINDINGS_SHOWN_MAX = 20


@click.command()
@name_argument
@click.option(
    "--truncate-at",
    "sequence_id",
    type=click.IntRange(min=0),
    metavar="SEQ",
    help="Cut the log before this record; the part that is cut off is kept beside it.",
)
@click.option("--force", is_flag=True, help="Cut even if recovery does not need it.")
@click.option("--yes", is_flag=True, help="Cut without asking for confirmation.")
@click.option("--no-replay", is_flag=True, help="Do not replay the log to check that the state can be saved.")
@json_option
@pass_registry
def recover(
    registry: Registry, name: str, sequence_id: int | None, force: bool, yes: bool, no_replay: bool, as_json: bool
) -> None:
    """Check what a recovery of NAME would do, what is damaged, and what helps.

    The check changes nothing. If NAME can recover, its log is replayed into a copy of its app, to see that the app
    makes the same calls and that its state can be saved.

    --truncate-at cuts the log, so that NAME recovers to the state before that record. This is the last resort, if there
    is no copy of the log. Stop the coordinator first.

    Exit status: 0 if NAME can recover or its log was cut, 1 if not.
    """
    settings = settings_with_log(registry, name)
    if sequence_id is None:
        if force or yes:
            raise click.UsageError("--force and --yes need --truncate-at")
        sys.exit(_check(settings, as_json, tries=not no_replay))
    _cut(settings, sequence_id, force=force, yes=yes, as_json=as_json)


# --- what a recovery would do ----------------------------------------------------------------------------------------


def _check(settings: InstanceSettings, as_json: bool, *, tries: bool) -> int:
    verification = own_logs.verify(settings)
    findings = list(verification.findings())
    can_recover = not verification.fatal
    verdict = _verdict(settings.name, verification)
    remedy = None if can_recover else _remedy(settings, verification)
    state = check_state_is_savable(settings) if can_recover and tries else SavableStateCheck()
    if state.divergence:
        can_recover, verdict = False, f"{settings.name} can NOT recover: {state.divergence}"
    if as_json:
        echo_json(
            {
                "name": settings.name,
                "can_recover": can_recover,
                "checkpoint_id": verification.recovery_checkpoint_id,
                "checkpoint_sequence_id": verification.recovery_sequence_id,
                "last_sequence_id": verification.last_sequence_id,
                "records": max(0, verification.last_sequence_id - verification.recovery_sequence_id),
                "first_damaged": _stop(verification),
                "findings": [
                    {"severity": finding.severity.value, "place": finding.place, "message": finding.message}
                    for finding in findings
                ],
                "remedy": remedy,
                "unsaved": state.problem or None,
                "diverged": state.divergence or None,
            }
        )
    else:
        if state.problem:
            verdict = verdict.replace(" can recover: it", f" can recover, but {state.problem}; it")
        echo(verdict)
        if state.note:
            echo(f"note: {state.note}")
        for finding in findings[:FINDINGS_SHOWN_MAX]:
            echo(f"{finding.severity.value}: {finding.message}")
        if len(findings) > FINDINGS_SHOWN_MAX:
            echo(f"... and {len(findings) - FINDINGS_SHOWN_MAX} more: 'immortal log verify {settings.name}'")
        if remedy is not None:
            echo_lines(remedy.split("\n"))
    return 0 if can_recover else 1


def _stop(verification: LogVerification) -> int | None:
    """Return the record at which a recovery stops; None if it does not stop."""
    if verification.recovery_checkpoint_id is None:
        return None
    return verification.first_damage(verification.recovery_sequence_id + 1)


def _verdict(name: str, verification: LogVerification) -> str:
    checkpoint_id, seen = verification.recovery_checkpoint_id, verification.recovery_sequence_id
    last = verification.last_sequence_id
    if verification.identity is None:
        return f"{name} can NOT recover: its log can't be read"
    if checkpoint_id is None and not verification.fatal:
        return f"{name} has no checkpoint yet: its next start is its first"
    if checkpoint_id is None:
        return f"{name} can NOT recover: its log has no whole checkpoint"
    start = f"checkpoint {checkpoint_id} (after record {seen})"
    stop = _stop(verification)
    if stop is not None:
        return f"{name} can NOT recover: it would start from {start} and stop at record {stop} of {last}"
    replayed = f"{last - seen} records, {seen + 1} to {last}" if last > seen else "no record"
    if verification.fatal:
        return f"{name} can NOT recover as it should: it would start from {start} and replay {replayed}"
    return f"{name} can recover: it would start from {start} and replay {replayed}"


def _remedy(settings: InstanceSettings, verification: LogVerification) -> str:
    stop = _stop(verification)
    if stop is None or verification.identity is None:
        return "what helps: restore the log from a copy"
    command = f"'immortal recover {settings.name} --truncate-at {stop}'"
    try:
        with LogCutter(own_logs.place_of(settings), settings.name, own_logs.read_keys(settings)) as cutter:
            plan = cutter.plan(stop)
    except CutRefusedError as error:
        return f"what helps: restore the log from a copy; {command} does not help: {error}"
    except LogLockedError:
        plan_lines = ["its coordinator runs: stop it to see what the cut would do"]
    else:
        plan_lines = list(_plan_lines(settings.name, plan))
    return "\n".join(
        (
            f"what helps: restore the log from a copy; if there is none, {command} cuts off record {stop} and all"
            " later ones, and asks first:",
            *(f"  {line}" for line in plan_lines),
        )
    )


# --- cutting ---------------------------------------------------------------------------------------------------------


def _cut(settings: InstanceSettings, sequence_id: int, *, force: bool, yes: bool, as_json: bool) -> None:
    control.refuse_running(settings.folder)
    with LogCutter(own_logs.place_of(settings), settings.name, own_logs.read_keys(settings)) as cutter:
        plan = _judged(cutter, settings.name, sequence_id, force=force)
        lines = list(_plan_lines(settings.name, plan))
        if not yes:
            echo_lines(lines, err=as_json)
            click.confirm("Cut the log?", abort=True, err=as_json)
        kept = cutter.cut(plan)
    if as_json:
        lost = [{**asdict(one), "source": _named(settings.name, one.source)} for one in plan.lost]
        echo_json({"name": settings.name, **asdict(plan), "lost": lost, "kept_in": str(kept)})
        return
    if yes:
        echo_lines(lines)
    echo(f"cut; the part that was cut off is kept in {kept}, and can be read like any log")


def _judged(cutter: LogCutter, name: str, sequence_id: int, *, force: bool) -> CutPlan:
    """Return the plan of a cut. Raises CutRefusedError; if --force would help, it says what that would do."""
    try:
        return cutter.plan(sequence_id, force=force)
    except CutRefusedError as error:
        if force:
            raise
        try:
            lines = _plan_lines(name, cutter.plan(sequence_id, force=True))
        except CutRefusedError:
            raise error from None
        raise CutRefusedError(f"{error}; with --force {'; '.join(line.strip() for line in lines)}") from None


def _plan_lines(name: str, plan: CutPlan) -> Iterator[str]:
    records = f"records {plan.sequence_id} to {plan.last_sequence_id}"
    if plan.last_sequence_id < plan.sequence_id:
        records = "no record"
    elif plan.last_sequence_id == plan.sequence_id:
        records = f"record {plan.sequence_id}"
    unreadable = f", {plan.records_damaged} of them damaged or missing" if plan.records_damaged else ""
    yield f"this cuts {records} off the log of {name}{unreadable}, and keeps them beside it"
    if plan.first_damaged is None and plan.records_readable:
        yield "none of them is damaged"
    elif plan.first_damaged is not None and plan.first_damaged > plan.sequence_id:
        yield f"the first damaged record is {plan.first_damaged}: the records before it could be kept"
    if plan.checkpoint_ids:
        yield f"checkpoints cut off as well: {', '.join(map(str, plan.checkpoint_ids))}"
    replayed = plan.sequence_id - 1 - plan.recovery_sequence_id
    yield (
        f"{name} then recovers from checkpoint {plan.recovery_checkpoint_id} (after record"
        f" {plan.recovery_sequence_id}), replays {replayed} records, and has the state after record"
        f" {plan.sequence_id - 1}"
    )
    if plan.lost:
        yield "lost messages, because their senders count them as received:"
        for one in plan.lost:
            yield f"  {_lost_text(one)}"
    else:
        yield "no message is lost"


def _lost_text(lost: LostMessages) -> str:
    if lost.source == IMPULSES:
        what = "impulses to itself"
    elif lost.source == ONESELF:
        what = "its calls to itself"
    elif is_outside(lost.source):
        what = f"requests of client {lost.source.removeprefix(CLIENTS)!r}"
    else:
        what = f"from {lost.source}"
    if lost.first_position is None:
        return f"{what}: perhaps some up to position {lost.last_position}; unknown, because the records are damaged"
    messages = counted(lost.last_position - lost.first_position + 1, "message")
    return f"{what}: {messages}, positions {lost.first_position} to {lost.last_position}"


def _named(name: str, source: str) -> str:
    return name if source == ONESELF else source


# skip: an operator's verdict on a message that stops an app, whether the instance runs or not.


@click.command()
@name_argument
@click.argument("message", metavar="SEQ:INDEX", callback=message_id)
@click.option("--reason", required=True, metavar="TEXT", help="Reason, also sent to callers that wait for the answer.")
@click.option("--handled", is_flag=True, help="NAME is stopped, and has handled the message: see above.")
@pass_registry
def skip(registry: Registry, name: str, message: tuple[int, int], reason: str, handled: bool) -> None:
    """Skip one message of NAME's log: its call fails and changes nothing.

    SEQ:INDEX is the record and the message's index in it, from 0 ('immortal log show NAME'). The message must be after
    the last checkpoint: earlier ones are in the state already. If the message is an answer, or the result of an effect,
    the handler that waits for it gets a failure instead.

    If NAME has handled the message, but can't save its state since then, the calls that it made then stay sent. A
    running instance knows this; for a stopped one, give --handled.
    """
    settings = settings_with_log(registry, name)
    if not reason.strip() or len(reason) > TEXT_CHARACTERS_MAX:
        raise click.UsageError(
            f"--reason has {len(reason)} characters: expected 1 to {TEXT_CHARACTERS_MAX}, not all blank"
        )
    is_live = _skip_live(settings, *message, reason)
    if not is_live:
        _skip_stopped(settings, *message, reason, handled=handled)
    echo(f"{name}: message {message[1]} of record {message[0]} is skipped")
    if not is_live:
        echo(f"if the app had handled it, 'immortal verify {name}' shows what the replay now does differently")


def _skip_live(settings: InstanceSettings, sequence_id: int, index: int, reason: str) -> bool:
    """Skip the message in a running coordinator; return False if none runs."""
    if control.running(settings.folder) is None:
        return False
    request = {"sequence_id": sequence_id, "message_index": index, "reason": reason, "who": operator_name()}
    try:
        answer = ask_coordinator(settings, "skip", request)
    except control.NotRunningError:
        return False  # it stopped just now
    if not answer.get("skipped"):
        raise FailedError(f"the coordinator's answer is {answer}")
    return True


def _skip_stopped(settings: InstanceSettings, sequence_id: int, index: int, reason: str, *, handled: bool) -> None:
    if handled and (state := check_state_is_savable(settings)).message != (sequence_id, index):
        known = state.problem or state.note or "its state can be saved"
        raise FailedError(
            f"message {index} of record {sequence_id} is not why the state of {settings.name!r} can't be saved: {known}"
        )
    with closing(own_logs.open_log(settings)) as store:
        verdict = _skip_verdict(store, settings.name, sequence_id, index, reason)
        if handled:
            last = store.summary().last_sequence_id
            verdict = replace(verdict, kind=VerdictKind.TAKEN_BACK, behind=last)
        what = f"skipped message {index} of record {sequence_id}: {reason}"
        entry = AuditEntry(time.time_ns(), operator_name(), what)
        store.commit(Transaction(verdicts=[verdict], audit=[entry]))


def _skip_verdict(store: LogStore, name: str, sequence_id: int, index: int, reason: str) -> Verdict:
    """Return the verdict on a skipped message. Raises FailedError if that message can't be skipped."""
    summary = store.summary()
    _require_replayed(summary, name, sequence_id)
    given = next((one for one in summary.verdicts if one.key == (sequence_id, index, 0, 0)), None)
    if given is not None:
        raise FailedError(f"message {index} of record {sequence_id} has a verdict already: {given.kind.name.lower()}")
    content = record_of(store.read(sequence_id, 1)[0]).content
    message = message_at(content, index)
    if message is None:
        raise FailedError(f"record {sequence_id} has no message {index}: messages are counted from 0")
    is_initial = any(batch.message_type == MessageType.INITIAL_MESSAGE for batch in batches(content))
    rpc = None if is_initial else rpc_of(message)
    if rpc is None:
        what = "the initial message, which makes the first state" if is_initial else "not a call"
        raise FailedError(f"message {index} of record {sequence_id} is {what}: only calls can be skipped")
    caller = waiting_caller(rpc)
    return Verdict(
        sequence_id,
        index,
        VerdictKind.SKIPPED,
        text=reason,
        method=f"method {rpc.method_id}" if rpc.kind == RpcKind.CALL else f"an answer of method {rpc.method_id}",
        caller=None if caller is None else caller[0],
        message=message if len(message) <= LETTER_SIZE_BYTES_MAX else b"",
    )


def _require_replayed(summary: LogSummary, name: str, sequence_id: int) -> None:
    if not summary.checkpoints:
        raise FailedError(f"{name!r} has no checkpoint yet: there is nothing to recover from")
    newest = summary.checkpoints[-1]
    first, last = newest.sequence_id + 1, summary.last_sequence_id
    if first <= sequence_id <= last:
        return
    replayed = f"records {first} to {last}" if first <= last else "no record"
    raise FailedError(
        f"record {sequence_id} is not one that {name!r} would replay: after its checkpoint {newest.checkpoint_id} there"
        f" {'is' if first > last else 'are'} {replayed}"
    )


# Check of an instance's state: a live one reports if it can be saved; a stopped one's log is replayed.


STILL_S_MAX = 60.0


class SavableStateCheck(Struct, frozen=True):
    """Result of a check that a state can be saved. ``problem``: why it can't; ``note``: why that is unknown; "": none.
    ``message``: since which one, (sequence ID, index). ``divergence``: where the app makes other calls than it did."""

    problem: str = ""
    note: str = ""
    divergence: str = ""
    message: tuple[int, int] | None = None


def _patient(advance: Advance) -> Advance:
    """Wrap ``advance`` so that a replay without progress for STILL_S_MAX raises ReplayError: a handler can loop."""
    seen, since_s = -1, time.monotonic()

    def patient(records: int, total: int | None) -> None:
        nonlocal seen, since_s
        if records != seen:
            seen, since_s = records, time.monotonic()
        elif time.monotonic() - since_s > STILL_S_MAX:
            raise ReplayError(f"its replay has made no progress for {STILL_S_MAX:g} s, after {records} records")
        advance(records, total)

    return patient


def check_state_is_savable(settings: InstanceSettings) -> SavableStateCheck:
    """Check that a state can be saved. Raises nothing: obstacles are notes, except an unknown app."""
    try:
        if control.running(settings.folder) is not None:
            status = control.query(settings.folder, "status")
            unsaved = status.get("unsaved") or {}
            since = f" since record {unsaved['record']}" if unsaved.get("record") is not None else ""
            return SavableStateCheck(f"its state can't be saved{since}: {unsaved['since']}" if unsaved else "")
        with own_logs.open_reader(settings) as reader:
            summary = reader.summary()
            if not summary.extensions or not summary.checkpoints:
                return SavableStateCheck()  # no state yet, or an app that knows only the base protocol
            try:
                app = default_app(settings.name, settings.app, summary, summary.versions[-1].version)
            except ReplayError:
                return SavableStateCheck()
            with progress_bar("checking the state") as advance:
                command, progress = AppCommand.of(app, settings=settings), _patient(advance)
                sink = ProvingSink(reader, route := plan_route(ReplayPlan(), reader, summary))
                result = run_replay(reader, route, command, sink, progress=progress)
                stops = settings.replay_check in (None, "strict")
                return SavableStateCheck(divergence=sink.problem(settings.name, result) if stops else "")
    except StateUnsavedError as error:
        return SavableStateCheck(str(error), message=(error.unsaved.sequence_id, error.unsaved.message_index))
    except (ImmortalError, OSError) as error:
        reason = str(error).partition("\n")[0]
        return SavableStateCheck(note=f"it is not known whether its state can be saved: {reason}")
