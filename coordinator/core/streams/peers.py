"""All streams of one instance: to others, from others, and to itself; what the machine asks, and which part does it."""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass, field

from immortal.coordinator.core.interfaces import LogSummary, SourcePosition, StreamStart
from immortal.coordinator.core.replay_check import ReplayPolicy
from immortal.coordinator.core.session import INTRODUCED
from immortal.coordinator.core.streams.delivery import Delivery
from immortal.coordinator.core.streams.expected import Expected
from immortal.coordinator.core.streams.followed import Followed
from immortal.coordinator.core.streams.handshake import Handshake
from immortal.coordinator.core.streams.inbound import Inbound
from immortal.coordinator.core.streams.intake import Intake
from immortal.coordinator.core.streams.local_end import LocalEnd
from immortal.coordinator.core.streams.outbound import Outbound
from immortal.coordinator.core.streams.outbound_replay import OutboundReplay
from immortal.coordinator.core.streams.receivers import Receivers
from immortal.coordinator.core.streams.reset import Reset
from immortal.protocol.messages import MessageType


@dataclass(eq=False, repr=False)
class Peers(LocalEnd):
    """Made of its parts, of which each knows only those above it."""

    policy: ReplayPolicy = field(kw_only=True)  # for what a replay makes
    intake: Intake = field(kw_only=True)
    committer_ids: dict[str, int] = field(init=False, default_factory=dict)  # of receivers, once seen
    starts: dict[str, StreamStart] = field(init=False, default_factory=dict)  # of the streams that were reset

    def __post_init__(self) -> None:
        self.delivery = Delivery(self.log, self.intake)
        self.inbound = inbound = Inbound(self, self.delivery)
        receivers = Receivers(self, self.committer_ids, self.starts)
        handshake = Handshake(self, receivers)
        expected = Expected(self, self.policy)
        self.followed = followed = Followed(self)
        self.outbound = outbound = Outbound(self, receivers, handshake, expected, inbound, self.intake, followed)
        replay = OutboundReplay(self, receivers, handshake, expected, inbound, outbound)
        reset = Reset(self, receivers, handshake, inbound, outbound, self.intake.open_calls)

        self.senders, self.grants, self.turns = inbound.senders, inbound.grants, inbound.turns
        self.inputs, self.input = inbound.streams, inbound.stream
        self.received = inbound.received
        self.take_turns = inbound.take_turns
        self.became_ready = inbound.became_ready
        self.answer_parked = inbound.answer_parked

        self.spilling = outbound.spilling
        self.outputs, self.output, self.busy = outbound.streams, outbound.stream, outbound.busy
        self.append, self.put_barrier = outbound.append, outbound.put_barrier
        self.place = outbound.place
        self.new_marks = outbound.new_marks
        self.send = outbound.send
        self.take_answers = outbound.take_answers
        self.answers_durable = outbound.answers_durable
        self.spilled_read = outbound.spilled_read
        self.replied = outbound.replied
        self.moved = outbound.moved
        self.retry_failed = outbound.retry_failed
        self.forget_outputs = outbound.forget

        self.restore = replay.restore
        self.expect = expected.record
        self.log_grew = replay.log_grew
        self.take_over = replay.take_over
        self.replay_is_behind = replay.is_behind
        self.unheard = replay.unheard
        self.finish_replay = replay.finish
        self.heal_cut = replay.heal_cut

        self.known = reset.known
        self.reset = reset.reset

    def load(self, summary: LogSummary) -> None:
        """What the log says of other instances, and of this one."""
        self.committer_id, self.epoch = summary.committer_id, summary.epoch
        self.ready = summary.extensions is not None
        self.app_asked_for(summary.extensions or frozenset())
        self.committer_ids.clear()
        self.committer_ids.update(summary.peers)
        self.starts.clear()
        self.starts.update(summary.stream_starts)
        self.senders.load(summary)

    def app_asked_for(self, extensions: Set[int]) -> None:
        """The log was begun with an app that asked for these ``extensions``."""
        self.app_speaks = not INTRODUCED.isdisjoint(extensions)
        self.app_takes_verdicts = MessageType.VERDICTS in extensions

    def became_durable(self, sources: Iterable[tuple[str, SourcePosition]], now_ns: int) -> None:
        """Records up to these positions are on disk: acknowledge them."""
        self.inbound.became_durable(sources, now_ns)
        self.outbound.own_became_durable()
