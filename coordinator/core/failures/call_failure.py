"""Call failures: verdicts of the app, the coordinator and operators on messages, and who is told about them.

`poison_guard.py` finds the message that ends the app's process; `dead_letters.py` has the operator's actions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from immortal.coordinator.core import notices
from immortal.coordinator.core.effects import CloseApp
from immortal.coordinator.core.errors import AppProtocolError
from immortal.coordinator.core.failures.poison_guard import (
    KNOWN_MAX,
    CallerPenalties,
    PoisonGuard,
    format_message_position,
)
from immortal.coordinator.core.formatting import Methods
from immortal.coordinator.core.group_commit import Group
from immortal.coordinator.core.interfaces import NO_SUSPECT, UNKNOWN, LogSummary, Suspect, Transaction
from immortal.coordinator.core.life_cycle.session import SENDS_CALLS, WORKS
from immortal.coordinator.core.state import CoreState
from immortal.protocol.messages import MessageType
from immortal.protocol.readers import Message
from immortal.protocol.verdicts import (
    LETTER_SIZE_BYTES_MAX,
    TEXT_CHARACTERS_MAX,
    TRACE_CHARACTERS_MAX,
    Cause,
    Handling,
    MessageKey,
    Verdict,
    VerdictKind,
    decode_handling,
    decode_verdict,
    encode_careful,
    encode_verdicts,
)


@dataclass(slots=True, eq=False, repr=False)
class CallFailures:
    """Verdicts on messages of one instance, and the messages that report them to the app."""

    state: CoreState
    verdicts: Verdicts
    penalties: CallerPenalties
    methods: Methods = field(default_factory=dict)  # of the app that last connected
    forbidden: Counter[str] = field(default_factory=Counter)  # refused calls by caller, since the start
    nested: Counter[str] = field(default_factory=Counter)  # too deeply nested messages by caller
    _suspect: Suspect = NO_SUSPECT  # as the log has it, or will have it
    _summary: LogSummary | None = None  # of the log that the session replays
    _settled_sequence_id: int = -1  # the session began after this record, or has a checkpoint of it
    _adopted_sequence_id: int = -1  # last record of an adopted follower's checkpoint, which has its messages' results
    _verdicts_sent: bool = False  # this session's app has its verdicts
    _leaving: bool = False
    _unlogged: dict[MessageKey, Verdict] = field(default_factory=dict)  # a following app's verdicts, not in the log yet
    _awaited: set[MessageKey] = field(default_factory=set)  # logged verdicts that the following app must still reach
    poison_guard: PoisonGuard = field(init=False)

    def __post_init__(self) -> None:
        self.poison_guard = PoisonGuard(NO_SUSPECT, self.state.limits.kills_max)

    def load(self, summary: LogSummary) -> None:
        """Load the suspect and the verdicts of the log."""
        self.poison_guard.suspect = self._suspect = summary.suspect
        self.verdicts.load(summary)
        if self.state.write_lease.follows:
            self.verdicts.add_known(self._unlogged.values())

    def session_began(self, summary: LogSummary, settled_sequence_id: int) -> None:
        """Start a session at a checkpoint after the record ``settled_sequence_id``."""
        self._summary = summary
        self._settled_sequence_id = settled_sequence_id
        self._verdicts_sent = self._leaving = False
        self._adopted_sequence_id = -1
        self._awaited.clear()

    def send_verdicts(self) -> None:
        """Tell the app, before its first record, which messages to skip and where to be careful."""
        if self._verdicts_sent or self._summary is None:
            return
        summary, self._summary = self._summary, None
        extensions = self.state.session.extensions
        if MessageType.VERDICTS in extensions:
            self._verdicts_sent = True
            for message in encode_verdicts(self.verdicts.unsettled(self._settled_sequence_id, summary)):
                self.state.outbox.send_control(MessageType.VERDICTS, message)
        if MessageType.CAREFUL in extensions:
            careful = self.poison_guard.session_began(self._settled_sequence_id)
            self._log_suspect()
            if careful is not None:
                self.state.outbox.send_control(MessageType.CAREFUL, encode_careful(careful))

    # --- a following session -----------------------------------------------------------------------------------------

    def log_grew(self, summary: LogSummary) -> bool:
        """Send the following app new verdicts on later records. Return False if one concerns a record that it already
        has: then it must start over."""
        fed_sequence_id = self.state.session.fed_sequence_id
        sent: list[Verdict] = []
        for verdict in summary.verdicts:
            key = verdict.key
            own = self._unlogged.pop(key, None)
            if own is not None and own.kind is not VerdictKind.TAKEN_BACK:
                sent.append(own)  # tells the app that the writer has reported it
            if self.verdicts.get(key) is not None or own is not None or key[0] <= self._settled_sequence_id:
                continue
            if key[0] > fed_sequence_id:
                sent.append(verdict)
            elif verdict.kind in OVERRULING or verdict.kind is VerdictKind.TAKEN_BACK:
                return False
            else:
                self._awaited.add(key)  # the app will reach the same verdict by itself
        self._send(sent)
        return True

    def _send(self, verdicts: Sequence[Verdict]) -> None:
        """Send the app these verdicts, unless it will get all verdicts before its first record."""
        if self._verdicts_sent and verdicts:
            for message in encode_verdicts(verdicts):
                self.state.outbox.send_control(MessageType.VERDICTS, message)

    @property
    def agrees_with_writer(self) -> bool:
        """True if the following app has reached exactly the log's verdicts on its messages. Otherwise its state can
        differ from the writer's."""
        return not self._awaited and not self._unlogged

    def agrees_up_to(self, sequence_id: int) -> bool:
        """Return True if the app agrees with the writer about the messages up to the record ``sequence_id``."""
        return not any(key[0] <= sequence_id for key in (*self._awaited, *self._unlogged))

    def forget_unlogged(self) -> None:
        """Forget verdicts of a following app that is gone."""
        self._unlogged = {}

    # --- events of a session -----------------------------------------------------------------------------------------

    def checkpoint_durable(self, sequence_id: int) -> None:
        self._settled_sequence_id = sequence_id
        self.verdicts.forget_until(sequence_id)

    def checkpoint_adopted(self, sequence_id: int) -> None:
        """Note a follower's checkpoint in the log: its app can have handled messages that the own app still handles."""
        self._adopted_sequence_id = sequence_id

    def app_stopped(self, transaction: Transaction) -> None:
        """Clear the suspect: the app has taken its last checkpoint and stops cleanly."""
        self.poison_guard.suspect = NO_SUSPECT
        if self._suspect != NO_SUSPECT:
            self._suspect = transaction.suspect = NO_SUSPECT

    @property
    def _is_leaving(self) -> bool:
        """True if the app exits on purpose: it has said so, or was asked to stop."""
        return self._leaving or self.state.shutdown.is_requested

    def died_at_query(self) -> bool:
        """Return True if the lost app may have died at a query: it had reported no message that it was handling."""
        state = self.state
        is_death = state.session.phase in WORKS and not (self._is_leaving or state.session.refused)
        return is_death and state.write_lease.writes and self.poison_guard.is_idle

    def penalize_caller(self, caller: str, count: int) -> None:
        """Count deaths of the app's process at a call of ``caller``, and hold the caller off after too many."""
        if not caller or not count:
            return
        deaths, hold_off_ns = self.penalties.count_deaths(caller, self.state.now_ns, count)
        if hold_off_ns:
            self.state.report(notices.CallerHeldOff(caller, deaths, hold_off_ns / 1e9))

    def app_lost(self, *, all_read: bool) -> None:
        """Find the suspect after the app's connection has ended. The session is still that of the lost app."""
        session = self.state.session
        may_have_crashed = (
            session.phase in SENDS_CALLS
            and session.fed_sequence_id > self._settled_sequence_id
            and MessageType.CAREFUL in session.extensions
            and not (self._is_leaving or session.refused)
        )
        self._summary = None
        self._verdicts_sent = False
        if not may_have_crashed or not self.state.write_lease.writes:  # a follower's deaths concern only itself
            self.poison_guard.forget()
            return
        verdict = self.poison_guard.app_died(session.fed_sequence_id, all_read=all_read)
        if verdict is not None:
            self._log_killed_verdict(verdict)
        self._log_suspect()

    def _log_killed_verdict(self, verdict: Verdict) -> None:
        where = format_message_position(verdict.sequence_id, verdict.message_index, verdict.caller)
        if self.log_verdict(verdict) is None:
            self.state.report(notices.FailedBefore(verdict.text, where))
            return
        then = "its caller is told" if verdict.caller is not None else f"see 'immortal dead-letters {self.state.name}'"
        self.state.report(notices.NotCalledAgain(verdict.method or "a message", where, verdict.text, then))

    def clear_suspect(self, sequence_id: int) -> None:
        """Clear the suspect because an operator has skipped its message."""
        if self.poison_guard.suspect.sequence_id == sequence_id:
            self.poison_guard.suspect = NO_SUSPECT
            self._log_suspect()

    def _log_suspect(self) -> None:
        if self.poison_guard.suspect != self._suspect and self.state.write_lease.writes:
            self._suspect = self.poison_guard.suspect
            self.state.log.append_outside_record(0).transaction.suspect = self._suspect

    # --- messages of the app -----------------------------------------------------------------------------------------

    def app_reported(self, message: Message) -> None:
        """Handle a Verdict, a Handling or a Leaving. Raises RemoteProtocolError."""
        message_type = message.message_type
        if message_type == MessageType.LEAVING and MessageType.VERDICTS in self.state.session.extensions:
            self._leaving = True
            why = message.data[:TEXT_CHARACTERS_MAX].decode("utf-8", "replace")
            self.state.report(notices.AppLeaves(why))
            return
        if not self._verdicts_sent:
            raise AppProtocolError(
                f"the app sent a message of type {message_type}, which is for apps alone that ask for Verdicts (81) in "
                f"their Hello, and were sent them"
            )
        if message_type == MessageType.VERDICT:
            self._verdict(decode_verdict(message.data))
        else:
            self._handling(decode_handling(message.data))
            self._report_long_handler()

    def _handling(self, handling: Handling) -> None:
        self._require_fed("a Handling", handling.sequence_id)
        self.poison_guard.note_handling(handling, self.state.now_ns)
        self._log_suspect()

    def _require_fed(self, name: str, sequence_id: int) -> None:
        fed_sequence_id = self.state.session.fed_sequence_id
        if sequence_id > fed_sequence_id:
            raise AppProtocolError(
                f"the app sent {name} of record {sequence_id}, it was given the records up to {fed_sequence_id}"
            )

    def _verdict(self, verdict: Verdict) -> None:
        session = self.state.session
        if session.phase not in SENDS_CALLS:
            raise AppProtocolError(f"the app sent a Verdict in the phase {session.phase.value!r}, it has no record")
        self._require_fed("a Verdict on a message", verdict.sequence_id)
        if len(verdict.text) > TEXT_CHARACTERS_MAX:
            raise AppProtocolError(
                f"the app sent a Verdict with a text of {len(verdict.text)} characters, "
                f"at most {TEXT_CHARACTERS_MAX} are allowed"
            )
        self._awaited.discard(verdict.key)
        if verdict.sequence_id <= self._adopted_sequence_id:
            self._start_over(verdict)
        elif self.state.write_lease.writes and not self.state.following:
            self.log_verdict(_clipped(verdict), from_app=True)
        elif self.verdicts.get(verdict.key) is None:
            self._unlogged[verdict.key] = _clipped(verdict)
            self.verdicts.add_known([_clipped(verdict)])
        else:
            self._send([verdict])  # the log already has it

    def _start_over(self, verdict: Verdict) -> None:
        """Drop the app: the log has a checkpoint after that message, from an app for which it did not fail. Nothing
        that this app sent after the verdict was read, so nobody has seen it."""
        where = format_message_position(verdict.sequence_id, verdict.message_index, verdict.caller)
        self.state.report(
            notices.AppBeginsAnew(f"{where} has failed here and not at the standby whose checkpoint the log has by now")
        )
        self.state.session.refused = True
        self.state.effects.append(CloseApp())

    def log_verdict(self, verdict: Verdict, *, from_app: bool = False) -> Group | None:
        """Log a verdict, and hold back all later outputs until it is durable. Return None if the message already has a
        verdict."""
        group = self.verdicts.log_verdict(verdict, from_app=from_app)
        if group is not None:
            self.state.last_verdict_ticket = group.ticket
        return group

    def needs_checkpoint(self) -> bool:
        """Return True if too many verdicts are kept. Then a checkpoint is requested, and no more calls that could be
        refused are accepted before it."""
        full = self.verdicts.count >= self.state.limits.verdicts_max
        self.state.checkpoints.is_requested = self.state.checkpoints.is_requested or full
        return full

    def refuse(
        self, group: Group, refused: Sequence[tuple[int, str, str]], caller: str, waiting_caller: str, cause: Cause
    ) -> None:
        """Refuse some of the calls of ``caller`` that were just added to ``group``.

        ``refused``: (index among them, method, reason). They do not become dead letters: a caller could otherwise push
        out those of others.
        """
        first = sum([batch.count for batch in group.batches[:-1]])
        given: list[Verdict] = []
        for index, method, text in refused:
            key = self.state.log.open_sequence_id, first + index
            verdict = Verdict(*key, VerdictKind.REFUSED, "", text, cause, method=method, caller=waiting_caller)
            if self.verdicts.log_verdict(verdict, group=group) is not None:  # otherwise it already has a verdict
                given.append(verdict)
        if not given:
            return
        if cause is Cause.UNUSABLE:
            self.note_nested(caller or waiting_caller, len(refused), given[0].text)
        else:
            self.note_forbidden(caller, len(refused), given[0].text)
        self._send(given)

    def note_forbidden(self, caller: str, count: int, text: str) -> None:
        """Count ``count`` more calls that ``caller`` is not allowed to make."""
        if not self.forbidden[caller]:
            self.state.report(notices.CallForbidden(text))
        self.forbidden[caller] += count

    def note_nested(self, caller: str, count: int, text: str) -> None:
        """Count ``count`` more messages of ``caller`` that are nested too deeply."""
        caller = caller or self.state.name
        if caller not in self.nested and len(self.nested) >= KNOWN_MAX:
            caller = "others"
        if not self.nested[caller]:
            self.state.report(notices.NestedTooDeeply(text))
        self.nested[caller] += count

    def _report_long_handler(self) -> None:
        state = self.state
        stopping = state.shutdown.is_requested
        least_s = 0.001 if stopping else state.limits.long_handler_s
        if news := self.poison_guard.long_handler_warning(least_s, state.now_ns):
            state.report(notices.StopWaits(news) if stopping else notices.HandlerTakesLong(news))

    def stop_requested(self) -> None:
        if words := self.poison_guard.long_handler_text(self.state.now_ns):
            self.state.report(notices.StopWaits(words))

    def describe(self, now_ns: int) -> dict[str, object]:
        """Return plain values for the status."""
        verdicts, suspect = self.verdicts, self.poison_guard.suspect
        return {
            "verdicts": {kind.name.lower(): verdicts.counts[kind] for kind in VerdictKind},
            "forbidden": dict(self.forbidden),
            "letters": {
                "count": len(verdicts.letters),
                "bytes": verdicts.letters_bytes,
                "lost": verdicts.letters_lost,
            },
            "suspect": {
                "record": None if suspect.sequence_id == UNKNOWN else suspect.sequence_id,
                "message": None if suspect.message_index < 0 else suspect.message_index,
                "runs": suspect.runs_count,
            }
            if suspect.runs_count
            else None,
            "handling": self.poison_guard.long_handler(now_ns),
        }


