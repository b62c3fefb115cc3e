"""Poison guard: finds the message that ends the app's process. After a death, the next run announces its messages.

    a death                 suspect                     the next run says what it is about to handle
    out of the blue         some record so far          each record, up to the last that it was given
    at a record             that record                 each of its messages
    at a message            that message                ... so often in a row as the limit says: it gets a verdict
    at a handler            that one, at that message   the same; the others that the message lets go on get none

The app announces an ``async def`` handler that a message continues like a message.
A run that survives its suspect clears it.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict

from msgspec.structs import replace

from immortal.coordinator.core.interfaces import NO_SUSPECT, UNKNOWN, Suspect
from immortal.coordinator.core.limits import Limits
from immortal.protocol.client_frames import CLIENTS
from immortal.protocol.verdicts import RECORD, Careful, Handling, Verdict, VerdictKind

KILLED_TYPE = "ProcessEnded"
"""Verdict's exception type for a message that ended the app's process."""


class PoisonGuard:
    """Suspects and reports of one app. ``suspect``: as the log has it. ``kills_max``: number of deaths at a message
    that is too many; None: no limit."""

    def __init__(self, suspect: Suspect, kills_max: int | None) -> None:
        self.suspect = suspect
        self._kills_max = kills_max
        self._noted: Handling | None = None
        self._noted_ns = 0
        self._reported_message: tuple[int, int] | None = None  # the message that was reported to the operator as long
        self._careful = False  # the app was asked to be careful, and is not past the suspect
        self.culprit: tuple[str, int] = "", 0
        """Sender of the message at which the app last died ("": itself, or unknown), and how many deaths to count: all
        with the verdict; without one, a single death if there is no limit, otherwise none."""

    def session_began(self, settled_sequence_id: int) -> Careful | None:
        """Start a run after the record ``settled_sequence_id``; return where the app must be careful, or None."""
        self._noted = self._reported_message = None
        suspect = self.suspect
        is_unknown = suspect.sequence_id == UNKNOWN
        last_sequence_id = suspect.last_sequence_id if is_unknown else suspect.sequence_id
        if last_sequence_id <= settled_sequence_id:  # a checkpoint was taken after the suspect's record
            self.suspect = NO_SUSPECT
        self._careful = self.suspect.runs_count > 0
        return Careful(last_sequence_id, suspect.sequence_id, True) if self._careful else None

    def note_handling(self, handling: Handling, now_ns: int) -> None:
        """Note the app's report of what it is handling."""
        before = self._noted
        if handling.sequence_id < 0 and handling.for_s > 0:  # a long handler has returned
            self._noted = replace(before, for_s=0.0) if self._careful and before is not None else None
        elif handling.sequence_id < 0:
            self._noted = None
            self._careful = False
            self.suspect = NO_SUSPECT
        else:
            is_same = self.is_handling(handling.sequence_id, handling.message_index)
            if handling.for_s > 0 and before is not None and is_same:
                handling = replace(before, for_s=handling.for_s)  # the first report has the other fields
            self._noted, self._noted_ns = handling, now_ns

    def is_handling(self, sequence_id: int, message_index: int) -> bool:
        """Return True if the app last reported that it is at that message."""
        noted = self._noted
        return noted is not None and (noted.sequence_id, noted.message_index) == (sequence_id, message_index)

    @property
    def is_idle(self) -> bool:
        """True if the app has reported no message, and was not asked to be careful."""
        return self._noted is None and not self._careful

    def current_message_text(self) -> str:
        """Describe the message that the app last reported; "" if there is none."""
        noted = self._noted
        return "" if noted is None else format_message_position(noted.sequence_id, noted.message_index, noted.caller)

    def forget(self) -> None:
        """Forget reports of an app that is gone, when its end gives no suspect."""
        self._noted = self._reported_message = None
        self.culprit = "", 0
        self._careful = False

    def app_died(self, fed_sequence_id: int, *, all_read: bool) -> Verdict | None:
        """Note that the app died after the records up to ``fed_sequence_id``. Return the verdict if it died too often.

        ``all_read``: everything that it had sent was read.
        """
        noted, before, was_careful = self._noted, self.suspect, self._careful
        self.forget()
        if noted is None or not all_read:
            if not was_careful:  # otherwise the earlier suspect stays: the app may not have reached it
                self.suspect = Suspect(UNKNOWN, RECORD, 1, fed_sequence_id)
            return None
        runs_count = before.runs_count + 1 if _may_be(before, noted) else 1
        sender = noted.caller or noted.source
        self.suspect = Suspect(noted.sequence_id, noted.message_index, runs_count, task=noted.task)
        if self._kills_max is None or runs_count < self._kills_max or noted.message_index == RECORD:
            self.culprit = sender, int(self._kills_max is None)
            return None
        self.suspect = NO_SUSPECT
        self.culprit = sender, runs_count
        times = "once" if runs_count == 1 else f"{runs_count} times"
        return Verdict(
            noted.sequence_id,
            noted.message_index,
            VerdictKind.KILLED,
            KILLED_TYPE,
            f"it ended the app's process {times}",
            task=noted.task,
            method=noted.method,
            caller=noted.caller,
            message=noted.message,
        )

    def long_handler(self, now_ns: int) -> dict[str, object] | None:
        """Describe a handler that has run for long, if there is one; plain values."""
        noted = self._noted
        if noted is None or noted.for_s <= 0:
            return None
        return {
            "method": noted.method,
            "for_s": round(noted.for_s + max(0, now_ns - self._noted_ns) / 1e9, 3),
            "record": noted.sequence_id,
            "message": noted.message_index,
            "caller": noted.caller,
        }

    def long_handler_text(self, now_ns: int) -> str:
        """Describe the long handler, as ``handling Orders.place for 12 s (record 312, message 0, called by shop)``;
        or ""."""
        noted, long = self._noted, self.long_handler(now_ns)
        if noted is None or long is None:
            return ""
        where = format_message_position(noted.sequence_id, noted.message_index, noted.caller)
        return f"handling {noted.method or 'a message'} for {long['for_s']:.0f} s ({where})"

    def long_handler_warning(self, long_handler_s: float, now_ns: int) -> str:
        """Return a warning about a handler that runs for at least ``long_handler_s``, once per message; or ""."""
        noted = self._noted
        if noted is None or noted.for_s < long_handler_s:
            return ""
        message = noted.sequence_id, noted.message_index
        was_reported, self._reported_message = self._reported_message == message, message
        return "" if was_reported else self.long_handler_text(now_ns)


