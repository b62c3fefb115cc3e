"""skip: an operator's verdict on a message that stops an app, whether the instance runs or not."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from immortal.coordinator.cli.common import message_id, name_argument, operator_name, pass_registry, settings_with_log
from immortal.coordinator.config import InstanceSettings
from immortal.coordinator.instances.registry import Registry
from immortal.coordinator.operator import control
from immortal.protocol.command_line import FailedError, echo

if TYPE_CHECKING:
    from immortal.coordinator.core.interfaces import LogStore, LogSummary
    from immortal.protocol.verdicts import Verdict


@click.command()
@name_argument
@click.argument("message", metavar="SEQ:INDEX", callback=message_id)
@click.option("--reason", required=True, metavar="TEXT", help="Why: whoever waits for the answer is told, too.")
@click.option("--handled", is_flag=True, help="Of a stopped NAME: its state can't be saved for that message.")
@pass_registry
def skip(registry: Registry, name: str, message: tuple[int, int], reason: str, handled: bool) -> None:
    """Let NAME pass over one message of its log: the call fails, the state is as if it had never come.

    SEQ:INDEX is its record, and which message of that record it is, from 0 ('immortal log show NAME'). Only a message
    behind the last checkpoint can be skipped: what was before is in the state already. One for which the state can't be
    saved was handled, and what was said then stays: a running instance knows, for a stopped one say --handled.
    Where it is the answer to a call, or the result of an effect, whoever waits for it gets a failure in its place.
    """
    from immortal.protocol.verdicts import TEXT_CHARACTERS_MAX

    settings = settings_with_log(registry, name)
    if not reason.strip() or len(reason) > TEXT_CHARACTERS_MAX:
        raise click.UsageError(
            f"--reason has {len(reason)} characters: 1 to {TEXT_CHARACTERS_MAX} were expected, not all of them blank"
        )
    is_live = _skip_live(settings, *message, reason)
    if not is_live:
        _skip_stopped(settings, *message, reason, handled=handled)
    echo(f"{name}: message {message[1]} of record {message[0]} is skipped")
    if not is_live:
        echo(f"where the app had handled it, 'immortal verify {name}' says what its replay now does otherwise")


def _skip_live(settings: InstanceSettings, sequence_id: int, index: int, reason: str) -> bool:
    """Whether a running coordinator has done it."""
    if control.running(settings.folder) is None:
        return False
    request = {"sequence_id": sequence_id, "message_index": index, "reason": reason, "who": operator_name()}
    try:
        answer = control.query(settings.folder, "skip", argument=request)
    except control.NotRunningError:
        return False  # it stopped just now
    except control.RefusedError as error:
        raise FailedError(error.reason) from None
    if not answer.get("skipped"):
        raise FailedError(str(answer.get("error", f"the coordinator's answer is {answer}")))
    return True


def _skip_stopped(settings: InstanceSettings, sequence_id: int, index: int, reason: str, *, handled: bool) -> None:
    from msgspec.structs import replace

    from immortal.coordinator.cli.saving import look_at_state
    from immortal.coordinator.core.interfaces import AuditEntry, Transaction
    from immortal.coordinator.instances import own_logs
    from immortal.protocol.verdicts import VerdictKind

    if handled and (state := look_at_state(settings)).message != (sequence_id, index):
        known = state.problem or state.note or "its state can be saved"
        raise FailedError(
            f"message {index} of record {sequence_id} is not what {settings.name!r} can't be saved for: {known}"
        )
    store = own_logs.open_log(settings)
    try:
        verdict = _verdict(store, settings.name, sequence_id, index, reason)
        if handled:
            last = store.summary().last_sequence_id
            verdict = replace(verdict, kind=VerdictKind.TAKEN_BACK, behind=last)
        entry = AuditEntry(
            time.time_ns(), operator_name(), f"skipped message {index} of record {sequence_id}: {reason}"
        )
        store.commit(Transaction(verdicts=[verdict], audit=[entry]))
    finally:
        store.close()


def _verdict(store: LogStore, name: str, sequence_id: int, index: int, reason: str) -> Verdict:
    """Raises FailedError where that message can't be skipped."""
    from immortal.coordinator.cli.messages import rpc_of, waiting_caller
    from immortal.coordinator.log.contents import batches, message_at, record_of
    from immortal.protocol.messages import MessageType, RpcKind
    from immortal.protocol.verdicts import LETTER_SIZE_BYTES_MAX, Verdict, VerdictKind

    summary = store.summary()
    _require_replayed(summary, name, sequence_id)
    given = next((one for one in summary.verdicts if one.key == (sequence_id, index, 0, 0)), None)
    if given is not None:
        raise FailedError(f"message {index} of record {sequence_id} has a verdict already: {given.kind.name.lower()}")
    content = record_of(store.read(sequence_id, 1)[0]).content
    message = message_at(content, index)
    if message is None:
        raise FailedError(f"record {sequence_id} has no message {index}: they are counted from 0")
    is_initial = any(batch.message_type == MessageType.INITIAL_MESSAGE for batch in batches(content))
    rpc = None if is_initial else rpc_of(message)
    if rpc is None:
        what = "the initial message, without which there is no state" if is_initial else "no call"
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
        raise FailedError(f"{name!r} has no checkpoint yet: there is nothing that it could go on from")
    newest = summary.checkpoints[-1]
    first, last = newest.sequence_id + 1, summary.last_sequence_id
    if first <= sequence_id <= last:
        return
    replayed = f"records {first} to {last}" if first <= last else "no record"
    raise FailedError(
        f"record {sequence_id} is none that {name!r} would handle again: behind its checkpoint {newest.checkpoint_id}"
        f" there {'is' if first > last else 'are'} {replayed}"
    )
