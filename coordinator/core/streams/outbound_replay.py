"""The output streams while a replay makes their messages again: from what a checkpoint has of them to the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from immortal.coordinator.core.interfaces import ONESELF, CheckpointHeader, LogSummary, OutputMark, Transaction
from immortal.coordinator.core.streams.expected import Expected
from immortal.coordinator.core.streams.handshake import Handshake
from immortal.coordinator.core.streams.inbound import Inbound
from immortal.coordinator.core.streams.local_end import LocalEnd
from immortal.coordinator.core.streams.outbound import Outbound
from immortal.coordinator.core.streams.output_stream import OutputStream, StreamState
from immortal.coordinator.core.streams.receivers import Receivers
from immortal.protocol.client import CLIENTS


@dataclass(slots=True, eq=False, repr=False)
class OutboundReplay:
    """A replay begins with :meth:`restore`, and ends with :meth:`finish` or :meth:`heal_cut`.

    Of a log that another writes :meth:`log_grew` tells what is new, and :meth:`take_over` that it is ours now.
    """

    end: LocalEnd
    receivers: Receivers
    handshake: Handshake
    expected: Expected
    inbound: Inbound
    outbound: Outbound

    def restore(
        self, header: CheckpointHeader | None, summary: LogSummary, epoch: int, epoch_began_ns: int = 0
    ) -> None:
        """Output streams as they were at a checkpoint; replay and kept impulses continue them."""
        end, outbound, expected = self.end, self.outbound, self.expected
        end.epoch = epoch
        end.epoch_began_ns = epoch_began_ns
        end.catching_up = header is not None
        end.held = False
        self.receivers.load(summary.acknowledged)
        outbound.forget_streams()
        expected.begin(header, summary.spilled)
        outputs: Mapping[str, OutputMark] = header.outputs if header else {}
        impulses = summary.impulses_by_destination()
        for destination in sorted({*outputs, *impulses}):
            outbound.add(
                OutputStream(
                    destination,
                    end.limits,
                    mark=outputs.get(destination),
                    unacknowledged=header.unacknowledged.get(destination, ()) if header else (),
                    acknowledged=outbound.acknowledged(destination),
                    impulses=impulses.get(destination, ()),
                    attempt=epoch << 32,
                    check=expected.check(destination),
                    spilled=expected.take_spilled(destination),
                ),
            )

    def log_grew(self, summary: LogSummary) -> None:
        """The log that is followed is as ``summary`` says now: what is acknowledged there, or spilled, goes from memory
        here, and impulses have their places."""
        outbound = self.outbound
        self.receivers.load(summary.acknowledged)
        self.expected.spilled(summary.spilled)
        for destination, impulses in summary.impulses_by_destination().items():
            outbound.stream(destination).keep_impulses(impulses)
        for destination, stream in outbound.streams.items():
            stream.acknowledge(outbound.acknowledged(destination))
            stream.spilled_by_writer(summary.spilled.get(destination, ()))

    def take_over(self, epoch: int, epoch_began_ns: int) -> None:
        """The log was read to its end, and this epoch of ours is durable: what the app has made takes its place, and
        receivers are greeted."""
        end, outbound = self.end, self.outbound
        end.epoch, end.epoch_began_ns = epoch, epoch_began_ns
        end.following = False
        outbound.place_all()
        for destination, stream in outbound.streams.items():
            stream.attempt = epoch << 32
            if destination not in (ONESELF, CLIENTS):
                outbound.begin(stream)
        self._touch_all()

    def finish(self, *, all_sent: bool) -> None:
        """The app has replayed what it was to; :meth:`OutputStream.finish_replay`. Raises DivergenceError."""
        for destination, stream in self._all_at_end(catching_up=not all_sent):
            if all_sent:
                self._give_back_unmade(stream)
            stream.finish_replay(all_sent=all_sent)
            if destination not in (ONESELF, CLIENTS):
                self.receivers.note_acknowledged(stream)

    def heal_cut(self) -> Transaction:
        """As :meth:`finish`, where the log was cut; what must become durable before anything is sent."""
        transaction = Transaction(cut_healed=True)
        self.end.held = True
        for destination, stream in self._all_at_end(catching_up=False):
            end_position = stream.position
            rows, replaced = stream.heal_cut()
            transaction.impulses += rows
            transaction.impulses_removed += [(destination, position) for position in replaced]
            if destination not in (ONESELF, CLIENTS):
                transaction.spilled_ends[destination] = end_position
                self.receivers.note_acknowledged(stream)
        return transaction

    def _all_at_end(self, *, catching_up: bool) -> list[tuple[str, OutputStream]]:
        self._open_all_called()
        self._touch_all()
        self.end.catching_up = catching_up
        return [*self.outbound.streams.items()]

    def is_behind(self) -> bool:
        """The replay has not made yet all that the log's marks and kept impulses say that there was."""
        self._touch_all()
        streams = self.outbound.streams.values()
        kept = [stream.has_kept_impulses for stream in streams]  # all of them: a mark may wait for one
        return any(kept) or self.expected.has_more

    def unheard(self) -> list[str]:
        """The receivers that were called before and have not said yet how much they have."""
        self._open_all_called()
        streams = self.outbound.streams.items()
        return [destination for destination, stream in streams if stream.state is StreamState.GREETING]

    def _touch_all(self) -> None:
        self.outbound.busy.update(self.outbound.streams)

    def _open_all_called(self) -> None:
        """Streams that were used count as well if the replay does not call there at all."""
        called = [*self.receivers.acknowledged, *self.expected.destinations]
        own = self.inbound.streams.get(ONESELF)
        if own is not None and own.durable:
            called.append(ONESELF)
        for destination in called:
            self.outbound.stream(destination)

    def _give_back_unmade(self, stream: OutputStream) -> None:
        """The replay is complete, and the receiver has more: then this log is an older copy, and that stream stops."""
        known = self.receivers.acknowledged.get(stream.destination, 0)
        if stream.destination != ONESELF and known <= stream.end_of_replay < stream.acknowledged:
            received = stream.acknowledged - stream.offset
            stream.acknowledged = stream.end_of_replay
            self.handshake.fail_forked(stream, received)
