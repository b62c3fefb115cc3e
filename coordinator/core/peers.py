"""All streams of one instance: to other instances, from them, and to itself. Resets of streams."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msgspec import structs
from msgspec.structs import replace

from immortal.coordinator.core import events as ev
from immortal.coordinator.core import notices
from immortal.coordinator.core.effects import PeerResetDone, ResetPeer
from immortal.coordinator.core.input.admission import Admission, Delivery
from immortal.coordinator.core.input.inbound import Inbound
from immortal.coordinator.core.interfaces import (
    IMPULSES,
    ONESELF,
    CheckpointHeader,
    LogSummary,
    OutputMark,
    SourcePosition,
    StreamStart,
    Token,
    Transaction,
)
from immortal.coordinator.core.life_cycle.session import INTRODUCED
from immortal.coordinator.core.output.outbound import Outbound
from immortal.coordinator.core.output.output_stream import OutputStream, StreamState
from immortal.coordinator.core.output.replay_check import ReplayPolicy
from immortal.coordinator.core.state import CoreState
from immortal.protocol.client_frames import CLIENTS
from immortal.protocol.messages import MessageType

if TYPE_CHECKING:
    from immortal.coordinator.core.group_commit import Group


class Peers:
    """Streams of one instance, built of parts; each part knows only the parts before it."""

    def __init__(self, state: CoreState, admission: Admission) -> None:
        self.admission = admission
        self.policy = ReplayPolicy(state)  # for outputs of a replay
        self.delivery = Delivery(state, admission)
        self.inbound = Inbound(state, self.delivery)
        self.outbound = Outbound(state, self.inbound, self.policy, admission.open_calls)
        self.replay = OutboundReplay(state, self.outbound)
        self._state = state

    def load(self, summary: LogSummary) -> None:
        """Load what the log has about other instances and this one."""
        self._state.ready = summary.extensions is not None
        self.set_app_extensions(summary.extensions or frozenset())
        self.outbound.receivers.committer_ids = dict(summary.peers)
        self.outbound.receivers.starts = dict(summary.stream_starts)
        self.inbound.senders.load(summary)

    def set_app_extensions(self, extensions: Set[int]) -> None:
        """Note the ``extensions`` that the app which began the log asked for."""
        self._state.app_knows_extensions = not INTRODUCED.isdisjoint(extensions)
        self._state.app_accepts_verdicts = MessageType.VERDICTS in extensions

    def became_durable(self, sources: Iterable[tuple[str, SourcePosition]]) -> None:
        """Acknowledge records up to these positions, which are on disk."""
        self.inbound.became_durable(sources)
        self.outbound.acknowledge_own_stream()


# Replay of the output streams, from a checkpoint to the end of the log.


@dataclass(slots=True, eq=False, repr=False)
class OutboundReplay:
    """Replay of the output streams: begins with :meth:`restore`, ends with :meth:`finish` or :meth:`heal_cut`.

    For a log that another process writes, :meth:`log_grew` adds news, and :meth:`take_over` makes this the writer.
    """

    state: CoreState
    outbound: Outbound

    def restore(self, header: CheckpointHeader | None, summary: LogSummary) -> None:
        """Restore the output streams of a checkpoint; replay and kept impulses continue them."""
        state, outbound, expected = self.state, self.outbound, self.outbound.expected
        state.use_epoch()
        state.catching_up = header is not None
        state.outputs_held = False
        self.outbound.receivers.load(summary.acknowledged)
        outbound.forget_streams()
        expected.restart(header, summary.spilled)
        outputs: Mapping[str, OutputMark] = header.outputs if header else {}
        impulses = summary.impulses_by_destination()
        for destination in sorted({*outputs, *impulses}):
            outbound.add(
                OutputStream(
                    destination,
                    state.limits,
                    mark=outputs.get(destination),
                    unacknowledged=header.unacknowledged.get(destination, ()) if header else (),
                    acknowledged=outbound.acknowledged(destination),
                    impulses=impulses.get(destination, ()),
                    attempt=state.epoch << 32,
                    check=expected.check(destination),
                    spilled=expected.pop_spilled(destination),
                ),
            )

    def log_grew(self, summary: LogSummary) -> None:
        """Note the new state of the followed log, ``summary``: acknowledged or spilled outputs leave memory here, and
        impulses get their positions."""
        outbound = self.outbound
        self.outbound.receivers.load(summary.acknowledged)
        self.outbound.expected.set_spilled(summary.spilled)
        for destination, impulses in summary.impulses_by_destination().items():
            outbound.stream(destination).keep_impulses(impulses)
        for destination, stream in outbound.streams.items():
            stream.acknowledge(outbound.acknowledged(destination))
            stream.spilled_by_writer(summary.spilled.get(destination, ()))

    def take_over(self) -> None:
        """Place the app's outputs and greet receivers: the log was read to its end, and the own epoch is durable."""
        state, outbound = self.state, self.outbound
        state.use_epoch()
        state.following = False
        outbound.followed.place_all(outbound.streams)
        for destination, stream in outbound.streams.items():
            stream.attempt = state.epoch << 32
            if destination not in (ONESELF, CLIENTS):
                outbound.connect(stream)
        self._touch_all()

    def finish(self, *, all_sent: bool) -> None:
        """End the replay; see :meth:`OutputStream.finish_replay`. Raises DivergenceError."""
        for destination, stream in self._all_at_end(catching_up=not all_sent):
            known = self.outbound.receivers.acknowledged.get(destination, 0)
            if all_sent and destination != ONESELF and known <= stream.end_of_replay < stream.acknowledged:
                # Its receiver has more than the complete replay made: this log is an older copy.
                received = stream.acknowledged - stream.offset
                stream.acknowledged = stream.end_of_replay
                self.outbound.handshake.fail_forked(stream, received)
            stream.finish_replay(all_sent=all_sent)
            if destination not in (ONESELF, CLIENTS):
                self.outbound.receivers.note_acknowledged(stream)

    def heal_cut(self) -> Transaction:
        """End the replay of a log that was cut. Return the transaction that must be durable before anything is sent."""
        transaction = Transaction(cut_healed=True)
        self.state.outputs_held = True
        for destination, stream in self._all_at_end(catching_up=False):
            end_position = stream.position
            rows, replaced = stream.heal_cut()
            transaction.impulses += rows
            transaction.impulses_removed += [(destination, position) for position in replaced]
            if destination not in (ONESELF, CLIENTS):
                transaction.spilled_ends[destination] = end_position
                self.outbound.receivers.note_acknowledged(stream)
        return transaction

    def _all_at_end(self, *, catching_up: bool) -> list[tuple[str, OutputStream]]:
        self._open_all_called()
        self._touch_all()
        self.state.catching_up = catching_up
        return [*self.outbound.streams.items()]

    def is_behind(self) -> bool:
        """Return True if the replay must still make outputs that marks or kept impulses prove."""
        self._touch_all()
        streams = self.outbound.streams.values()
        kept = [stream.has_kept_impulses for stream in streams]  # ask all of them: a mark can wait for an impulse
        return any(kept) or self.outbound.expected.has_more

    def unanswered_receivers(self) -> list[str]:
        """Return the known receivers that have not said yet how much they have."""
        self._open_all_called()
        streams = self.outbound.streams.items()
        return [destination for destination, stream in streams if stream.state is StreamState.GREETING]

    def _touch_all(self) -> None:
        self.outbound.busy.update(self.outbound.streams)

    def _open_all_called(self) -> None:
        """Open all streams that were ever used, also those without a call in the replay."""
        called = [*self.outbound.receivers.acknowledged, *self.outbound.expected.destinations]
        own = self.outbound.inbound.streams.get(ONESELF)
        if own is not None and own.durable:
            called.append(ONESELF)
        for destination in called:
            self.outbound.stream(destination)


