"""A stop that an operator asks for: the app has its time for a last checkpoint, and is said goodbye to.

NOT_ASKED --StopRequested--> ASKED --TakeCheckpoint sent--> LAST_CHECKPOINT --durable, or there is none--> GOODBYE
   '------StopRequested, another one follows--> HANDING_OVER --all input that was taken is durable--> the end

Who hands over needs no checkpoint: who follows has the state. To the app it is as if its coordinator had died, but for
the word; what it was at is done by the one that follows, which has the same records.
"""

from __future__ import annotations

from enum import IntEnum

from immortal.coordinator.core.app_outbox import AppOutbox
from immortal.coordinator.core.effects import CloseApp
from immortal.coordinator.core.turn import Turn
from immortal.protocol.messages import MessageType


class Stage(IntEnum):
    NOT_ASKED = 0
    ASKED = 1  # no input is taken any more
    LAST_CHECKPOINT = 2  # the app was asked for its last one: it gets no more records
    GOODBYE = 3  # it was told that this is the end
    HANDING_OVER = 4  # it gets no more records, and is not read any more


class Stopping:
    """``stage``: it only ever rises; an app that is lost on the way ends the stop. What it means for the rest of the
    machine are plain values, since each turn asks for them. ``feeds_no_more``: the app gets no more records."""

    def __init__(self, outbox: AppOutbox, turn: Turn) -> None:
        self.asked = self.takes_last_checkpoint = self.said_goodbye = self.hands_over = self.feeds_no_more = False
        self.stage = Stage.NOT_ASKED
        self._last_checkpoint_id = 0
        self._outbox = outbox
        self._turn = turn

    def _reach(self, stage: Stage) -> None:
        self.stage = stage
        self.asked = stage >= Stage.ASKED
        self.feeds_no_more = stage >= Stage.LAST_CHECKPOINT
        self.hands_over = stage is Stage.HANDING_OVER
        self.takes_last_checkpoint = self.feeds_no_more and not self.hands_over
        self.said_goodbye = stage is Stage.GOODBYE

    def ask(self, *, hands_over: bool) -> None:
        self._reach(Stage.HANDING_OVER if hands_over else Stage.ASKED)

    def checkpoint_asked(self) -> None:
        """A checkpoint is asked for now: it is the last one if a stop is asked for."""
        if self.stage is Stage.ASKED:
            self._reach(Stage.LAST_CHECKPOINT)

    def checkpoint_began(self, checkpoint_id: int) -> None:
        if self.takes_last_checkpoint:
            self._last_checkpoint_id = checkpoint_id

    def checkpoint_durable(self, checkpoint_id: int) -> None:
        if checkpoint_id == self._last_checkpoint_id:
            self._say_goodbye()

    def checkpoint_failed(self) -> None:
        """The app has none to give; the one before is there."""
        if self.takes_last_checkpoint:
            self._say_goodbye()

    def _say_goodbye(self) -> None:
        self._reach(Stage.GOODBYE)
        self.say_why()
        self._turn.effects.append(CloseApp())

    def say_why(self) -> None:
        """To the app, that it is the end."""
        self._outbox.say(MessageType.GOODBYE, "the coordinator was asked to stop")
