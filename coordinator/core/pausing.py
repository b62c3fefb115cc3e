"""A pause that an operator asks for: input is logged, and the app gets none of it until somebody resumes.

It is kept in memory, so it ends with this process. To the rest of the machine the app is one that is slow.
"""

from __future__ import annotations

from immortal.coordinator.core import events as ev
from immortal.coordinator.core import notices
from immortal.coordinator.core.effects import OperatorAnswered
from immortal.coordinator.core.session import WORKS, AppSession
from immortal.coordinator.core.turn import Turn


class Pausing:
    """``by``: who has paused it, "" while nobody has; ``since_ns``: when, the instance's time."""

    def __init__(self, name: str, session: AppSession, turn: Turn) -> None:
        self.is_paused = False
        self.by = ""
        self.since_ns = 0
        self._name = name
        self._session = session
        self._turn = turn

    def pause(self, event: ev.InstancePaused) -> None:
        """An app that recovers is not paused: it would be neither of before nor of now, and is not primary yet."""
        session, turn = self._session, self._turn
        changed = not self.is_paused
        if changed and session.phase not in WORKS:
            problem = (
                f"the app of {self._name!r} does not work now (phase: {session.phase.value}), and only one that does "
                f"can be paused: try again once it does"
            )
            turn.effects.append(OperatorAnswered(event.token, {"refused": problem}))
            return
        if changed:
            self.is_paused, self.by, self.since_ns = True, event.who, turn.now_ns
            turn.report(notices.InstancePaused(event.who))
        turn.effects.append(OperatorAnswered(event.token, {"changed": changed, **self.describe()}))

    def resume(self, event: ev.InstanceResumed) -> None:
        turn, before = self._turn, self.describe()
        changed = self.is_paused
        if changed:
            paused_s = round(max(0, turn.now_ns - self.since_ns) / 1e9, 3)
            turn.report(notices.InstanceResumed(event.who, self.by, paused_s))
            self.is_paused, self.by, self.since_ns = False, "", 0
        turn.effects.append(OperatorAnswered(event.token, {"changed": changed, **before}))

    def describe(self) -> dict[str, object]:
        return {"paused": {"by": self.by, "since_ns": self.since_ns} if self.is_paused else None}
