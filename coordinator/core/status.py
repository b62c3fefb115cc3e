"""Status of a running machine for operators, as plain values. Nothing here changes the machine."""

from __future__ import annotations

from collections.abc import Mapping

from immortal.coordinator.core.components import Components
from immortal.coordinator.core.interfaces import ONESELF
from immortal.coordinator.core.life_cycle.session import GETS_RECORDS, WORKS, Phase
from immortal.coordinator.core.peers import Peers
from immortal.coordinator.core.state import CoreState
from immortal.protocol.client_frames import CLIENTS
from immortal.protocol.messages import MessageType
from immortal.protocol.verdicts import MessageKey


class StatusView:
    """Status of the machine with these components."""

    def __init__(self, components: Components) -> None:
        self._components = components

    def peers(self) -> dict[str, dict[str, object]]:
        """Return the values for `immortal peers show`, by instance: the streams to and from each other one, and their
        errors. Positions are this log's."""
        peers, held_up_for = self._components.peers, self._components.back_pressure.held_up_for
        known = {*peers.outbound.streams, *peers.inbound.streams, *peers.outbound.receivers.committer_ids}
        names = sorted(known - {ONESELF, CLIENTS})
        return {name: _describe_peer(peers, name) | {"held_up": name in held_up_for} for name in names}

    def clients(self) -> dict[str, object]:
        """Return values about clients for the web page: their ``count``, and the CLIENTS_SHOWN_MAX last heard, newest
        first.

        ``owner``: whose keys the client uses; ``time_ns``: of its last request, since the Unix epoch.
        """
        table = self._components.clients.table
        found = [
            {
                "id": client_id,
                "owner": client.owner or None,
                "time_ns": client.time_ns,
                "requests": client.number,
                "open_requests": client.open_count,
                "replies": len(client.replies),
                "bytes": client.size_bytes,
            }
            for client_id, client in table.recently_used(CLIENTS_SHOWN_MAX)
        ]
        return {"count": len(table), "clients": found}

    @property
    def forbidden(self) -> Mapping[str, int]:
        """Number of calls since the start that were refused because the caller may not make them, by caller."""
        return self._components.call_failures.forbidden

    @property
    def refusals(self) -> Mapping[str, Mapping[str, int]]:
        """Number of refusals and other sanctions since the start, by kind and caller, for the audit log."""
        call_failures = self._components.call_failures
        return {
            "refused: a method that it may not call": self.forbidden,
            "refused: nested too deeply": call_failures.nested,
            "held back: too many calls": self._components.admission.permissions.held_back,
            "its call has ended the app's process": call_failures.penalties.deaths,
        }

    @property
    def letters(self) -> list[MessageKey]:
        """Keys of the kept dead letters, oldest first."""
        return list(self._components.call_failures.verdicts.letters)

    @property
    def can_hand_over(self) -> bool:
        """True if a follower could take over now: the app works, so all is in the log or can be made again from it."""
        return (
            self._components.state.write_lease.writes
            and self._components.state.session.phase in WORKS
            and not self._components.state.shutdown.is_requested
        )

    def long_handler_text(self, now_ns: int) -> str:
        """Describe the handler that has run for too long; "" if there is none."""
        return self._components.call_failures.poison_guard.long_handler_text(now_ns)

    def status(self, now_ns: int) -> dict[str, object]:
        """Return the values for `immortal status` of a live instance."""
        components, state, session = self._components, self._components.state, self._components.state.session
        write_lease, silent_ns, space = state.write_lease, state.log_requests.silent_since_ns, state.log_capacity.space
        return describe(state, components.peers, now_ns) | {
            "role": write_lease.role.value,
            "follows": write_lease.holder if write_lease.follows else None,
            "log_silent_s": None if silent_ns is None else round(max(0, now_ns - silent_ns) / 1e9, 3),
            "app_paused": components.back_pressure.paused,
            "held_up_for": [destination or state.name for destination in components.back_pressure.held_up_for],
            "log": {
                "used_bytes": space.used_bytes if space else None,
                "limit_bytes": state.limits.log_limit_bytes,
                "free_bytes": space.free_bytes if space else None,
                "full": state.log_capacity.full_reason or None,
                "pending_bytes": state.log.pending_bytes,  # on their way to the disk
            },
            **components.call_failures.describe(now_ns),
            **components.unsaved_state.describe(now_ns),
            **state.pause.describe(),
            "impulses": components.impulses.count,
            "nested": dict(components.call_failures.nested),
            "deaths_caused": components.call_failures.penalties.deaths,
            "held_back": dict(components.admission.permissions.held_back),
            "open_calls": components.admission.open_calls.counts,
            "clients": components.clients.describe() | components.queries.describe(),
            "version": state.versions.current,
            "app_version": session.description.version if MessageType.APP_DESCRIPTION in session.extensions else None,
            "upgrade_to": state.versions.upgrade_to,
        }


CLIENTS_SHOWN_MAX = 200


def describe(state: CoreState, peers: Peers, now_ns: int) -> dict[str, object]:
    """Describe the phase, sequence IDs, last checkpoint and streams. A stream to oneself has the own name."""
    name, session, log, checkpoint = state.name, state.session, state.log, state.checkpoints.last
    fed = session.fed_sequence_id if session.phase in GETS_RECORDS else -1
    return {
        "name": name,
        "phase": session.phase.value,
        "committer_id": state.committer_id,
        "epoch": state.epoch,
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
        "inputs": {
            source or name: {"position": stream.durable} | _granted(peers, source)
            for source, stream in peers.inbound.streams.items()
        },
        "outputs": {
            destination or name: {
                "position": stream.position,
                "acknowledged": stream.acknowledged,
                "waiting_bytes": stream.waiting_bytes,
                "memory_bytes": stream.memory_bytes,
                "spilled_bytes": stream.spilled_bytes,
                "window_bytes": stream.window_bytes,
                "state": stream.state.value,
                "error": stream.error or None,
            }
            for destination, stream in peers.outbound.streams.items()
            if destination != CLIENTS
        },
    }


def _granted(peers: Peers, source: str) -> dict[str, int]:
    granted_bytes = peers.inbound.grants.granted_bytes.get(source)
    return {} if granted_bytes is None else {"window_bytes": granted_bytes}


def _describe_peer(peers: Peers, name: str) -> dict[str, object]:
    output, source = peers.outbound.streams.get(name), peers.inbound.streams.get(name)
    start = peers.outbound.receivers.starts.get(name)
    return {
        "committer_id": peers.outbound.receivers.committer_ids.get(name)
        or (source.committer_id if source else 0)
        or None,
        "state": output.state.value if output else None,
        "made": output.position if output else None,
        "sent": (output.buffer.sent_position or output.acknowledged) if output else None,
        "acknowledged": output.acknowledged if output else None,
        "waiting_bytes": output.waiting_bytes if output else 0,
        "in_flight_bytes": output.buffer.in_flight_bytes if output else 0,
        "memory_bytes": output.memory_bytes if output else 0,
        "spilled_bytes": output.spilled_bytes if output else 0,
        "window_bytes": output.window_bytes if output else None,
        "granted_bytes": peers.inbound.grants.granted_bytes.get(name),
        "received": source.durable if source else None,
        "offset": start.offset if start else 0,
        "reset_pending": bool((start and start.pending) or (source and source.reset_pending)),
        "error": (output.error if output else "") or (source.error if source else "") or None,
    }
