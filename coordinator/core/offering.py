"""A checkpoint that a follower takes, for the one that writes the log.

    NOTHING --CheckpointAsked, the app follows--> ASKED --the app's blob begins--> COMING --it is whole--> WHOLE
       ^                                            '--- nobody wants it any more ---> UNWANTED              |
       '------------ offered: the log's marks have shown that the app made the same -------------------------'

The state is that behind the last record that the app was given as it was asked, which the log has. What stands in the
header of the output streams is known later: a follower's calls have their places once the log has marks of them, and by
these it is known that the calls are the writer's. So what an app that has diverged would give is never offered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from msgspec.structs import replace

from immortal.coordinator.core import events as ev
from immortal.coordinator.core import notices
from immortal.coordinator.core.app_outbox import AppOutbox
from immortal.coordinator.core.checkpoint_writer import CheckpointWriter
from immortal.coordinator.core.checkpointing import Checkpointing
from immortal.coordinator.core.effects import OfferCheckpoint, OfferChunk
from immortal.coordinator.core.failing import Failing
from immortal.coordinator.core.group_commit import GroupCommit
from immortal.coordinator.core.interfaces import Offer
from immortal.coordinator.core.limits import Limits
from immortal.coordinator.core.replay_check import ReplayPolicy
from immortal.coordinator.core.right import Right
from immortal.coordinator.core.session import AppSession, Phase
from immortal.coordinator.core.streams.followed import Cut
from immortal.coordinator.core.streams.intake import Intake
from immortal.coordinator.core.streams.peers import Peers
from immortal.coordinator.core.turn import Turn
from immortal.coordinator.core.versions import Versions
from immortal.protocol.messages import MessageType


class Stage(Enum):
    NOTHING = "nothing was asked of the app"
    ASKED = "the app was asked"
    COMING = "the app's state comes"
    UNWANTED = "it comes, or will, and nobody wants it"
    WHOLE = "it is in the log, and not offered yet"


_OWED = frozenset({Stage.ASKED, Stage.COMING, Stage.UNWANTED})
"""The app is still to send it, or the rest of it."""


@dataclass(slots=True, eq=False, repr=False)
class Offering:
    """``takes_blob``: the next one of the app is this, or the one that comes is."""

    turn: Turn
    right: Right
    outbox: AppOutbox
    session: AppSession
    log: GroupCommit
    peers: Peers
    intake: Intake
    failing: Failing
    checkpoints: Checkpointing
    versions: Versions
    policy: ReplayPolicy
    limits: Limits
    stage: Stage = Stage.NOTHING
    takes_blob: bool = False
    waits: bool = False  # :meth:`go_on` may have something to do
    _wanted: ev.CheckpointAsked | None = None  # the app is still to be asked for it
    _asked: ev.CheckpointAsked | None = None  # what the app gives is for this
    _sequence_id: int = -1
    _writer: CheckpointWriter | None = None
    _chunks_waiting: int = 0  # handed to the log, not answered
    _cut: Cut = field(default_factory=Cut)
    _open_calls: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def _reach(self, stage: Stage) -> None:
        self.stage = stage
        self.takes_blob = stage in _OWED
        self.waits = self._wanted is not None or stage is Stage.WHOLE

    # --- who asks ----------------------------------------------------------------------------------------------------

    def asked(self, event: ev.CheckpointAsked) -> None:
        """One that was asked for before is not wanted any more."""
        self._forget()
        self._wanted = event if self.right.follows and not self.right.is_granted else None
        self._reach(self.stage)

    def _forget(self) -> None:
        self._wanted = self._asked = self._writer = None
        self._cut = Cut()
        self._reach(Stage.UNWANTED if self.takes_blob else Stage.NOTHING)

    def took_over(self) -> None:
        """There is nobody any more whom it could be given to."""
        self._forget()

    def app_lost(self) -> None:
        self.takes_blob = False
        self._forget()

    def go_on(self) -> None:
        """What has become possible."""
        if self._wanted is not None and self.stage is Stage.NOTHING and self._may_ask_app:
            self._asked, self._wanted = self._wanted, None
            self._sequence_id = self.session.fed_sequence_id
            self._reach(Stage.ASKED)
            self.outbox.control(MessageType.TAKE_CHECKPOINT)
        elif self.stage is Stage.WHOLE and self._is_known:
            self._offer()

    @property
    def _may_ask_app(self) -> bool:
        """Not one that has just repeated an upgrade, and got no record since: it would take itself for primary. Nor one
        whose calls nobody compares."""
        session = self.session
        is_able = session.phase is Phase.FOLLOWING and not session.refused and not session.waits_for_hello
        has_record = session.fed_sequence_id > session.upgraded_sequence_id
        return is_able and self.peers.following and has_record and self.policy.compares

    # --- the app's answer --------------------------------------------------------------------------------------------

    def began(self) -> None:
        if self._asked is None:
            return
        self._cut = self.peers.followed.cut(self.peers.outputs)
        self._open_calls = self.intake.open_calls.open_at(self._sequence_id)
        self._chunks_waiting = 0
        self._writer = CheckpointWriter(
            self._asked.checkpoint_id,
            self._sequence_id,
            self.versions.current,
            {},
            {},
            self._open_calls,
            self.limits.chunk_size_bytes,
        )
        self._reach(Stage.COMING)

    def came(self, data: bytes, *, last: bool) -> None:
        if self._writer is not None:
            chunk = self._writer.receive(data, last=last)
            if chunk is not None:
                self._chunks_waiting += 1
                self.checkpoints.chunks_pending_bytes += len(chunk.data)
                self.turn.effects.append(OfferChunk(chunk.checkpoint_id, chunk.index, chunk.data))
        if last:
            self._reach(Stage.NOTHING if self._writer is None else Stage.WHOLE)

    def failed(self) -> None:
        """The app has none to give."""
        wanted, self.takes_blob = self._wanted, False
        self._forget()
        self._wanted = wanted
        self._reach(Stage.NOTHING)

    def chunk_offered(self, event: ev.ChunkOffered) -> None:
        self.checkpoints.chunks_pending_bytes -= event.size_bytes
        if self._asked is None or event.checkpoint_id != self._asked.checkpoint_id:
            return
        self._chunks_waiting -= 1
        if event.problem:
            self.turn.report(notices.OfferRefused(event.checkpoint_id, event.problem))
            self._forget()

    # --- the offer ---------------------------------------------------------------------------------------------------

    @property
    def _is_known(self) -> bool:
        """All of it is in the log, and what the app has made up to there is known to be what the writer's app made."""
        if self._chunks_waiting or self._cut.waits_for or not self.failing.agrees_up_to(self._sequence_id):
            return False
        outputs = self.peers.outputs
        return all(outputs[name].has_confirmed(mark) for name, mark in self._cut.outputs.items())

    def _offer(self) -> None:
        asked, writer, cut = self._asked, self._writer, self._cut
        if asked is None or writer is None:
            return
        header = writer.header(self.log.time_ns(self.turn.now_ns))
        header = replace(header, outputs=cut.outputs, unacknowledged=cut.unacknowledged)
        verdicts = self.failing.verdicts.known_until(self._sequence_id)
        self.turn.effects.append(OfferCheckpoint(Offer(asked.epoch, header, verdicts)))
        self.turn.report(notices.CheckpointOffered(header.checkpoint_id, header.sequence_id, header.size_bytes))
        self._forget()