def _may_be(suspect: Suspect, noted: Handling) -> bool:
    """Return True if this death can be another one at the suspect."""
    if suspect.sequence_id == UNKNOWN:
        return True
    indexes = suspect.message_index, noted.message_index
    is_same = indexes[0] == indexes[1] and (not suspect.task or suspect.task == noted.task)
    return suspect.sequence_id == noted.sequence_id and (RECORD in indexes or is_same)


def format_message_position(sequence_id: int, message_index: int, caller: str | None) -> str:
    message = "" if message_index == RECORD else f", message {message_index}"
    if caller is None:
        return f"record {sequence_id}{message}"
    if caller.startswith(CLIENTS):
        return f"record {sequence_id}{message}, called by the client {caller.removeprefix(CLIENTS)}"
    return f"record {sequence_id}{message}, called by {caller or 'itself'}"


# Penalties for callers whose calls have ended the app's process, and for queries that did.
#
# A logged message that ends the process gets a verdict. A query is in no log, so it is remembered here, as long as the
# coordinator runs. A caller with many such calls could stop the app with each of them, so it is held off for a time
# that doubles with each further death.


KNOWN_MAX = 10_000  # callers, and queries; above this the oldest are forgotten
FREE_DEATHS = 2  # deaths that a caller can cause before it is held off
FORGET_NS = 600 * 1_000_000_000  # time after the last death after which a caller's deaths are forgotten


class _Caller:
    def __init__(self) -> None:
        self.deaths = 0
        self.hold_off_count = 0
        self.last_ns = 0
        self.held_off_until_ns = 0


