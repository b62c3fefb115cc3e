"""The verdicts on messages of the log: those that an app is to be told, and the dead letters among them.

A verdict goes into the next commit. Until that is durable, nothing may leave the machine that was sent behind it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from immortal.coordinator.core.group_commit import Group, GroupCommit
from immortal.coordinator.core.interfaces import LogSummary, Transaction
from immortal.coordinator.core.limits import Limits
from immortal.protocol.verdicts import MessageKey, Verdict, VerdictKind

FRONT_SIZE_BYTES = 64  # of a verdict, beside its texts: about
OVERRULING = (VerdictKind.KILLED, VerdictKind.SKIPPED)  # also what runs again at each replay, and is found to kill


class Verdicts:
    """Those of one instance. ``letters``: the sizes in bytes of the dead letters that are kept, oldest first."""

    def __init__(self, limits: Limits, log: GroupCommit) -> None:
        self.counts: Counter[VerdictKind] = Counter()  # since this coordinator was started
        self.letters: dict[MessageKey, int] = {}
        self.letters_bytes = 0
        self.letters_lost = 0  # since this coordinator was started: there was no room for them any more
        self._limits = limits
        self._log = log
        self._known: dict[MessageKey, Verdict] = {}  # on what a replay may come to

    def load(self, summary: LogSummary) -> None:
        """What the log has."""
        self.letters = dict(summary.letters)
        self.letters_bytes = sum(self.letters.values())
        self._known = {}
        self.know(summary.verdicts)

    def know(self, verdicts: Iterable[Verdict]) -> None:
        """Those that an app is to be told of as well, where nothing else is known."""
        for verdict in verdicts:
            self._known.setdefault(verdict.key, verdict)

    def known(self, key: MessageKey) -> Verdict | None:
        return self._known.get(key)

    def behind(self, sequence_id: int, summary: LogSummary) -> list[Verdict]:
        """Those that a replay from behind this record is to be told, in their order."""
        self.know(summary.verdicts)  # it may begin before the last checkpoint
        self.forget_until(sequence_id)
        return [self._known[key] for key in sorted(self._known)]

    def forget_until(self, sequence_id: int) -> None:
        """No replay begins before this record. The log has them still."""
        self._known = {key: verdict for key, verdict in self._known.items() if key[0] > sequence_id}

    def known_until(self, sequence_id: int) -> list[MessageKey]:
        """On which messages of records up to this one there is a verdict that a replay is to be told."""
        return sorted(key for key in self._known if key[0] <= sequence_id)

    @property
    def known_count(self) -> int:
        return len(self._known)

    def give(self, verdict: Verdict, *, from_app: bool = False, group: Group | None = None) -> Group | None:
        """The group that makes it durable, which is ``group`` where that has the message itself; None if there is a
        verdict on that message already."""
        known = self._known.get(verdict.key)
        if known is not None and (known.skips or verdict.kind not in OVERRULING):
            return None
        size_bytes = FRONT_SIZE_BYTES + len(verdict.text) + len(verdict.message) + len(verdict.trace)
        if group is None:
            group = self._log.append_outside_record(size_bytes, from_app=from_app)
        else:
            self._log.add(group, size_bytes)
        group.transaction.verdicts.append(verdict)
        self._known[verdict.key] = verdict.without_letter()
        self.counts[verdict.kind] += 1
        self._forget_letter(verdict.key)
        if verdict.is_letter:
            self.letters[verdict.key] = size_bytes
            self.letters_bytes += size_bytes
            self._stay_within(group.transaction)
        return group

    def _stay_within(self, transaction: Transaction) -> None:
        limits = self._limits
        while len(self.letters) > limits.letters_max or self.letters_bytes > limits.letters_bytes:
            self.letters_lost += 1
            self.remove_letter(next(iter(self.letters)), transaction)

    def remove_letter(self, key: MessageKey, transaction: Transaction) -> None:
        """One that is kept."""
        self._forget_letter(key)
        transaction.letters_removed.append(key)

    def _forget_letter(self, key: MessageKey) -> None:
        self.letters_bytes -= self.letters.pop(key, 0)
