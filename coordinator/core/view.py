"""What an operator asks of a running machine, in plain values. Nothing here changes anything."""

from __future__ import annotations

from collections.abc import Mapping

from immortal.coordinator.core.parts import Parts
from immortal.coordinator.core.session import WORKS
from immortal.coordinator.core.status import describe, describe_clients, describe_flow, describe_peers, describe_right
from immortal.protocol.verdicts import MessageKey


class View:
    """Of the machine that has these parts."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def peers(self) -> dict[str, dict[str, object]]:
        """What `immortal peers show` shows of each other instance; plain values."""
        return describe_peers(self._parts.peers, self._parts.back_pressure.held_up_for)

    def clients(self) -> dict[str, object]:
        """What the page shows of outside callers; plain values."""
        return describe_clients(self._parts.clients.table)

    @property
    def forbidden(self) -> Mapping[str, int]:
        """Calls that were refused as their caller may not make them, by caller, since the start."""
        return self._parts.failing.forbidden

    @property
    def refusals(self) -> Mapping[str, Mapping[str, int]]:
        """How often what was done to a caller, by what and whom, since the start: for the audit log."""
        failing = self._parts.failing
        return {
            "refused: a method that it may not call": self.forbidden,
            "refused: nested too deeply": failing.nested,
            "held back: too many calls": self._parts.intake.permissions.held_back,
            "its call has ended the app's process": failing.culprits.deaths,
        }

    @property
    def letters(self) -> list[MessageKey]:
        """The dead letters that are kept, oldest first."""
        return list(self._parts.failing.verdicts.letters)

    @property
    def can_hand_over(self) -> bool:
        """The app works: all that there is is in the log, or is made once more from it."""
        return self._parts.right.writes and self._parts.session.phase in WORKS and not self._parts.stopping.asked

    def handling_in_words(self, now_ns: int) -> str:
        """The handler that the app does not come back from, in words; "" where there is none."""
        return self._parts.failing.watch.in_words(now_ns)

    def status(self, now_ns: int) -> dict[str, object]:
        """What `immortal status` shows of a live instance; plain values."""
        parts = self._parts
        return describe(
            parts.name,
            parts.peers.committer_id,
            parts.epoch.number,
            parts.session,
            parts.log,
            parts.peers,
            parts.checkpoints.last,
            now_ns,
        ) | {
            **describe_right(parts.right, parts.access, now_ns),
            **describe_flow(parts.back_pressure, parts.log_room, parts.log, parts.name, parts.limits),
            **parts.failing.describe(now_ns),
            **parts.saving.describe(now_ns),
            **parts.pausing.describe(),
            "impulses": parts.impulses.count,
            "nested": dict(parts.failing.nested),
            "deaths_caused": parts.failing.culprits.deaths,
            "held_back": dict(parts.intake.permissions.held_back),
            "open_calls": parts.intake.open_calls.counts,
            "clients": parts.clients.describe() | parts.queries.describe(),
            "version": parts.versions.current,
            "upgrade_to": parts.versions.upgrade_to,
        }