class CallerPenalties:
    """Callers and queries of one instance. ``limits.kills_max``: deaths after which a query is refused."""

    def __init__(self, limits: Limits) -> None:
        self._kills_max = limits.kills_max
        self._hold_off_ns_min, self._hold_off_ns_max = limits.hold_off_ns_min, limits.hold_off_ns_max
        self._callers: OrderedDict[str, _Caller] = OrderedDict()
        self._queries: OrderedDict[bytes, int] = OrderedDict()  # deaths by digest
        self._held_off_until_ns = 0  # latest time of all callers

    # --- callers -----------------------------------------------------------------------------------------------------

    def count_deaths(self, caller: str, now_ns: int, deaths: int = 1) -> tuple[int, int]:
        """Count deaths at a call of ``caller``; return how many it has caused, and for how many ns it is held off."""
        known = self._callers.pop(caller, None)
        if known is None or now_ns - known.last_ns > FORGET_NS:
            known = _Caller()
        self._callers[caller] = known
        if len(self._callers) > KNOWN_MAX:
            self._callers.popitem(last=False)
        known.deaths += deaths
        known.last_ns = now_ns
        if known.deaths <= FREE_DEATHS:
            return known.deaths, 0
        hold_off_ns = min(self._hold_off_ns_min << min(known.hold_off_count, 32), self._hold_off_ns_max)
        known.hold_off_count += 1
        known.held_off_until_ns = now_ns + hold_off_ns
        self._held_off_until_ns = max(self._held_off_until_ns, known.held_off_until_ns)
        return known.deaths, hold_off_ns

    @property
    def has_held_off(self) -> bool:
        """True if a caller is or was held off."""
        return self._held_off_until_ns > 0

    def hold_off_ns(self, caller: str, now_ns: int) -> int:
        """Return for how many ns the calls of ``caller`` are refused; 0: it can call."""
        if now_ns >= self._held_off_until_ns:
            return 0
        known = self._callers.get(caller)
        return 0 if known is None else max(0, min(known.held_off_until_ns - now_ns, self._hold_off_ns_max))

    def hold_off_reason(self, caller: str, now_ns: int) -> str:
        """Return why ``caller`` is held off; "" if it can call."""
        hold_off_ns = self.hold_off_ns(caller, now_ns)
        if not hold_off_ns:
            return ""
        deaths = self._callers[caller].deaths
        return (
            f"calls of {caller!r} have ended the app's process {deaths} times: nothing more of it is taken for "
            f"{hold_off_ns / 1e9:.1f} s"
        )

    @property
    def deaths(self) -> dict[str, int]:
        """Number of deaths by remembered caller."""
        return {caller: known.deaths for caller, known in self._callers.items()}

    # --- queries -----------------------------------------------------------------------------------------------------

    def query_died(self, query: bytes) -> None:
        """Count a death of the app's process at the query with this :func:`digest_of`."""
        self._queries[query] = self._queries.pop(query, 0) + 1
        if len(self._queries) > KNOWN_MAX:
            self._queries.popitem(last=False)

    def query_answered(self, query: bytes) -> None:
        """Forget deaths at that query: the process survived it."""
        self._queries.pop(query, None)

    @property
    def has_suspects(self) -> bool:
        return bool(self._queries)

    def is_suspected(self, query: bytes) -> bool:
        """Return True if the process has died at that query. Then the query is asked alone, to be certain."""
        return query in self._queries

    def query_refusal(self, query: bytes) -> str:
        """Return why the query is refused; "" if it can be asked."""
        deaths = self._queries.get(query, 0)
        if self._kills_max is None or deaths < self._kills_max:
            return ""
        times = "once" if deaths == 1 else f"{deaths} times"
        return f"this query has ended the app's process {times}: it is asked no more until the coordinator is restarted"


def digest_of(asker: str, method_id: int, arguments: bytes) -> bytes:
    """Return the digest that identifies a query of ``asker``."""
    digest = hashlib.blake2b(f"{asker}\0{method_id}\0".encode(), digest_size=16)
    digest.update(arguments)
    return digest.digest()
