"""Checkpoints that a follower takes, so that the writer's own app need not: asked for, examined, and adopted.

    NOTHING --one is due--> WAITING --somebody follows: AskStandby--> ASKED --CheckpointOffered--> READING --durable-.
       ^                       '---- nobody does it in time, or what comes is no good: the app is asked --------.    |
       '--------------------------------------------------------------------------------------------------------'----'

What is adopted must be what the own app would have given: a state behind a record that the log has and that the app was
given, in the same version, with output streams and verdicts that the own ones continue. Its blob is read whole and
compared with its check. The header becomes durable by an ordinary append, so only who has the right to write adopts.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from msgspec.structs import replace

from immortal.coordinator.core import events as ev
from immortal.coordinator.core import notices
from immortal.coordinator.core.checkpointing import Checkpointing
from immortal.coordinator.core.effects import AskStandby, CheckCheckpoint, DropAsked
from immortal.coordinator.core.epoch import Epoch
from immortal.coordinator.core.failing import Failing
from immortal.coordinator.core.group_commit import GroupCommit
from immortal.coordinator.core.interfaces import CheckpointHeader, Offer
from immortal.coordinator.core.limits import Limits
from immortal.coordinator.core.session import WORKS, AppSession
from immortal.coordinator.core.streams.peers import Peers
from immortal.coordinator.core.turn import Turn
from immortal.coordinator.core.versions import Versions
from immortal.coordinator.core.wakes import Wakes


class Stage(Enum):
    NOTHING = "none is due"
    WAITING = "for somebody who follows"
    ASKED = "somebody was asked"
    READING = "what was offered is read"
    ADOPTED = "its header is on its way to the log"


@dataclass(slots=True, eq=False, repr=False)
class Adopting:
    turn: Turn
    session: AppSession
    log: GroupCommit
    epoch: Epoch
    peers: Peers
    failing: Failing
    checkpoints: Checkpointing
    versions: Versions
    limits: Limits
    wakes: Wakes
    stage: Stage = Stage.NOTHING
    has_standby: bool = False
    is_for_app: bool = False  # the one that is due: it could not be had otherwise
    _due_ns: int = 0  # when the app is asked in its place
    _checkpoint_id: int = 0
    _offer: Offer | None = None
    _reading_id: int = 0  # of the checkpoint that is being read, whether it is still wanted or not

    # --- asking ------------------------------------------------------------------------------------------------------

    def begin(self, *, at_once: bool) -> bool:
        """A checkpoint is due; whether it is to come from who follows. ``at_once``: somebody waits for it."""
        limits = self.limits
        if not limits.checkpoints_on_standby or self.is_for_app or (at_once and not self.has_standby):
            self.is_for_app = False
            return False
        self.stage = Stage.WAITING
        self._due_ns = self.turn.now_ns + limits.standby_checkpoint_ns
        self.go_on()
        return True

    @property
    def is_under_way(self) -> bool:
        """:meth:`go_on` may have something to do."""
        return self.stage is not Stage.NOTHING

    def go_on(self) -> None:
        """While one is due: what has become possible."""
        self.wakes.standby_at(min(self._due_ns, self.turn.now_ns + self.limits.recent_ns))
        if self.stage is Stage.WAITING and self.has_standby:
            self.stage = Stage.ASKED
            self._checkpoint_id = self.checkpoints.next_id()
            self.turn.effects.append(AskStandby(self._checkpoint_id, self.epoch.number))
        elif self.stage is Stage.ASKED and self._offer is not None and self._has_app_come_to(self._offer.header):
            if problem := self._problem(self._offer):
                self.give_up(problem)
            else:
                self.stage, self._reading_id = Stage.READING, self._checkpoint_id
                self.turn.effects.append(CheckCheckpoint(self._offer.header))
        elif self.stage is Stage.ASKED and self.log.is_idle and self.peers.outbound.any_unmarked:
            # Who follows waits for marks of the last calls, and no record with input comes that would have them.
            self.log.append_no_message()

    @property
    def waits(self) -> bool:
        """One is due, and not the app's to give. After its time it is given up by this."""
        if self.stage in (Stage.NOTHING, Stage.ADOPTED):
            return False
        if self.turn.now_ns >= self._due_ns:
            self.give_up("nobody follows" if self.stage is Stage.WAITING else "who was asked has not given it in time")
            return False
        return True

    def give_up(self, reason: str = "") -> None:
        """``reason``: why the app is asked; "": it was asked, or is gone."""
        if self.stage in (Stage.NOTHING, Stage.ADOPTED):
            return
        if self.stage is not Stage.WAITING:
            self.turn.effects.append(DropAsked())
        if reason:
            self.checkpoints.wanted = self.is_for_app = True
            self.turn.report(notices.StandbyTakesNone(reason))
        self.stage, self._offer = Stage.NOTHING, None

    def standbys_changed(self, event: ev.StandbysChanged) -> None:
        self.has_standby = event.is_ready

    # --- what comes --------------------------------------------------------------------------------------------------

    def offered(self, event: ev.CheckpointOffered) -> None:
        """Nothing is taken that was asked for before, or by one that wrote the log before."""
        offer = event.offer
        is_asked = self.stage is Stage.ASKED and offer.header.checkpoint_id == self._checkpoint_id
        if is_asked and offer.epoch == self.epoch.number:
            self._offer = offer

    def _has_app_come_to(self, header: CheckpointHeader) -> bool:
        """Who follows may be ahead of the own app."""
        return self.session.phase in WORKS and header.sequence_id <= self.session.fed_sequence_id

    def _problem(self, offer: Offer) -> str:
        """Why it can't be what the own app would have given, in words; "": it can."""
        header, last, outputs = offer.header, self.checkpoints.last, self.peers.outputs
        if header.sequence_id > self.log.durable_sequence_id:
            return f"it is behind record {header.sequence_id}, the log ends with {self.log.durable_sequence_id}"
        if last is None or header.sequence_id < last.sequence_id or header.checkpoint_id <= last.checkpoint_id:
            return "the log has a later one"
        if header.version != self.versions.current:
            return f"it is of version {header.version} of the app, which runs version {self.versions.current}"
        settled = last.sequence_id
        verdicts = [key for key in offer.verdicts if key[0] > settled]
        own = [key for key in self.failing.verdicts.known_until(header.sequence_id) if key[0] > settled]
        if verdicts != own:
            return f"messages have failed for one app and not for the other, up to record {header.sequence_id}"
        for name, mark in header.outputs.items():
            stream = outputs.get(name)
            position = 0 if stream is None else stream.position
            same = stream is None or mark.position < position or mark == stream.mark
            if mark.position > position or not same:
                return f"its app has made other calls to {name!r} up to message {mark.position}"
        for name, before in last.outputs.items():
            if name not in header.outputs or header.outputs[name].position < before.position:
                return f"it lacks calls to {name!r} that the checkpoint before it has"
        return ""

    def checked(self, event: ev.CheckpointChecked) -> bool:
        """Whether it was what is being read here."""
        if event.checkpoint_id != self._reading_id:
            return False
        self._reading_id = 0
        if self.stage is not Stage.READING or self._offer is None:
            pass  # it is not wanted any more
        elif event.problem is not None:
            self.give_up(event.problem)
        elif self.checkpoints.settled and not self.checkpoints.on_its_way:
            self._adopt(self._offer.header)
        else:  # the app is giving one, which is later
            self.give_up()
        return True

    def _adopt(self, header: CheckpointHeader) -> None:
        transaction = self.log.append_outside_record(0).transaction
        transaction.checkpoint = replace(header, time_ns=self.log.time_ns(self.turn.now_ns))
        transaction.adopts = True
        self.checkpoints.settled = False
        self.stage, self._offer = Stage.ADOPTED, None

    def durable(self, header: CheckpointHeader) -> None:
        self.stage = Stage.NOTHING
        self.checkpoints.wanted = False
        self.failing.checkpoint_adopted(header.sequence_id)
        self.turn.report(notices.CheckpointAdopted(header.checkpoint_id, header.sequence_id, header.size_bytes))

    def app_lost(self) -> None:
        """The own app is gone: what is due then the next one is asked for."""
        self.give_up()
        self.is_for_app = False
