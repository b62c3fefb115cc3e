"""`peers reset` and `peers reclaim` on a log that no coordinator writes: what a running one does in Peers, as one
transaction."""

from __future__ import annotations

from dataclasses import replace

from msgspec import structs

from coordinator.core.interfaces import IMPULSES, ONESELF, LogSummary, StreamStart, Transaction

RECLAIM_EPOCHS = 1 << 20  # more than the starts and sessions of an app that a copy can have had meanwhile


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
        transaction.stream_starts[peer] = replace(
            start, pending=True, forked=forked or (start.pending and start.forked)
        )
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
