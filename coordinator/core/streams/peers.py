"""All streams of one instance: to others, from others, and to itself.

A stream to oneself is an output stream whose receiver is the own log: the machine moves its batches across.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from msgspec import Struct

from coordinator.core.effects import Effect, OpenPeer, ReadSpilled, ReplyToPeer, Report, ResetPeer, SendToPeer
from coordinator.core.group_commit import Group, GroupCommit
from coordinator.core.interfaces import (
    IMPULSES,
    ONESELF,
    CheckpointHeader,
    LogSummary,
    OutputBatch,
    OutputMark,
    SourcePosition,
    SpilledBatch,
    SpilledExtent,
    StreamStart,
    Transaction,
)
from coordinator.core.limits import Limits
from coordinator.core.output_check import OutputCheck
from coordinator.core.replay_check import ReplayPolicy, own_calls
from coordinator.core.streams import problems
from coordinator.core.streams.grants import Grants
from coordinator.core.streams.input_stream import InputStream
from coordinator.core.streams.intake import Intake
from coordinator.core.streams.output_stream import OutputStream, StreamState
from coordinator.core.streams.turns import Turns
from protocol.batch import encode_batch
from protocol.client import CLIENTS
from protocol.errors import RemoteProtocolError
from protocol.peer import KNOWN_TO_RECEIVERS, FrameType, PeerFrame, RefusedCode
from protocol.senders import from_peer_of_base_app
from protocol.trailer import BatchKind, BatchSource, Trailer


@dataclass(slots=True)
class _ParkedHello:
    token: object
    frame: PeerFrame


class _Reply(Struct):
    """What to answer a frame."""

    frame_type: FrameType
    position: int = 0
    code: RefusedCode = RefusedCode.NONE
    reason: str = ""


@dataclass(slots=True)
class Peers:
    """The streams, and what is known of the instances at their other ends."""

    name: str
    committer_id: int
    limits: Limits
    log: GroupCommit
    epoch: int
    effects: list[Effect]  # where effects go; the machine's
    ready: bool  # the instance has completed its first start
    committer_ids: dict[str, int]  # of receivers, once seen
    policy: ReplayPolicy  # for what a replay makes
    app_speaks: bool  # its calls and answers are as WIRE.md's part 4.1 says: who waits can be looked at
    intake: Intake
    starts: dict[str, StreamStart] = field(default_factory=dict)  # of the output streams that were reset
    outputs: dict[str, OutputStream] = field(default_factory=dict)
    inputs: dict[str, InputStream] = field(default_factory=dict)
    accepting: bool = True  # of new input; not while stopping
    log_full: str = ""  # why no input is taken from peers, in words; "" if it is
    trim_ticket: int = 0  # of the commit behind which spilled outputs can be removed from the log; 0: of none
    catching_up: bool = False  # a replay is making messages again: receivers may have more than there are yet
    epoch_began_ns: int = 0  # ns since the Unix epoch
    held: bool = False  # nothing is sent: what was put in place of a cut's losses is not durable yet
    held_ticket: int = 0  # of the last verdict's commit: what the app sends behind it waits for that
    wants_replies: bool = True  # something is held up until a receiver answers
    _checks: dict[str, OutputCheck] = field(default_factory=dict)  # of the replay, by destination
    _parked: dict[str, deque[_ParkedHello]] = field(default_factory=dict)  # by sender
    _known_acknowledged: dict[str, int] = field(default_factory=dict)
    _some_failed: bool = False  # since the start; most of the time none has
    waits_for_receiver: bool = False  # instead of spilling; to be looked at again after a while
    _moved: set[str] = field(default_factory=set)  # outputs that may have a new mark
    _spilled_before: dict[str, Sequence[SpilledExtent]] = field(default_factory=dict)  # of streams not made again yet
    _freed_bytes: int = 0  # spilled and acknowledged since trim_ticket
    _greeted: OrderedDict[str, None] = field(default_factory=OrderedDict)  # senders of which nothing was taken yet
    _refused: OrderedDict[str, str] = field(default_factory=OrderedDict)  # of senders without a stream: why
    _busy: dict[str, OutputStream] = field(default_factory=dict)  # all that are not idle are in it
    grants: Grants = field(init=False)
    turns: Turns = field(init=False)

    def __post_init__(self) -> None:
        self.grants = Grants(self.limits)
        self.turns = Turns(self.limits)

    def load_inputs(self, summary: LogSummary) -> None:
        for source, known in summary.sources.items():
            if source != IMPULSES:
                self.inputs[source] = InputStream(source, known)

    def input(self, source: str) -> InputStream:
        stream = self.inputs.get(source)
        if stream is None:
            stream = self.inputs[source] = InputStream(source, None)
        return stream

    # --- sending ---------------------------------------------------------------------------------------------------

    def restore(
        self, header: CheckpointHeader | None, summary: LogSummary, epoch: int, epoch_began_ns: int = 0
    ) -> None:
        """Output streams as they were at a checkpoint; replay and kept impulses continue them."""
        self.epoch = epoch
        self.epoch_began_ns = epoch_began_ns
        self.catching_up = header is not None
        for destination, position in summary.acknowledged.items():
            self._known_acknowledged[destination] = max(position, self._known_acknowledged.get(destination, 0))
        self._forget_streams()
        self._checks.clear()
        self.held = False
        outputs: Mapping[str, OutputMark] = header.outputs if header else {}
        if header is not None and self.policy.compares:
            self._checks = {name: OutputCheck(name, mark, self.policy.differs) for name, mark in outputs.items()}
        names = set(outputs) | {batch.destination for batch in summary.impulses}
        for destination in sorted(names):
            self._add_output(
                destination,
                OutputStream(
                    destination,
                    self.limits,
                    mark=outputs.get(destination),
                    unacknowledged=header.unacknowledged.get(destination, ()) if header else (),
                    acknowledged=self._acknowledged(destination),
                    impulses=[batch for batch in summary.impulses if batch.destination == destination],
                    attempt=epoch << 32,
                    check=self._check(destination),
                    spilled=summary.spilled.get(destination, ()),
                ),
            )
        self._spilled_before = {name: extents for name, extents in summary.spilled.items() if name not in names}

    def _check(self, destination: str) -> OutputCheck | None:
        """The check of a stream that a replay may fill."""
        if not (self.catching_up and self.policy.compares):
            return None
        return self._checks.setdefault(destination, OutputCheck(destination, differs=self.policy.differs))

    def expect(self, sequence_id: int, record: memoryview, trailer: Trailer) -> None:
        """A ``record`` to be replayed holds these marks. Raises DivergenceError where they do not fit the replay."""
        own = self._check(ONESELF) if self.policy.counts else None
        if own is not None:
            for calls in own_calls(record, trailer.batches):
                own.logged(calls)
        for mark in trailer.outputs:
            check = self._check(mark.destination)
            if check is not None:
                check.expect(sequence_id, OutputMark(mark.position, mark.checksum))
                check.compare()

    def _acknowledged(self, destination: str) -> int:
        if destination == ONESELF:
            return self.input(ONESELF).durable
        return self._known_acknowledged.get(destination, 0)

    def _add_output(self, destination: str, stream: OutputStream) -> OutputStream:
        self.outputs[destination] = self._busy[destination] = stream
        if destination in (ONESELF, CLIENTS):
            stream.state = StreamState.OPEN
        else:
            stream.offset = self._start(destination).offset
            self.effects.append(OpenPeer(destination))
            self._greet(stream)
        return stream

    def _start(self, destination: str) -> StreamStart:
        return self.starts.get(destination, StreamStart())

    def output(self, destination: str) -> OutputStream:
        """The stream to ``destination``, opened if it is new; the next :meth:`send` looks at it."""
        stream = self._touched(destination)
        if stream is not None:
            return stream
        acknowledged = self._acknowledged(destination)
        spilled = self._spilled_before.pop(destination, ())
        return self._add_output(
            destination,
            OutputStream(
                destination,
                self.limits,
                acknowledged=acknowledged,
                attempt=self.epoch << 32,
                check=self._check(destination),
                spilled=spilled,
                begins_now=not self.catching_up,
            ),
        )

    def _touched(self, destination: str) -> OutputStream | None:
        """The stream to ``destination``, if there is one, of which something is about to change."""
        stream = self.outputs.get(destination)
        if stream is not None:
            self._busy[destination] = stream
        return stream

    def _greet(self, stream: OutputStream) -> None:
        stream.state = StreamState.GREETING
        pending = self._start(stream.destination).pending
        stream.greeted_position = 0 if pending else stream.acknowledged - stream.offset
        frame = self._frame(
            FrameType.HELLO, stream.destination, position=stream.greeted_position, time_ns=self.epoch_began_ns
        )
        self.effects.append(SendToPeer(stream.destination, stream.attempt, frame))

    def _frame(
        self,
        frame_type: FrameType,
        receiver: str,
        position: int,
        *,
        count: int = 0,
        time_ns: int = 0,
        payload: bytes = b"",
        code: RefusedCode = RefusedCode.NONE,
        reason: str = "",
    ) -> PeerFrame:
        return PeerFrame(
            frame_type,
            self.name,
            receiver,
            self.committer_id,
            self.epoch,
            position,
            count,
            time_ns,
            payload,
            code,
            reason,
        )

    def append(self, destination: str, count: int, payload: bytes) -> None:
        self.intake.open_calls.answered(destination, payload)
        self.output(destination).append(count, payload, self.held_ticket)
        self._moved.add(destination)

    # --- what memory has no room for ---------------------------------------------------------------------------------

    def _spill(self, stream: OutputStream, now_ns: int) -> None:
        """To the log what has gathered, and back what there is room for again."""
        read = stream.next_read(self.log.durable_ticket)
        spill, limits = stream.spill, self.limits
        if read is not None:
            self.effects.append(ReadSpilled(stream.destination, *read))
        size_bytes = spill.gathered_bytes
        if size_bytes < limits.spill_row_bytes or self.kept_bytes + size_bytes > limits.spill_limit_bytes:
            return
        if self._slows_nobody(stream, now_ns) and stream.spill_credit_bytes < size_bytes:
            self.waits_for_receiver = True
            return
        stream.spill_credit_bytes = 0
        group = self.log.append_outside_record(size_bytes, from_app=True)
        group.transaction.spilled += [
            SpilledBatch(stream.destination, row.first_position, row.count, row.payload)
            for row in spill.store(group.ticket)
        ]

    def _slows_nobody(self, stream: OutputStream, now_ns: int) -> bool:
        """The app may as well wait for that receiver: it takes what it can, and nobody else could be sent to meanwhile.

        To spill would only make the disk slower, for both. What was spilled before goes on to shrink: half as much as
        was sent may be spilled anew.
        """
        recent_ns = self.limits.recent_ns
        if stream.state is not StreamState.OPEN or now_ns - stream.moved_on_ns >= recent_ns:
            return False
        if stream.spill.stored_bytes == 0:
            stream.spill_credit_bytes = 0
        return not any(
            other.destination not in (ONESELF, CLIENTS, stream.destination)
            and now_ns - other.called_ns < recent_ns
            and not other.spill.active
            for other in self.outputs.values()
        )

    def spilled_read(self, destination: str, first_position: int, batches: Sequence[OutputBatch]) -> None:
        stream = self._touched(destination)
        if stream is not None:
            stream.spilled_read(first_position, batches)

    @property
    def kept_bytes(self) -> int:
        """Spilled to the log and not acknowledged, all streams together."""
        return sum([stream.spill.kept_bytes for stream in self._busy.values()])

    @property
    def full(self) -> list[str]:
        """The destinations for which memory holds more than it may: what is spilled has reached its limit too."""
        return [destination for destination, stream in self._busy.items() if stream.memory_is_full]

    @property
    def spill_is_full(self) -> bool:
        return self.kept_bytes + self.limits.spill_row_bytes > self.limits.spill_limit_bytes

    def _freed(self, stream: OutputStream, size_bytes: int) -> None:
        """Let what was spilled and is acknowledged be removed from the log, a step's worth at a time."""
        self._freed_bytes += size_bytes
        if self._freed_bytes >= self.limits.spill_trim_bytes or not stream.spill.kept_bytes:
            self._freed_bytes = 0
            self.trim_ticket = self.log.append_outside_record(0).ticket

    def forget_outputs(self) -> None:
        """The app is gone: its outputs will come again, by replay."""
        for destination in self.outputs:
            if destination not in (ONESELF, CLIENTS):
                self.effects.append(ResetPeer(destination))
        self._forget_streams()

    def _forget_streams(self) -> None:
        for known in (self.outputs, self._busy, self._moved):
            known.clear()

    def finish_replay(self, *, all_sent: bool) -> None:
        """The app has replayed what it was to; :meth:`OutputStream.finish_replay`. Raises DivergenceError."""
        self._open_all_called()
        self._busy.update(self.outputs)
        self.catching_up = not all_sent
        for destination, stream in self.outputs.items():
            if all_sent:
                self._give_back_unmade(stream)
            stream.finish_replay(all_sent=all_sent)
            if destination not in (ONESELF, CLIENTS):
                self._note_acknowledged(stream)

    def heal_cut(self) -> Transaction:
        """As :meth:`finish_replay`, where the log was cut; what must become durable before anything is sent."""
        self._open_all_called()
        self._busy.update(self.outputs)
        self.catching_up = False
        self.held = True
        transaction = Transaction(cut_healed=True)
        for destination, stream in self.outputs.items():
            end = stream.position
            rows, replaced = stream.heal_cut()
            transaction.impulses += rows
            if destination not in (ONESELF, CLIENTS):
                transaction.spilled_ends[destination] = end
            transaction.impulses_removed += [(destination, position) for position in replaced]
            if destination not in (ONESELF, CLIENTS):
                self._note_acknowledged(stream)
        return transaction

    def replay_is_behind(self) -> bool:
        """The replay has not made yet all that the log's marks and kept impulses say that there was."""
        self._busy.update(self.outputs)
        kept = [stream.has_kept_impulses for stream in self.outputs.values()]  # all of them: a mark may wait for one
        return any(kept) or any(check.waits for check in self._checks.values())

    def unheard(self) -> list[str]:
        """The receivers that were called before and have not said yet how much they have."""
        self._open_all_called()
        return [destination for destination, stream in self.outputs.items() if stream.state is StreamState.GREETING]

    def _open_all_called(self) -> None:
        """Streams that were used count as well if the replay does not call there at all."""
        called = [*self._known_acknowledged, *self._checks, *self._spilled_before]
        if ONESELF in self.inputs and self.inputs[ONESELF].durable:
            called.append(ONESELF)
        for destination in called:
            self.output(destination)

    def send(self, now_ns: int) -> None:
        """Put on their way all batches that may go now; none before the first checkpoint is durable: they follow it."""
        if not self.ready or self.held:
            return
        durable_ticket = self.log.durable_ticket
        self.wants_replies = False
        self.waits_for_receiver = False
        for stream in self._busy.values():
            if stream.called:
                stream.called, stream.called_ns = False, now_ns
            if stream.moved_on:
                stream.moved_on, stream.moved_on_ns = False, now_ns
        for destination, stream in self._busy.items():
            if destination == CLIENTS:
                continue
            if stream.spill.active:
                self._spill(stream, now_ns)
            while (batch := stream.next_batch(durable_ticket)) is not None:
                if destination == ONESELF:
                    self._take_own(batch.first_position, batch.count, batch.payload, now_ns)
                    continue
                frame = self._frame(
                    FrameType.BATCH,
                    destination,
                    batch.first_position - stream.offset,
                    count=batch.count,
                    time_ns=now_ns,
                    payload=batch.payload,
                )
                self.effects.append(SendToPeer(destination, stream.attempt, frame))
            if destination != ONESELF and stream.wants_reply:
                self.wants_replies = True
        for destination in [destination for destination, stream in self._busy.items() if stream.is_idle]:
            del self._busy[destination]

    def take_answers(self) -> list[OutputBatch]:
        """The app's new answers to clients; under the same conditions as :meth:`send`."""
        stream = self.outputs.get(CLIENTS)
        return stream.take_all(self.log.durable_ticket) if stream is not None and self.ready and not self.held else []

    def answers_durable(self, position: int) -> None:
        """The replies up to this position of the stream to CLIENTS are in the log."""
        self._known_acknowledged[CLIENTS] = max(position, self._known_acknowledged.get(CLIENTS, 0))
        if (stream := self._touched(CLIENTS)) is not None:
            stream.acknowledge(position)

    def new_marks(self, ticket: int) -> dict[str, OutputMark]:
        """The marks of the output streams that have moved since this was last asked, for the commit ``ticket``.

        None from behind a verdict that only a later commit holds: without it a replay would make something else.
        """
        marks: dict[str, OutputMark] = {}
        if self.held_ticket > ticket:
            return marks
        for destination in sorted(self._moved):
            mark = self.outputs[destination].take_new_mark(ticket)
            if mark is not None:
                marks[destination] = mark
                self._moved.discard(destination)
        return marks

    def replied(self, destination: str, tag: int, frame: PeerFrame) -> None:
        """A receiver has answered."""
        stream = self._touched(destination)
        if stream is None or stream.state in (StreamState.CLOSED, StreamState.FAILED) or tag < stream.first_tag:
            return
        pending = self._start(destination).pending
        if frame.frame_type is FrameType.REFUSED:
            if tag == stream.attempt and (
                pending or frame.code == RefusedCode.NOT_ME or self._is_same_receiver(stream, frame)
            ):
                stream.forked = stream.forked or frame.code == RefusedCode.STALE_EPOCH
                full = frame.code == RefusedCode.LOG_FULL
                reason = problems.refused(self.name, destination, frame)
                self._fail(stream, reason, failure="log full" if full else "", level="warning" if full else "error")
            return
        if pending:
            if tag == stream.attempt and frame.frame_type is FrameType.WELCOME:
                self._note_window(stream, frame)
                self._begin_anew(stream, frame)
            return
        if not self._is_same_receiver(stream, frame):
            return
        position = frame.position + stream.offset
        if position > stream.sent_through and not self.catching_up:
            self._fail_forked(stream, frame.position)
            return
        if frame.frame_type in (FrameType.TRIM_TO, FrameType.WELCOME):
            self._note_window(stream, frame)
        if frame.frame_type is FrameType.TRIM_TO:
            self._acknowledge(stream, position)
        elif tag != stream.attempt:
            return
        elif frame.frame_type is FrameType.RESEND:
            stream.give_up_in_flight()
            # Late, or from an older copy of its log, or from one that has not heard of this stream: it will say.
            if position < stream.acknowledged or frame.position == 0:
                self._greet(stream)
        elif frame.frame_type is FrameType.WELCOME and stream.state is StreamState.GREETING:
            # Compared with what Hello said: an acknowledgement may have overtaken the Welcome since.
            if frame.position < stream.greeted_position and frame.code == RefusedCode.ROLLED_BACK:
                stream.reset()  # by the word of its operator, to whom alone the rest is lost
                self._begin_anew(stream, frame)
                return
            if frame.position < stream.greeted_position:
                once = stream.greeted_position
                self._fail(stream, problems.receiver_older(self.name, destination, frame.position, once))
                return
            stream.open()
            self._acknowledge(stream, position)

    def _note_window(self, stream: OutputStream, frame: PeerFrame) -> None:
        unsaid_bytes = min(self.limits.peer_window_bytes, self.limits.unsaid_window_bytes)
        stream.window_bytes = frame.count or unsaid_bytes

    def _fail_forked(self, stream: OutputStream, received: int) -> None:
        sent = stream.sent_through - stream.offset
        stream.forked = True
        reason = problems.own_log_older(self.name, stream.destination, received, sent)
        self._fail(stream, reason, failure="own log older")

    def _acknowledge(self, stream: OutputStream, position: int) -> None:
        freed_bytes = stream.acknowledge(position)
        if position <= stream.position:  # else the replay has not got there: whether it will is not known yet
            self._note_acknowledged(stream)
        if freed_bytes:
            self._freed(stream, freed_bytes)

    def _note_acknowledged(self, stream: OutputStream) -> None:
        destination, position = stream.destination, stream.acknowledged
        if position > self._known_acknowledged.get(destination, -1):
            self._known_acknowledged[destination] = position
            self.log.open.transaction.acknowledged[destination] = position

    def _give_back_unmade(self, stream: OutputStream) -> None:
        """The replay is complete, and the receiver has more: then this log is an older copy, and that stream stops."""
        known = self._known_acknowledged.get(stream.destination, 0)
        if stream.destination != ONESELF and known <= stream.end_of_replay < stream.acknowledged:
            received = stream.acknowledged - stream.offset
            stream.acknowledged = stream.end_of_replay
            self._fail_forked(stream, received)

    def _is_same_receiver(self, stream: OutputStream, frame: PeerFrame) -> bool:
        destination = stream.destination
        known = self.committer_ids.get(destination)
        if known is None:
            self.committer_ids[destination] = frame.committer_id
            group = self.log.append_outside_record(0)
            group.transaction.peers[destination] = frame.committer_id
        elif known != frame.committer_id:
            reason = problems.receiver_swapped(
                self.name, destination, known, frame.committer_id, stream.acknowledged, stream.position
            )
            self._fail(stream, reason, failure=f"committer {frame.committer_id}")
            return False
        return True

    def _fail(self, stream: OutputStream, reason: str, *, failure: str = "", level: str = "error") -> None:
        """``failure``: what it is about, where the reason has figures that change. The same one is told once."""
        told = stream.failure == (failure or reason)
        stream.failure = failure or reason
        stream.fail(reason)
        self._some_failed = True
        self.effects.append(ResetPeer(stream.destination))
        if not told:
            what = f"stream stopped: {reason}; its messages are kept"
            self.effects.append(Report(level, what, {"peer": stream.destination}, "stopped"))

    @property
    def any_failed(self) -> bool:
        return self._some_failed and any(stream.state is StreamState.FAILED for stream in self._busy.values())

    def retry_failed(self) -> None:
        """What stopped them may have been mended at the other end: ask again."""
        for stream in self._busy.values():
            if stream.state is StreamState.FAILED:
                self._greet(stream)

    def moved(self, destination: str) -> None:
        """Nothing of what is on its way there will arrive: ask how much has. A stopped stream waits for its turn."""
        stream = self._touched(destination)
        if stream is not None and stream.state in (StreamState.OPEN, StreamState.GREETING):
            stream.give_up_in_flight()
            self._greet(stream)

    # --- a peer with another log, by the operator's word -------------------------------------------------------------

    def known(self) -> list[str]:
        """The peers whose logs are known."""
        known = {name for name, stream in self.inputs.items() if stream.committer_id} | self.committer_ids.keys()
        return sorted(known - {ONESELF, IMPULSES})

    def reset(self, peer: str, *, forked: bool = False) -> Group | None:
        """Let the streams from and to ``peer`` begin anew with whatever log it has; the group that makes it durable.

        ``forked``: a copy of this log has sent something else. None if nothing is known of it.
        """
        source = self.inputs.get(peer)
        known_source = source is not None and source.committer_id != 0
        if peer in (ONESELF, IMPULSES) or not (known_source or peer in self.committer_ids):
            return None
        self.intake.open_calls.forget(peer)
        group = self.log.append_outside_record(0)
        if source is not None and known_source:
            group.transaction.sources[peer] = source.reset()
        if peer in self.committer_ids:
            self.starts[peer] = group.transaction.stream_starts[peer] = self._pending_start(peer, forked)
        stream = self._touched(peer)
        if stream is not None:
            known = self._known_acknowledged.get(peer, 0)  # more than that counts as far as it is made
            stream.acknowledged = max(known, min(stream.acknowledged, stream.position))
            stream.reset()
            self.effects.append(ResetPeer(peer))
            self._greet(stream)
        return group

    def _pending_start(self, peer: str, forked: bool) -> StreamStart:
        start, stream = self._start(peer), self.outputs.get(peer)
        forked = forked or (stream is not None and stream.forked)
        return replace(start, pending=True, forked=forked or (start.pending and start.forked))

    def _begin_anew(self, stream: OutputStream, frame: PeerFrame) -> None:
        """The receiver of a stream that was reset says how much it has: what it never acknowledged goes on behind that.

        Where it is the log that it was, with all that it had, and so is this one, nothing changes. Where this one is an
        older copy, what the receiver has beyond the acknowledged may be something else: all of it is sent.
        """
        destination = stream.destination
        position = frame.position + stream.offset
        # By numbers of which nothing was ever acknowledged, what a new log has is what late frames brought it.
        same = stream.acknowledged == stream.offset or self.committer_ids.get(destination) == frame.committer_id
        forked = self._start(destination).forked or frame.code == RefusedCode.STALE_EPOCH
        all_sent = position <= stream.sent_through or self.catching_up
        group = self.log.append_outside_record(0)
        if forked or not same or position < stream.acknowledged or not all_sent:
            position = stream.acknowledged
            stream.offset = position - frame.position
            self._known_acknowledged[destination] = group.transaction.acknowledged[destination] = position
        stream.forked = False
        self.starts[destination] = group.transaction.stream_starts[destination] = StreamStart(stream.offset)
        self.committer_ids[destination] = group.transaction.peers[destination] = frame.committer_id
        stream.open(group.ticket)
        self._acknowledge(stream, position)
        self.effects.append(
            Report(
                "warning",
                "the stream was reset and goes on",
                {"peer": destination, "behind_position": stream.acknowledged, "receiver_has": frame.position},
            )
        )

    # --- receiving -------------------------------------------------------------------------------------------------

    def received(self, token: object, frame: PeerFrame, now_ns: int) -> None:
        """A frame from a peer. While stopping, none is taken or answered: their senders keep them."""
        if not self.accepting:
            return
        self.grants.now_ns = now_ns
        if frame.frame_type is FrameType.HELLO and self._must_wait(frame.sender, now_ns):
            self._park(_ParkedHello(token, frame))
            return
        if frame.frame_type is FrameType.BATCH and self._waits_for_turn(token, frame, now_ns):
            return
        self._respond(token, frame, now_ns)

    def _waits_for_turn(self, token: object, frame: PeerFrame, now_ns: int) -> bool:
        """Whether a Batch is held back for others, or refused since its sender has too much here."""
        sender, size_bytes = frame.sender, len(frame.payload)
        stream = self.inputs.get(sender)
        if stream is None:
            return False
        self.turns.heard(sender, now_ns)
        if not self.turns.must_wait(sender, size_bytes, stream.pending_bytes, now_ns):
            return False
        count, waiting_bytes = self.turns.waiting_of(sender)
        here_bytes, allowed_bytes = stream.pending_bytes + waiting_bytes, self.grants.allowed_bytes(sender)
        refusal = None
        if stream.waiting_count + count >= self.limits.waiting_frames_max:
            refusal = self._too_many(stream, stream.waiting_count + count)
        elif here_bytes and here_bytes + size_bytes > allowed_bytes:
            refusal = self._too_much(stream, here_bytes, size_bytes, allowed_bytes)
        if refusal is None:
            self.turns.wait(token, frame)
        else:
            self._reply(token, sender, refusal)
        return True

    def take_turns(self, now_ns: int) -> None:
        """Take the batches that have their turn now. While stopping, none."""
        self.grants.now_ns = now_ns
        while self.accepting and (waiting := self.turns.next(self._pending_bytes, self.grants.allowed_bytes, now_ns)):
            self._respond(waiting.token, waiting.frame, now_ns)

    def _pending_bytes(self, sender: str) -> int:
        stream = self.inputs.get(sender)
        return 0 if stream is None else stream.pending_bytes

    def _must_wait(self, sender: str, now_ns: int) -> bool:
        return not self.ready or bool(self.intake.why_peer_waits(sender)) or self.intake.must_wait(sender, now_ns)

    @property
    def holds_back(self) -> bool:
        """Somebody may have to wait for its rate."""
        return bool(self._parked) and self.ready and self.intake.permissions.has_rates

    def _respond(self, token: object, frame: PeerFrame, now_ns: int) -> None:
        reply = self._refusal(frame) or self._answer(token, frame, now_ns)
        if reply is not None:
            self._reply(token, frame.sender, reply)

    def _park(self, hello: _ParkedHello) -> None:
        """Answer it once the first start is complete, and calls can be judged. What a sender said long before its
        newest needs no answer."""
        sender = hello.frame.sender
        if sender not in self._parked and len(self._parked) >= self.limits.parked_senders_max:
            self._reply(hello.token, sender, self._not_ready(self.intake.why_peer_waits(sender)))
            return
        parked = self._parked.setdefault(sender, deque(maxlen=self.limits.parked_hellos_max))
        parked.append(hello)

    def _not_ready(self, why: str = "") -> _Reply:
        reason = why or f"{self.name!r} has not completed its first start"
        return _Reply(FrameType.REFUSED, code=RefusedCode.NOT_READY, reason=reason)

    def _refusal(self, frame: PeerFrame) -> _Reply | None:
        if frame.frame_type is FrameType.UNKNOWN:
            reason = f"{frame.reason} is not known here: {KNOWN_TO_RECEIVERS}"
            return _Reply(FrameType.REFUSED, code=RefusedCode.UNKNOWN, reason=reason)
        if frame.receiver != self.name:
            return _Reply(
                FrameType.REFUSED,
                code=RefusedCode.NOT_ME,
                reason=f"this is {self.name!r}, the message is for {frame.receiver!r}",
            )
        if frame.sender in ("", IMPULSES, self.name) or frame.sender.startswith(CLIENTS):
            return _Reply(
                FrameType.REFUSED, code=RefusedCode.MALFORMED, reason=f"no peer can be called {frame.sender!r}"
            )
        known = self.inputs.get(frame.sender)
        stream = known or InputStream(frame.sender, None)  # kept if it is accepted
        refused = stream.refusal(frame)
        is_ahead = frame.frame_type is FrameType.HELLO and frame.position > stream.durable
        if refused is None and is_ahead and not stream.was_reset:
            refused = (
                RefusedCode.ROLLED_BACK,
                problems.has_less_than_once(self.name, frame.sender, stream.durable, frame.position),
            )
        if refused is None and self.log_full:
            refused = RefusedCode.LOG_FULL, self.log_full
        if refused is None:
            stream.error = ""
            if known is None and frame.frame_type is FrameType.HELLO:
                self._add_input(stream)
            return None
        code, reason = refused
        told, stream.error = stream.error == reason, reason
        if known is None:
            told = self._refused.pop(frame.sender, "") == reason
            self._refused[frame.sender] = reason
            if len(self._refused) > self.limits.refused_senders_max:
                self._refused.popitem(last=False)
        if code is RefusedCode.LOG_FULL:
            pass  # told once, for all peers
        elif code is not RefusedCode.STALE_EPOCH and not told:
            self.effects.append(Report("error", f"stream refused: {reason}", {"peer": frame.sender}, "refused"))
        elif frame.frame_type is FrameType.HELLO and not told:  # one that was late is no error: its sender knows
            text = problems.perhaps_older(self.name, frame.sender, reason)
            self.effects.append(Report("warning", f"stream refused: {text}", {"peer": frame.sender}, "refused"))
        return _Reply(FrameType.REFUSED, code=code, reason=reason)

    def _add_input(self, stream: InputStream) -> None:
        self.inputs[stream.source] = stream
        self._refused.pop(stream.source, None)
        self._greeted[stream.source] = None
        while len(self._greeted) > self.limits.greeted_senders_max:
            name, _ = self._greeted.popitem(last=False)
            if self.inputs[name].is_empty:
                del self.inputs[name]
                self.grants.forget(name)

    def _answer(self, token: object, frame: PeerFrame, now_ns: int) -> _Reply | None:
        stream = self.inputs.get(frame.sender) or InputStream(frame.sender, None)
        if stream.waiting_count >= self.limits.waiting_frames_max:
            return self._too_many(stream, stream.waiting_count)
        if frame.frame_type is FrameType.HELLO:
            if (known := stream.new_epoch()) is not None:
                self.log.append_outside_record(0).transaction.sources[frame.sender] = known
            if not stream.settled:  # the sender must hear of all that is taken, and nothing older be taken from now on
                stream.wait_for(stream.received, _ParkedHello(token, frame))
                return None
            code = RefusedCode.STALE_EPOCH if stream.forked else RefusedCode.NONE
            if frame.position > stream.durable:
                code = RefusedCode.ROLLED_BACK
            return _Reply(FrameType.WELCOME, stream.durable, code)
        if not self.ready:
            return self._not_ready()
        if frame.frame_type is not FrameType.BATCH:
            return _Reply(
                FrameType.REFUSED, code=RefusedCode.MALFORMED, reason=f"unexpected frame {frame.frame_type.name}"
            )
        if self.intake.why_peer_waits(frame.sender):
            return _Reply(FrameType.RESEND, 0)  # it greets again, and is answered once its calls can be judged
        if self.intake.is_full(frame.sender):
            return self._not_ready(f"{self.name!r} takes a checkpoint: too many calls that were refused are behind it")
        if frame.position > stream.received + 1 or not stream.has_greeted(frame.committer_id):
            return _Reply(FrameType.RESEND, stream.received)
        last_position = frame.position + frame.count - 1
        if last_position <= stream.durable:
            return _Reply(FrameType.TRIM_TO, stream.durable)
        try:
            part = stream.new_part(frame, stream.rules if self.app_speaks else from_peer_of_base_app)
        except RemoteProtocolError as error:
            return _Reply(FrameType.REFUSED, code=RefusedCode.MALFORMED, reason=str(error))
        if part is not None:
            first_position, count, payload = part
            allowed_bytes = self.grants.allowed_bytes(frame.sender)
            if stream.pending_bytes and stream.pending_bytes + len(payload) > allowed_bytes:
                return self._too_much(stream, stream.pending_bytes, len(payload), allowed_bytes)
            taken, end = self.intake.first_of(frame.sender, payload, count, now_ns)
            if taken:
                payload = payload if taken == count else payload[:end]
                group = self._log(stream, frame.sender, frame, first_position, taken, payload)
                self.turns.took(frame.sender, len(payload), group.ticket, now_ns)
            if taken < count:
                return _Reply(FrameType.RESEND, 0)  # it greets again, and is answered once it may call again
        stream.wait_for(last_position, token)
        self.grants.sent(frame.sender, now_ns)
        return None

    def _too_many(self, stream: InputStream, count: int) -> _Reply:
        return self._beyond_window(stream, f"{count} frames wait to be acknowledged")

    def _too_much(self, stream: InputStream, here_bytes: int, more_bytes: int, allowed_bytes: int) -> _Reply:
        on_its_way = f"{here_bytes} bytes wait for the disk and {more_bytes} more came"
        return self._beyond_window(stream, f"{on_its_way}; {allowed_bytes} were granted")

    def _beyond_window(self, stream: InputStream, reason: str) -> _Reply:
        if not stream.told_beyond:
            stream.told_beyond = True
            self.effects.append(
                Report("error", f"a frame was refused: {reason}; this is said once", {"peer": stream.source})
            )
        return _Reply(FrameType.REFUSED, code=RefusedCode.BEYOND_WINDOW, reason=reason)

    def _log(
        self, stream: InputStream, source: str, frame: PeerFrame, first_position: int, count: int, payload: bytes
    ) -> Group:
        front = encode_batch(payload, count)
        group = self.log.append(
            (front, payload) if front else (payload,),
            len(front) + len(payload),
            BatchSource(BatchKind.STREAM, source, first_position, count, frame.time_ns),
            from_app=source == ONESELF,
        )
        group.transaction.sources[source] = stream.take(frame, first_position + count - 1, len(payload))
        if source != ONESELF:
            self.intake.taken(group, payload, source, source)
        return group

    def _take_own(self, first_position: int, count: int, payload: bytes, now_ns: int) -> None:
        frame = self._frame(FrameType.BATCH, ONESELF, first_position, count=count, time_ns=now_ns)
        self._log(self.input(ONESELF), ONESELF, frame, first_position, count, payload)

    def _reply(self, token: object, receiver: str, reply: _Reply) -> None:
        window_bytes = 0
        if reply.frame_type in (FrameType.WELCOME, FrameType.TRIM_TO):
            window_bytes = self.grants.window_bytes(receiver, self.log.pending_bytes + self.turns.waiting_bytes)
        frame = self._frame(
            reply.frame_type,
            receiver,
            reply.position,
            count=window_bytes,
            code=reply.code,
            reason=reply.reason,
        )
        self.effects.append(ReplyToPeer(token, frame))

    def became_durable(self, sources: Iterable[tuple[str, SourcePosition]], now_ns: int) -> None:
        """Records up to these positions are on disk: acknowledge them."""
        self.grants.now_ns = now_ns
        for source, known in sources:
            stream = self.input(source) if source != IMPULSES else None
            if stream is None or known.committer_id != stream.committer_id:
                continue  # impulses; or of the log that its sender had before a reset
            position = known.position
            tokens = stream.became_durable(position, known.epoch)
            if source == ONESELF:
                if (own := self._touched(ONESELF)) is not None:
                    own.acknowledge(position)
                continue
            if self.accepting:
                for token in tokens:
                    if isinstance(token, _ParkedHello):
                        self._respond(token.token, token.frame, now_ns)
                    else:
                        self._reply(token, source, _Reply(FrameType.TRIM_TO, position))

    def became_ready(self, now_ns: int) -> None:
        """The first start is complete: answer who has asked meanwhile."""
        self.ready = True
        self.answer_parked(now_ns)

    def answer_parked(self, now_ns: int) -> None:
        """Those that need not wait any more."""
        parked, self._parked = self._parked, {}
        for hello in chain.from_iterable(parked.values()):
            self.received(hello.token, hello.frame, now_ns)