# Resets of streams for a peer with another log, by an operator: `peers reset` and `peers reclaim`.
#
# A running coordinator resets its own streams. Without one, a single transaction changes the log.


RECLAIM_EPOCHS = 1 << 20  # more than the epochs that a running copy can have used meanwhile


def _pending(start: StreamStart, *, forked: bool) -> StreamStart:
    """Return ``start`` for a stream that begins anew."""
    return replace(start, pending=True, forked=forked or (start.pending and start.forked))


def reset_transaction(summary: LogSummary, peer: str, *, forked: bool = False) -> Transaction | None:
    """Return the transaction that restarts the streams from and to ``peer``; None if the log does not know it.

    ``forked``: a copy of this log has sent something else (StreamStart).
    """
    transaction = Transaction()
    source = summary.sources.get(peer)
    if source is not None:
        transaction.sources[peer] = structs.replace(source, epoch=-max(abs(source.epoch), 1))
    if peer in summary.peers:
        start = summary.stream_starts.get(peer, StreamStart())
        transaction.stream_starts[peer] = _pending(start, forked=forked)
    return transaction if transaction.sources or transaction.stream_starts else None


def reclaim_transaction(summary: LogSummary) -> Transaction:
    """Return the transaction that makes this log the valid one after a copy of it has run: with an epoch ahead of the
    copy's, and streams that restart after what their receivers have."""
    transaction = Transaction(epoch=summary.epoch + RECLAIM_EPOCHS)
    for peer in {*summary.sources, *summary.peers} - {IMPULSES, ONESELF}:
        one = reset_transaction(summary, peer, forked=True)
        if one is not None:
            transaction.sources |= one.sources
            transaction.stream_starts |= one.stream_starts
    return transaction