def _clipped(verdict: Verdict) -> Verdict:
    """Limit the parts of the verdict that operators see. The caller gets it whole."""
    message = verdict.message if len(verdict.message) <= LETTER_SIZE_BYTES_MAX else b""
    if message is verdict.message and len(verdict.trace) <= TRACE_CHARACTERS_MAX:
        return verdict
    return msgspec.structs.replace(verdict, message=message, trace=verdict.trace[-TRACE_CHARACTERS_MAX:])


# Verdicts on messages of the log, and the dead letters among them.
#
# A verdict goes into the next commit. Until that is durable, nothing that the app sent after it can leave the machine.


FRONT_SIZE_BYTES = 64  # approximate size of a verdict without its texts
OVERRULING = (VerdictKind.KILLED, VerdictKind.SKIPPED)  # can replace a verdict whose message runs in each replay


class Verdicts:
    """Verdicts of one instance. ``letters``: sizes in bytes of the kept dead letters, oldest first."""

    def __init__(self, state: CoreState) -> None:
        self.counts: Counter[VerdictKind] = Counter()  # since this coordinator was started
        self.letters: dict[MessageKey, int] = {}
        self.letters_bytes = 0
        self.letters_lost = 0  # since this coordinator was started: dropped for lack of room
        self._state = state
        self._known: dict[MessageKey, Verdict] = {}  # on messages that a replay can reach

    def load(self, summary: LogSummary) -> None:
        """Load the verdicts and dead letters of the log."""
        self.letters = dict(summary.letters)
        self.letters_bytes = sum(self.letters.values())
        self._known = {}
        self.add_known(summary.verdicts)

    def add_known(self, verdicts: Iterable[Verdict]) -> None:
        """Add verdicts that the app must get; known ones stay."""
        for verdict in verdicts:
            self._known.setdefault(verdict.key, verdict)

    def get(self, key: MessageKey) -> Verdict | None:
        return self._known.get(key)

    def unsettled(self, sequence_id: int, summary: LogSummary) -> list[Verdict]:
        """Return the verdicts that a replay starting after the record ``sequence_id`` needs, in order."""
        self.add_known(summary.verdicts)  # the replay can begin before the last checkpoint
        self.forget_until(sequence_id)
        return [self._known[key] for key in sorted(self._known)]

    def forget_until(self, sequence_id: int) -> None:
        """Forget verdicts up to the record ``sequence_id``: no replay begins before it. The log still has them."""
        self._known = {key: verdict for key, verdict in self._known.items() if key[0] > sequence_id}

    def keys_until(self, sequence_id: int) -> list[MessageKey]:
        """Return the keys of messages up to the record ``sequence_id`` that have a verdict."""
        return sorted(key for key in self._known if key[0] <= sequence_id)

    @property
    def count(self) -> int:
        return len(self._known)

    def log_verdict(self, verdict: Verdict, *, from_app: bool = False, group: Group | None = None) -> Group | None:
        """Log a verdict; return the group that makes it durable, which is ``group`` if given. None if the message
        already has one."""
        known = self._known.get(verdict.key)
        if known is not None and (known.skips or verdict.kind not in OVERRULING):
            return None
        size_bytes = FRONT_SIZE_BYTES + len(verdict.text) + len(verdict.message) + len(verdict.trace)
        if group is None:
            group = self._state.log.append_outside_record(size_bytes, from_app=from_app)
        else:
            self._state.log.count(group, size_bytes)
        group.transaction.verdicts.append(verdict)
        self._known[verdict.key] = verdict.without_dead_letter()
        self.counts[verdict.kind] += 1
        self._forget_letter(verdict.key)
        if verdict.is_dead_letter:
            self.letters[verdict.key] = size_bytes
            self.letters_bytes += size_bytes
            limits = self._state.limits
            while len(self.letters) > limits.letters_max or self.letters_bytes > limits.letters_bytes:
                self.letters_lost += 1
                self.remove_letter(next(iter(self.letters)), group.transaction)
        return group

    def remove_letter(self, key: MessageKey, transaction: Transaction) -> None:
        """Remove a dead letter from the log."""
        self._forget_letter(key)
        transaction.letters_removed.append(key)

    def _forget_letter(self, key: MessageKey) -> None:
        self.letters_bytes -= self.letters.pop(key, 0)
