"""What there is to say of a live instance, in plain values."""

from __future__ import annotations

from coordinator.core.group_commit import GroupCommit
from coordinator.core.interfaces import ONESELF, CheckpointHeader
from coordinator.core.peers import Peers
from coordinator.core.session import GETS_RECORDS, AppSession, Phase
from protocol.client import CLIENTS


def describe(
    name: str,
    committer_id: int,
    epoch: int,
    session: AppSession,
    log: GroupCommit,
    peers: Peers,
    checkpoint: CheckpointHeader | None,
    now_ns: int,
) -> dict[str, object]:
    """Phase, sequence IDs, the last checkpoint, and each stream. Streams to and from oneself go by the own name."""
    fed = session.fed_sequence_id if session.phase in GETS_RECORDS else -1
    return {
        "name": name,
        "phase": session.phase.value,
        "committer_id": committer_id,
        "epoch": epoch,
        "sequence_id": log.durable_sequence_id,
        "fed_sequence_id": fed,
        "backlog_records": log.durable_sequence_id - fed,
        "unsent_bytes": session.unsent_bytes,
        "app_connected": session.phase not in (Phase.WAITING, Phase.STOPPED),
        "checkpoint": checkpoint
        and {
            "id": checkpoint.checkpoint_id,
            "sequence_id": checkpoint.sequence_id,
            "size_bytes": checkpoint.size_bytes,
            "age_s": round(max(0, now_ns - checkpoint.time_ns) / 1e9, 3),
        },
        "inputs": {source or name: {"position": stream.durable} for source, stream in peers.inputs.items()},
        "outputs": {
            destination or name: {
                "position": stream.position,
                "acknowledged": stream.acknowledged,
                "waiting_bytes": stream.waiting_bytes,
                "state": stream.state.value,
                "error": stream.error or None,
            }
            for destination, stream in peers.outputs.items()
            if destination != CLIENTS
        },
    }


def describe_peers(peers: Peers) -> dict[str, dict[str, object]]:
    """Each other instance by name: the streams to it and from it, and what is wrong with them. Positions are ours."""
    names = {*peers.outputs, *peers.inputs, *peers.committer_ids} - {ONESELF, CLIENTS}
    return {name: _describe_peer(peers, name) for name in sorted(names)}


def _describe_peer(peers: Peers, name: str) -> dict[str, object]:
    output, source = peers.outputs.get(name), peers.inputs.get(name)
    start = peers.starts.get(name)
    return {
        "committer_id": peers.committer_ids.get(name) or (source.committer_id if source else 0) or None,
        "state": output.state.value if output else None,
        "made": output.position if output else None,
        "sent": output.sent if output else None,
        "acknowledged": output.acknowledged if output else None,
        "waiting_bytes": output.waiting_bytes if output else 0,
        "in_flight_bytes": output.in_flight_bytes if output else 0,
        "window_bytes": peers.limits.peer_window_bytes,
        "received": source.durable if source else None,
        "offset": start.offset if start else 0,
        "reset_pending": bool((start and start.pending) or (source and source.reset_pending)),
        "error": (output.error if output else "") or (source.error if source else "") or None,
    }
