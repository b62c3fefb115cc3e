"""`peers reset` on a log that no coordinator writes: what a running one does in Peers.reset, as one transaction."""

from __future__ import annotations

from dataclasses import replace

from msgspec import structs

from coordinator.core.interfaces import LogSummary, StreamStart, Transaction


def reset_transaction(summary: LogSummary, peer: str) -> Transaction | None:
    """What lets the streams from and to ``peer`` begin anew; None if the log knows nothing of it."""
    transaction = Transaction()
    source = summary.sources.get(peer)
    if source is not None:
        transaction.sources[peer] = structs.replace(source, epoch=-max(abs(source.epoch), 1))
    if peer in summary.peers:
        transaction.stream_starts[peer] = replace(summary.stream_starts.get(peer, StreamStart()), pending=True)
    return transaction if transaction.sources or transaction.stream_starts else None
