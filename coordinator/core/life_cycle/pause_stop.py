"""Pause and stop on an operator's request. During a pause input is logged, and the app gets none.

A pause is kept in memory, so it ends with this process. To the rest of the machine a paused app is a slow app.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

from immortal.coordinator.core import events as ev
from immortal.coordinator.core import notices
from immortal.coordinator.core.effects import CloseApp, OperatorAnswered
from immortal.coordinator.core.life_cycle.session import WORKS
from immortal.protocol.messages import MessageType

if TYPE_CHECKING:
    from immortal.coordinator.core.state import CoreState


class Pause:
    """Pause of the app by an operator. ``by``: who paused it, "" if nobody; ``since_ns``: when, instance time."""

    def __init__(self, state: CoreState) -> None:
        self.is_paused = False
        self.by = ""
        self.since_ns = 0
        self._state = state

    def requested(self, event: ev.InstancePaused) -> None:
        """Pause the app. A recovering app is not paused: its state would be neither the old nor the current one."""
        session, state = self._state.session, self._state
        changed = not self.is_paused
        if changed and session.phase not in WORKS:
            problem = (
                f"the app of {state.name!r} does not work now (phase: {session.phase.value}), and only one that does "
                f"can be paused: try again once it does"
            )
            state.effects.append(OperatorAnswered(event.token, {"refused": problem}))
            return
        if changed:
            self.is_paused, self.by, self.since_ns = True, event.who, state.now_ns
            state.report(notices.InstancePaused(event.who))
        state.effects.append(OperatorAnswered(event.token, {"changed": changed, **self.describe()}))

    def resume_requested(self, event: ev.InstanceResumed) -> None:
        state, before = self._state, self.describe()
        changed = self.is_paused
        if changed:
            paused_s = round(max(0, state.now_ns - self.since_ns) / 1e9, 3)
            state.report(notices.InstanceResumed(event.who, self.by, paused_s))
            self.is_paused, self.by, self.since_ns = False, "", 0
        state.effects.append(OperatorAnswered(event.token, {"changed": changed, **before}))

    def describe(self) -> dict[str, object]:
        return {"paused": {"by": self.by, "since_ns": self.since_ns} if self.is_paused else None}


# Shutdown on an operator's request: the app has time for a last checkpoint, and gets a goodbye.
#
# NOT_ASKED --StopRequested--> ASKED --TakeCheckpoint sent--> LAST_CHECKPOINT --durable, or there is none--> GOODBYE
#    '------StopRequested, another one follows--> HANDING_OVER --all input that was taken is durable--> the end
#
# A handover needs no checkpoint, since the follower has the state. For the app it is like a crash of its coordinator
# with a goodbye; the follower's app continues, since it has the same records.


class StopStage(IntEnum):
    """Stage of a requested stop; stages only rise."""

    NOT_ASKED = 0
    ASKED = 1  # no more input is accepted
    LAST_CHECKPOINT = 2  # the app was asked for its last checkpoint: it gets no more records
    GOODBYE = 3  # the app got the goodbye
    HANDING_OVER = 4  # the app gets no more records, and is not read any more


class Shutdown:
    """Stop requested by an operator. ``stage`` only rises; the loss of the app completes the stop. The other
    attributes repeat the stage as plain values, since each turn reads them. ``feeds_no_more``: the app gets no more
    records."""

    def __init__(self, state: CoreState) -> None:
        self.is_requested = self.takes_last_checkpoint = self.said_goodbye = self.hands_over = self.feeds_no_more = (
            False
        )
        self.stage = StopStage.NOT_ASKED
        self._last_checkpoint_id = 0
        self._state = state

    def _reach(self, stage: StopStage) -> None:
        self.stage = stage
        self.is_requested = stage >= StopStage.ASKED
        self.feeds_no_more = stage >= StopStage.LAST_CHECKPOINT
        self.hands_over = stage is StopStage.HANDING_OVER
        self.takes_last_checkpoint = self.feeds_no_more and not self.hands_over
        self.said_goodbye = stage is StopStage.GOODBYE

    def request(self, *, hands_over: bool) -> None:
        self._reach(StopStage.HANDING_OVER if hands_over else StopStage.ASKED)

    def checkpoint_asked(self) -> None:
        """Note that the app is asked for a checkpoint: during a stop it is the last one."""
        if self.stage is StopStage.ASKED:
            self._reach(StopStage.LAST_CHECKPOINT)

    def checkpoint_began(self, checkpoint_id: int) -> None:
        if self.takes_last_checkpoint:
            self._last_checkpoint_id = checkpoint_id

    def checkpoint_durable(self, checkpoint_id: int) -> None:
        if checkpoint_id == self._last_checkpoint_id:
            self._say_goodbye()

    def checkpoint_failed(self) -> None:
        """Say goodbye without a last checkpoint: the app has none to give, and the log keeps the one before."""
        if self.takes_last_checkpoint:
            self._say_goodbye()

    def _say_goodbye(self) -> None:
        self._reach(StopStage.GOODBYE)
        self.report_stop_reason()
        self._state.effects.append(CloseApp())

    def report_stop_reason(self) -> None:
        """Tell the app that the coordinator stops."""
        self._state.outbox.send_text(MessageType.GOODBYE, "the coordinator was asked to stop")
