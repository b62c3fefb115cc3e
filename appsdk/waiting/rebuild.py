"""A handler that waited is run again over its journal: what it does is compared with that, and taken from there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from immortal.appsdk.state.journal import WAYS_OUT, Entry, JournalError, Pending, SavedTask, described
from immortal.appsdk.waiting.operations import Operation
from immortal.protocol.decoding import DecodeError

MISFITS = (DecodeError, LookupError)
"""What :meth:`Operation.outcome` raises where what came is not what was declared."""


class Rebuild:
    """The journal of ``saved``. ``next_entry``: the first not used up yet. ``title``: of the handler, for people."""

    def __init__(self, saved: SavedTask, title: Callable[[], str]) -> None:
        self.pending = {pending.step: pending for pending in saved.pending}
        self.next_entry: Entry | None = None
        self._entries = iter(saved.entries)
        self._by_step: dict[int, Entry | Pending] = {**self.pending, **{entry.step: entry for entry in saved.entries}}
        self._title = title
        self.use_up()

    def use_up(self) -> None:
        self.next_entry = next(self._entries, None)

    def check(self, operation: Operation) -> None:
        """It is what had this step, and has the number again under which it waits. Raises JournalError."""
        saved = self._by_step.get(operation.step)
        if saved is not None and not operation.fits(saved):
            raise self.mismatch(operation.step, saved, described(operation))
        if isinstance(saved, Pending) and not operation.is_immediate:
            operation.number = saved.number

    def take(self, operation: Operation) -> Entry:
        """What ``operation``, which does not wait, has come to. Raises JournalError."""
        entry = self.next_entry
        if entry is None or entry.step != operation.step:
            raise self.mismatch(operation.step, entry or self._by_step.get(operation.step), described(operation))
        self.use_up()
        return entry

    def outcome(self, operation: Operation, entry: Entry) -> tuple[Any, Exception | None]:
        """As :meth:`Operation.outcome`. Raises JournalError."""
        try:
            return operation.outcome(entry.raised, entry.value)
        except MISFITS as error:
            raise JournalError(
                f"{self._title()} has a result at step {entry.step} ({entry.what}) that does not fit what that is "
                f"declared to return or raise any more: {error}; the app stops\n{WAYS_OUT}"
            ) from None

    def mismatch(self, step: int, saved: Entry | Pending | None, got: str) -> JournalError:
        expected = described(saved) if saved is not None else "nothing more"
        if got == expected:
            got = f"{got}, in another order"
        return JournalError(
            f"{self._title()} does not match its journal at step {step}: expected {expected}, got {got}; the app "
            f"stops\n{WAYS_OUT}"
        )

    def wrong_end(self, waits: Mapping[int, Operation], steps_count: int, got: str) -> JournalError:
        """The journal is used up, and it ``waits`` for other things than before."""
        missing = [pending for step, pending in self.pending.items() if step not in waits]
        extra = [operation for step, operation in waits.items() if step not in self.pending]
        step = (missing or extra)[0].step if missing or extra else steps_count
        return self.mismatch(step, missing[0] if missing else None, got)
