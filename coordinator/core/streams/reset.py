"""A peer with another log, by the operator's word: `peers reset` and `peers reclaim`.

A running coordinator does it with its streams; on a log that nobody writes it is one transaction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec import structs
from msgspec.structs import replace

from immortal.coordinator.core.effects import ResetPeer
from immortal.coordinator.core.interfaces import IMPULSES, ONESELF, LogSummary, StreamStart, Transaction

if TYPE_CHECKING:  # commands need the transactions alone
    from immortal.coordinator.core.group_commit import Group
    from immortal.coordinator.core.open_calls import OpenCalls
    from immortal.coordinator.core.streams.handshake import Handshake
    from immortal.coordinator.core.streams.inbound import Inbound
    from immortal.coordinator.core.streams.local_end import LocalEnd
    from immortal.coordinator.core.streams.outbound import Outbound
    from immortal.coordinator.core.streams.receivers import Receivers

RECLAIM_EPOCHS = 1 << 20  # more than the starts and sessions of an app that a copy can have had meanwhile


def _pending(start: StreamStart, *, forked: bool) -> StreamStart:
    """That of a stream that is to begin anew."""
    return replace(start, pending=True, forked=forked or (start.pending and start.forked))


@dataclass(slots=True, eq=False, repr=False)
class Reset:
    """Of the streams of a running instance."""

    end: LocalEnd
    receivers: Receivers
    handshake: Handshake
    inbound: Inbound
    outbound: Outbound
    open_calls: OpenCalls

    def known(self) -> list[str]:
        """The peers whose logs are known."""
        known = {name for name, stream in self.inbound.streams.items() if stream.committer_id}
        return sorted((known | self.receivers.committer_ids.keys()) - {ONESELF, IMPULSES})

    def reset(self, peer: str, *, forked: bool = False) -> Group | None:
        """Let the streams from and to ``peer`` begin anew with whatever log it has; the group that makes it durable.

        ``forked``: a copy of this log has sent something else. None if nothing is known of it.
        """
        receivers, source = self.receivers, self.inbound.streams.get(peer)
        known_source = source is not None and source.committer_id != 0
        if peer in (ONESELF, IMPULSES) or not (known_source or peer in receivers.committer_ids):
            return None
        self.open_calls.forget(peer)
        group = self.end.log.append_outside_record(0)
        if source is not None and known_source:
            group.transaction.sources[peer] = source.reset()
        stream = self.outbound.touched(peer)
        if peer in receivers.committer_ids:
            forked = forked or (stream is not None and stream.forked)
            receivers.set_start(peer, _pending(receivers.start(peer), forked=forked), group)
        if stream is not None:
            known = receivers.acknowledged.get(peer, 0)  # more than that counts as far as it is made
            stream.acknowledged = max(known, min(stream.acknowledged, stream.position))
            stream.reset()
            self.end.effects.append(ResetPeer(peer))
            self.handshake.greet(stream)
        return group


def reset_transaction(summary: LogSummary, peer: str, *, forked: bool = False) -> Transaction | None:
    """What lets the streams from and to ``peer`` begin anew; None if the log knows nothing of it.

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
    """What makes this log the one that counts, where a copy of it has run: an epoch ahead of the copy's, and streams
    that begin anew behind what their receivers have."""
    transaction = Transaction(epoch=summary.epoch + RECLAIM_EPOCHS)
    for peer in {*summary.sources, *summary.peers} - {IMPULSES, ONESELF}:
        one = reset_transaction(summary, peer, forked=True)
        if one is not None:
            transaction.sources |= one.sources
            transaction.stream_starts |= one.stream_starts
    return transaction
