"""Calls of peers that wait for an answer and have none yet: counted for callers that may have only so many at once.

A call beyond that takes its place in the log, with a verdict, and its caller is told: it is refused, as one of a method
that the caller may not call. It is not held back, as calls beyond a rate are: what stands behind it in its caller's
stream may be the very answer that the calls before it wait for, and then none of them would ever end.

Each call that waits counts until it is answered, a refused one too: the caller chooses the numbers, and may give two
calls the same one. What is counted follows from the log: a checkpoint has the calls that were open behind its record; a
recovery adds those of the records that it replays, and takes away what is answered once more. From the end of an app
until the next one has recovered nothing is taken of these callers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from immortal.coordinator.core.permissions import Permission
from immortal.protocol.client import decode_answered_number, decode_caller
from immortal.protocol.messages import decode_messages


class _Open:
    """The open calls of one caller. It chooses their numbers, so two may have the same one."""

    def __init__(self) -> None:
        self.count = 0
        self._records: dict[int, list[int]] = {}  # by number, the older call first

    def add(self, number: int, sequence_id: int) -> None:
        self._records.setdefault(number, []).append(sequence_id)
        self.count += 1

    def remove(self, number: int) -> None:
        """One that may not be here."""
        records = self._records.get(number)
        if records is not None:
            self.count -= 1
            del records[0]
            if not records:
                del self._records[number]

    def up_to(self, sequence_id: int) -> list[int]:
        """The numbers of those in records up to that one, ascending."""
        return sorted(
            number for number, records in self._records.items() for record in records if record <= sequence_id
        )


class OpenCalls:
    """Those of one instance. ``is_known``: there is nothing that a recovery has still to find out."""

    def __init__(self, given: Mapping[str, Permission], *, is_known: bool) -> None:
        self.is_known = is_known
        self._limits: dict[str, int] = {}  # by caller
        self._open: dict[str, _Open] = {}
        self.change(given)

    def change(self, given: Mapping[str, Permission]) -> None:
        """Calls that were taken before a caller had a limit do not count."""
        self._limits = {
            caller: permission.concurrent for caller, permission in given.items() if permission.concurrent is not None
        }
        self._open = {caller: self._open.get(caller) or _Open() for caller in self._limits}

    def limit(self, caller: str) -> int | None:
        """How many calls ``caller`` may have open; None: any number."""
        return self._limits.get(caller)

    @property
    def counts(self) -> dict[str, int]:
        """Open calls by caller, of those who have a limit."""
        return {caller: calls.count for caller, calls in self._open.items()}

    def taken(self, caller: str, calls: bytes, sequence_id: int) -> list[int]:
        """Of packed RPC messages of the record ``sequence_id``, checked before: the indices of those too many."""
        limit = self._limits.get(caller)
        if limit is None:
            return []
        calls_open, beyond = self._open[caller], []
        for index, number in _numbers(calls):
            if calls_open.count >= limit:
                beyond.append(index)
            calls_open.add(number, sequence_id)
        return beyond

    def answered(self, caller: str, payload: bytes) -> None:
        """The app's next messages to ``caller``: what they answer is open no more."""
        calls_open = self._open.get(caller)
        if calls_open is None or not calls_open.count:
            return
        for _, start, end in decode_messages(payload):
            number = decode_answered_number(payload, start, end)
            if number is not None:
                calls_open.remove(number)

    def forget(self, caller: str) -> None:
        """Its calls have other numbers from now on: its log is another one."""
        if caller in self._open:
            self._open[caller] = _Open()

    # --- over a restart ----------------------------------------------------------------------------------------------

    def open_at(self, sequence_id: int) -> dict[str, list[int]]:
        """What a checkpoint behind that record holds: the numbers of open calls in records up to it, by caller."""
        found = {caller: calls.up_to(sequence_id) for caller, calls in self._open.items()}
        return {caller: numbers for caller, numbers in found.items() if numbers}

    def restore(self, at_checkpoint: Mapping[str, Sequence[int]], sequence_id: int) -> None:
        """A recovery begins, at a checkpoint behind that record."""
        self._open = {caller: _Open() for caller in self._limits}
        for caller, calls in self._open.items():
            for number in at_checkpoint.get(caller, ()):
                calls.add(number, sequence_id)

    def replayed(self, caller: str, calls: bytes, sequence_id: int) -> None:
        """A record that a recovery replays holds these calls of ``caller``, who has a limit."""
        for _, number in _numbers(calls):
            self._open[caller].add(number, sequence_id)


def _numbers(calls: bytes) -> Iterator[tuple[int, int]]:
    """(index, number of the call) of those that wait for an answer."""
    for index, (_, start, end) in enumerate(decode_messages(calls)):
        waits = decode_caller(calls, start, end)
        if waits is not None:
            yield index, waits.number
