"""recover: what a recovery would do, and cutting a log off where a damaged record keeps it from going on."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click
from msgspec.structs import asdict

from immortal.coordinator.cli.common import name_argument, pass_registry, settings_with_log
from immortal.coordinator.config import InstanceSettings
from immortal.coordinator.core.errors import LogLockedError
from immortal.coordinator.core.interfaces import IMPULSES, ONESELF, is_outside
from immortal.coordinator.instances.registry import Registry
from immortal.coordinator.operator import control
from immortal.protocol.client import CLIENTS
from immortal.protocol.command_line import echo, echo_json, json_option

if TYPE_CHECKING:
    from immortal.coordinator.log.cut import LogCutter
    from immortal.coordinator.log.cut_plan import CutPlan, LostMessages
    from immortal.coordinator.log.verify import LogVerification

FINDINGS_SHOWN_MAX = 20


@click.command()
@name_argument
@click.option(
    "--truncate-at",
    "sequence_id",
    type=click.IntRange(min=0),
    metavar="SEQ",
    help="Cut the log off at this record; what is cut is kept beside it.",
)
@click.option("--force", is_flag=True, help="Cut also where recovery does not need that record.")
@click.option("--yes", is_flag=True, help="Cut without asking.")
@click.option("--no-replay", is_flag=True, help="Do not replay the log to see whether the state can be saved.")
@json_option
@pass_registry
def recover(
    registry: Registry, name: str, sequence_id: int | None, force: bool, yes: bool, no_replay: bool, as_json: bool
) -> None:
    """Say what a recovery of NAME would do, what is damaged and what helps. It changes nothing.

    Where it can recover, its log is replayed into a copy of its app, to see whether the state can be saved.

    With --truncate-at it cuts the log off there, so that the instance recovers to the state before that record: the
    last resort, where no copy of the log is left. The coordinator must be stopped.

    The exit status is 0 if the instance can recover, or was cut; 1 if not.
    """
    settings = settings_with_log(registry, name)
    if sequence_id is None:
        if force or yes:
            raise click.UsageError("--force and --yes are for --truncate-at")
        sys.exit(_check(settings, as_json, tries=not no_replay))
    _cut(settings, sequence_id, force=force, yes=yes, as_json=as_json)


# --- what a recovery would do ----------------------------------------------------------------------------------------


def _check(settings: InstanceSettings, as_json: bool, *, tries: bool) -> int:
    from immortal.coordinator.cli.saving import look_at_state
    from immortal.coordinator.instances import own_logs

    verification = own_logs.verify(settings)
    findings = list(verification.findings())
    can_recover = not verification.fatal
    verdict = _verdict(settings.name, verification)
    remedy = None if can_recover else _remedy(settings, verification)
    state = look_at_state(settings) if can_recover and tries else None
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
                "unsaved": (state and state.problem) or None,
            }
        )
    else:
        if state is not None and state.problem:
            verdict = verdict.replace(" can recover: it", f" can recover, but {state.problem}; it")
        echo(verdict)
        if state is not None and state.note:
            echo(f"note: {state.note}")
        for finding in findings[:FINDINGS_SHOWN_MAX]:
            echo(f"{finding.severity.value}: {finding.message}")
        if len(findings) > FINDINGS_SHOWN_MAX:
            echo(f"... and {len(findings) - FINDINGS_SHOWN_MAX} more: 'immortal log verify {settings.name}'")
        if remedy is not None:
            for line in remedy.split("\n"):
                echo(line)
    return 0 if can_recover else 1


def _stop(verification: LogVerification) -> int | None:
    """The record at which a recovery stops; None if it stops at none."""
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
    from immortal.coordinator.instances import own_logs
    from immortal.coordinator.log.cut import LogCutter
    from immortal.coordinator.log.cut_plan import CutRefusedError

    stop = _stop(verification)
    if stop is None or verification.identity is None:
        return "what helps: restore the log from a copy"
    command = f"'immortal recover {settings.name} --truncate-at {stop}'"
    try:
        with LogCutter(settings.log, settings.name, own_logs.read_keys(settings)) as cutter:
            plan = cutter.plan(stop)
    except CutRefusedError as error:
        return f"what helps: restore the log from a copy; {command} would not: {error}"
    except LogLockedError:
        plan_lines = ["its coordinator runs: stop it to see what that would do"]
    else:
        plan_lines = list(_plan_lines(settings.name, plan))
    return "\n".join(
        (
            f"what helps: restore the log from a copy; if there is none, {command} gives up record {stop} and all"
            " behind it, and asks before it cuts:",
            *(f"  {line}" for line in plan_lines),
        )
    )


# --- cutting ---------------------------------------------------------------------------------------------------------


def _cut(settings: InstanceSettings, sequence_id: int, *, force: bool, yes: bool, as_json: bool) -> None:
    from immortal.coordinator.instances import own_logs
    from immortal.coordinator.log.cut import LogCutter

    control.refuse_running(settings.folder)
    with LogCutter(settings.log, settings.name, own_logs.read_keys(settings)) as cutter:
        plan = _judged(cutter, settings.name, sequence_id, force=force)
        lines = list(_plan_lines(settings.name, plan))
        if not yes:
            for line in lines:
                echo(line, err=as_json)
            click.confirm("Cut it off?", abort=True, err=as_json)
        kept = cutter.cut(plan)
    if as_json:
        lost = [{**asdict(one), "source": _named(settings.name, one.source)} for one in plan.lost]
        echo_json({"name": settings.name, **asdict(plan), "lost": lost, "kept_in": str(kept)})
        return
    if yes:
        for line in lines:
            echo(line)
    echo(f"cut; what was cut off is kept in {kept}, a log that can be read as any other")


def _judged(cutter: LogCutter, name: str, sequence_id: int, *, force: bool) -> CutPlan:
    """Raises CutRefusedError; where --force would help, it says what that would do."""
    from immortal.coordinator.log.cut_plan import CutRefusedError

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
        yield f"the first damaged one is record {plan.first_damaged}: those before it could be kept"
    if plan.checkpoint_ids:
        yield f"checkpoints cut off as well: {', '.join(map(str, plan.checkpoint_ids))}"
    replayed = plan.sequence_id - 1 - plan.recovery_sequence_id
    yield (
        f"{name} then recovers from checkpoint {plan.recovery_checkpoint_id} (after record"
        f" {plan.recovery_sequence_id}), {replayed} records behind it, to the state after record {plan.sequence_id - 1}"
    )
    if plan.lost:
        yield "lost to it, for their senders count them as received:"
        for one in plan.lost:
            yield f"  {_lost_text(one)}"
    else:
        yield "no message is lost with them"


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
        return f"{what}: perhaps some up to position {lost.last_position}; the damaged records can't tell"
    count = lost.last_position - lost.first_position + 1
    messages = "1 message" if count == 1 else f"{count} messages"
    return f"{what}: {messages}, positions {lost.first_position} to {lost.last_position}"


def _named(name: str, source: str) -> str:
    return name if source == ONESELF else source
