"""Operators' actions on failed messages: drop or retry dead letters, and skip a message that stops the app.

Each action is written to the log's audit list, and answered once it is durable.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from immortal.coordinator.core import events as ev
from immortal.coordinator.core import notices
from immortal.coordinator.core.effects import CloseApp, OperatorAnswered, ReadLetters
from immortal.coordinator.core.errors import AppProtocolError
from immortal.coordinator.core.failures.call_failure import CallFailures
from immortal.coordinator.core.failures.unsaved_state import UnsavedState
from immortal.coordinator.core.formatting import format_counted_method
from immortal.coordinator.core.group_commit import Group
from immortal.coordinator.core.input.back_pressure import Impulses
from immortal.coordinator.core.interfaces import ONESELF, AuditEntry, Letter, Transaction
from immortal.coordinator.core.life_cycle.session import Phase
from immortal.coordinator.core.state import CoreState
from immortal.protocol.client_frames import split_caller
from immortal.protocol.errors import ImmortalError, RemoteProtocolError
from immortal.protocol.messages import (
    IncomingRpc,
    MessageType,
    RpcKind,
    RpcType,
    decode_incoming_rpc,
    decode_message,
    encode_incoming_rpc,
)
from immortal.protocol.readers import Message
from immortal.protocol.verdicts import LETTER_SIZE_BYTES_MAX, Cause, MessageKey, Verdict, VerdictKind

NAMED_MAX = 20  # letters that one audit entry names
_VERSION_CAUSES = (Cause.METHOD, Cause.ARGUMENTS)  # causes of a refusal that another version may not repeat


class _RefusedError(ImmortalError):
    """Raised for an operator's request that can't be carried out; the text says why."""


@dataclass(slots=True, eq=False, repr=False)
class OperatorActions:
    """Carries out operators' actions on failed messages, and answers them."""

    state: CoreState
    call_failures: CallFailures
    impulses: Impulses
    unsaved_state: UnsavedState
    _upgraded: bool = False  # this session's app has upgraded the log, durably
    _retries_refused: bool = False  # ... and asks for the letters that were refused before

    def _answer(self, ticket: int, token: object, answer: Mapping[str, object]) -> None:
        """Answer the operator once the commit ``ticket`` is durable; 0: now."""
        if ticket:
            self.state.answer_after(ticket, OperatorAnswered(token, answer))
        else:
            self.state.effects.append(OperatorAnswered(token, answer))

    # --- dead letters ------------------------------------------------------------------------------------------------

    def drop(self, event: ev.LettersDropped) -> None:
        kept = self.call_failures.verdicts.letters
        keys = [key for key in (kept if event.keys is None else dict.fromkeys(event.keys)) if key in kept]
        if not keys:
            self._answer(0, event.token, {"dropped": 0})
            return
        group = self.state.log.append_outside_record(0)
        for key in keys:
            self.call_failures.verdicts.remove_letter(key, group.transaction)
        self._audit(group.transaction, event.operator, f"dropped {_format_letters(keys)}")
        self._answer(group.ticket, event.token, {"dropped": len(keys)})

    def retry(self, event: ev.LettersRetried) -> None:
        ticket, refused = self._retry_all(event.letters, event.operator)
        answer = {"retried": len(event.letters) - len(refused), "refused": refused}
        self._answer(ticket, event.token, answer)

    def _retry_all(self, letters: Mapping[MessageKey, Letter | None], operator: str) -> tuple[int, dict[str, str]]:
        """Log each letter as an impulse to oneself, in the transaction that removes the letter.

        Returns the last commit's ticket, and the reasons for letters that can't be retried.
        """
        retried: dict[int, tuple[Group, list[MessageKey]]] = {}  # by ticket
        refused: dict[str, str] = {}
        for key, letter in letters.items():
            try:
                call = self._retry_letter(key, letter)
            except ImmortalError as error:
                refused[_format_key(key)] = str(error)
                continue
            group = self.impulses.log_own(1, call)
            self.call_failures.verdicts.remove_letter(key, group.transaction)
            retried.setdefault(group.ticket, (group, []))[1].append(key)
        for group, keys in retried.values():
            self._audit(group.transaction, operator, f"retried {_format_letters(keys)}")
        return max(retried, default=0), refused

    def _retry_letter(self, key: MessageKey, letter: Letter | None) -> bytes:
        """Return the letter's call as an impulse. Raises _RefusedError, RemoteProtocolError."""
        if letter is None or key not in self.call_failures.verdicts.letters:
            raise _RefusedError("there is no such letter")
        if self.state.log_capacity.full_reason:
            raise _RefusedError(self.state.log_capacity.full_reason)
        message = letter.verdict.message
        if not message:
            raise _RefusedError("its message was too large to be kept")
        rpc = _rpc(message)
        if rpc.kind != RpcKind.CALL:
            raise _RefusedError("it is an answer, not a call")
        if rpc.method_id < 0:
            raise _RefusedError(f"it calls method {rpc.method_id}: negative ones are the SDK's own")
        arguments = split_caller(rpc.arguments)[1] if rpc.rpc_type == RpcType.ASYNC else rpc.arguments
        return encode_incoming_rpc(rpc.method_id, RpcType.IMPULSE, arguments)

    # --- an upgrade that retries letters refused before it -----------------------------------------------------------

    def app_lost(self) -> None:
        self._upgraded = self._retries_refused = False

    def upgraded(self) -> None:
        """Note that the app's upgrade is durable."""
        self._upgraded = True
        self._read_refused()

    def retry_refused(self, message: Message) -> None:
        """Note that the app asks for the letters that were refused before. Raises AppProtocolError."""
        if not self._upgraded and self.state.session.phase is not Phase.COMPLETING_UPGRADE:
            raise AppProtocolError("the app sent a RetryRefused, which belongs behind the checkpoint of an upgrade")
        self._retries_refused = True
        self._read_refused()

    def _read_refused(self) -> None:
        if self._upgraded and self._retries_refused and self.call_failures.verdicts.letters:
            self._retries_refused = False
            self.state.effects.append(ReadLetters(list(self.call_failures.verdicts.letters)))

    def letters_read(self, event: ev.LettersRead) -> None:
        state = self.state
        for problem in event.problems:
            state.report(notices.LetterUnreadable(problem))
        letters = {one.verdict.key: one for one in event.letters if one.verdict.cause in _VERSION_CAUSES}
        version = state.versions.current
        _, refused = self._retry_all(letters, f"the upgrade to version {version}")
        if count := len(letters) - len(refused):
            state.report(notices.LettersRetried(version, count))
        for key, reason in refused.items():
            state.report(notices.LetterNotRetried(version, key, reason))

    # --- a message that stops the app --------------------------------------------------------------------------------

    def skip(self, event: ev.MessageSkipped) -> None:
        """Skip a message. A connected app must exit; the next one recovers with the verdict."""
        message = f"message {event.message_index} of record {event.sequence_id}"
        if (
            self.unsaved_state.is_failed_message((event.sequence_id, event.message_index, 0, 0))
            and event.message is not None
        ):
            found = replace(self._skipped(event), kind=VerdictKind.TAKEN_BACK, message=clipped_letter(event.message))
            self.unsaved_state.request_take_back(found, event.operator, event.token)
            return
        try:
            self._require_skippable(event, message)
            group = self.call_failures.log_verdict(self._skipped(event))
            if group is None:
                raise _RefusedError(f"{message} has a verdict already: the app passes it over")
        except _RefusedError as error:
            self._answer(0, event.token, {"refused": str(error)})
            return
        what = f"skipped {message}: {event.reason}"
        self._audit(group.transaction, event.operator, what)
        self._answer(group.ticket, event.token, {"skipped": True})
        self.call_failures.clear_suspect(event.sequence_id)
        self.state.report(notices.MessageSkipped(event.operator, what))
        session = self.state.session
        if session.phase is not Phase.WAITING:
            session.refused = True
            self.state.effects.append(CloseApp())

    def _require_skippable(self, event: ev.MessageSkipped, message: str) -> None:
        """Check that the app can't have handled the message successfully, as others may have seen its outputs. Raises
        _RefusedError."""
        state = self.state
        call_failures, name = self.call_failures, state.name
        sequence_id, last = event.sequence_id, state.log.durable_sequence_id
        checkpoint = state.checkpoints.last
        if not 0 <= sequence_id <= last:
            raise _RefusedError(f"there is no record {sequence_id}: the log of {name!r} ends with record {last}")
        if checkpoint is not None and sequence_id <= checkpoint.sequence_id:
            raise _RefusedError(
                f"record {sequence_id} was handled: the last checkpoint was taken behind record "
                f"{checkpoint.sequence_id}, only messages of later records can be skipped"
            )
        if event.message is None:
            raise _RefusedError(f"record {sequence_id} has no message {event.message_index}")
        session = state.session
        is_connected = session.phase is not Phase.WAITING
        has_it = is_connected and sequence_id <= session.fed_sequence_id
        if has_it and not call_failures.poison_guard.is_handling(sequence_id, event.message_index):
            at = call_failures.poison_guard.current_message_text()
            raise _RefusedError(
                f"an app of {name!r} is connected, and may have handled {message} well"
                f"{f' (it is at {at})' if at else ''}: stop the app first, if it does not end by itself"
            )

    def _skipped(self, event: ev.MessageSkipped) -> Verdict:
        message = event.message or b""
        method, caller = "", None
        try:
            rpc = _rpc(message)
            method = format_counted_method(rpc.method_id, rpc.kind, ONESELF, self.call_failures.methods)
            if rpc.kind == RpcKind.CALL and rpc.rpc_type == RpcType.ASYNC:
                caller = split_caller(rpc.arguments)[0]
        except RemoteProtocolError:
            pass  # it can't be decoded; that can be why it is skipped
        return Verdict(
            event.sequence_id,
            event.message_index,
            VerdictKind.SKIPPED,
            text=event.reason,
            method=method,
            caller=caller,
            message=clipped_letter(message) if caller is None else b"",
        )

    def _audit(self, transaction: Transaction, operator: str, action: str) -> None:
        transaction.audit.append(AuditEntry(self.state.now_ns, operator, action))


def clipped_letter(message: bytes) -> bytes:
    """Return a message as a dead letter keeps it: whole, or empty if it is too large."""
    return message if len(message) <= LETTER_SIZE_BYTES_MAX else b""


def _rpc(message: bytes) -> IncomingRpc:
    """Decode one RPC message. Raises RemoteProtocolError."""
    message_type, start, end = decode_message(message)
    if message_type != MessageType.RPC or end != len(message):
        raise RemoteProtocolError(f"it is a message of type {message_type}, not one RPC")
    return decode_incoming_rpc(message, start, end)


def _format_key(key: MessageKey) -> str:
    return f"{key[0]}:{key[1]}"


def _format_letters(keys: Collection[MessageKey]) -> str:
    named = ", ".join(map(_format_key, list(keys)[:NAMED_MAX]))
    more = f" and {len(keys) - NAMED_MAX} more" if len(keys) > NAMED_MAX else ""
    return f"{len(keys)} dead letter{'s' if len(keys) > 1 else ''}: {named}{more}"