# Operators' resets while the coordinator runs: of one peer's streams, or of all after a copy of the log has run.
# Each is answered once it is durable.


@dataclass(slots=True, eq=False, repr=False)
class PeerResets:
    """Resets of streams on an operator's request, while the coordinator runs."""

    state: CoreState
    peers: Peers
    _reclaims: deque[tuple[int, Token]] = field(default_factory=deque)  # (commit of their epoch, token)

    def peer_reset(self, event: ev.PeerReset) -> None:
        group = self._reset(event.peer)
        if group is None:
            self.state.effects.append(PeerResetDone(event.token, False))
            return
        self.state.answer_after(group.ticket, PeerResetDone(event.token, True))
        self.state.report(notices.PeerForgotten(event.peer))

    def reclaimed(self, event: ev.Reclaimed) -> None:
        """Begin an epoch ahead of the copy's; the streams are reset once it is durable."""
        self._reclaims.append((self.state.begin_epoch(ahead=RECLAIM_EPOCHS), event.token))

    def committed(self, ticket: int) -> None:
        """Continue the resets whose epochs are durable, up to the commit ``ticket``."""
        while self._reclaims and self._reclaims[0][0] <= ticket:
            self._reset_all(self._reclaims.popleft()[1])

    def _reset_all(self, token: Token) -> None:
        state = self.state
        state.use_epoch()
        group = state.log.append_outside_record(0)
        known = {name for name, stream in self.peers.inbound.streams.items() if stream.committer_id}
        known |= self.peers.outbound.receivers.committer_ids.keys()
        for peer in sorted(known - {ONESELF, IMPULSES}):
            group = self._reset(peer, forked=True) or group
        state.answer_after(group.ticket, PeerResetDone(token, True))
        state.report(notices.LogReclaimed(state.epoch))

    def _reset(self, peer: str, *, forked: bool = False) -> Group | None:
        """Restart the streams from and to ``peer``, whatever log it has. Return the group that makes this durable.

        ``forked``: a copy of this log has sent something else. Returns None if the log does not know the peer.
        """
        receivers, source = self.peers.outbound.receivers, self.peers.inbound.streams.get(peer)
        known_source = source is not None and source.committer_id != 0
        if peer in (ONESELF, IMPULSES) or not (known_source or peer in receivers.committer_ids):
            return None
        self.peers.admission.open_calls.forget(peer)
        group = self.state.log.append_outside_record(0)
        if source is not None and known_source:
            group.transaction.sources[peer] = source.reset()
        stream = self.peers.outbound.touch(peer)
        if peer in receivers.committer_ids:
            forked = forked or (stream is not None and stream.forked)
            receivers.set_start(peer, _pending(receivers.start(peer), forked=forked), group)
        if stream is not None:
            known = receivers.acknowledged.get(peer, 0)  # a higher position counts only as far as it is made
            stream.acknowledged = max(known, min(stream.acknowledged, stream.position))
            stream.reset()
            self.state.effects.append(ResetPeer(peer))
            self.peers.outbound.handshake.greet(stream)
        return group
