"""Feeding the app: its checkpoint's blob and the log's records, as far as it may have them and has room."""

from __future__ import annotations

from dataclasses import dataclass

from immortal.coordinator.core import events as ev
from immortal.coordinator.core.effects import ReadRecords
from immortal.coordinator.core.group_commit import Group
from immortal.coordinator.core.life_cycle.recovery import BEHIND, Lifecycle
from immortal.coordinator.core.life_cycle.session import (
    GETS_RECORDS,
    RECOVERED,
    RECOVERING,
    REPLAYS,
    WORKS,
    Phase,
    Step,
)
from immortal.coordinator.core.peers import Peers
from immortal.coordinator.core.state import CoreState
from immortal.protocol.record import decode_header
from immortal.protocol.trailer import decode_trailer


@dataclass(slots=True, eq=False, repr=False)
class RecordFeeder:
    state: CoreState
    peers: Peers
    lifecycle: Lifecycle

    def feed(self) -> None:
        """Give the app what it may have and has room for."""
        state, session = self.state, self.state.session
        if session.phase in RECOVERING:
            if not self._recover():
                return
            if session.phase is Phase.FOLLOWING and not state.write_lease.writes:
                if state.write_lease.follows and not state.write_lease.is_granted:
                    self._read()  # to its end, and what comes behind it
                return
        elif session.reading or self._takes_none:
            return
        if (
            session.fed_sequence_id < state.log.durable_sequence_id  # most of the time it has all of them
            and session.phase in GETS_RECORDS
            and not session.reading
            and session.fed_sequence_id < self._last_sequence_id()
        ):
            self._read()
        if session.acceptances:
            state.outbox.send_acceptances()

    def _read(self) -> None:
        session = self.state.session
        session.reading = True
        first = session.fed_sequence_id + 1
        self.state.effects.append(ReadRecords(first, self.state.limits.read_size_bytes, session.number))

    def _recover(self) -> bool:
        """Go on with the recovery; return whether the app may be given more in this turn."""
        session = self.state.session
        if session.phase is Phase.LOADING:
            self.lifecycle.load_if_due()
            return False
        if session.refused:
            return False
        gets_none = session.reading or self._takes_none or session.waits_for_hello
        if (
            gets_none
            and session.phase in REPLAYS
            and self.state.write_lease.follows
            and self.peers.outbound.spilling.full
        ):
            self.lifecycle.reload_if_due()
        if session.reading or self._takes_none:
            return False
        if session.phase is Phase.RESTORING:
            self._read_blob()
        if session.phase in REPLAYS:
            self.lifecycle.check_writer()
            if session.waits_for_hello:
                return False
            self.lifecycle.send_introduction()
            self.lifecycle.end_replay_if_due()
        return True

    @property
    def _takes_none(self) -> bool:
        """True if the app has enough to read, has its last checkpoint to take, or is paused."""
        state = self.state
        return (
            state.session.unsent_bytes >= state.limits.app_window_bytes
            or state.shutdown.feeds_no_more
            or state.pause.is_paused
        )

    def _last_sequence_id(self) -> int:
        """Return the last record that the app may be given now."""
        state, session = self.state, self.state.session
        if self.lifecycle.proof is BEHIND:
            return session.replay_target  # after a later record nobody could tell which calls are still missing
        if session.phase in WORKS:
            return state.log.durable_sequence_id
        if session.phase in REPLAYS:
            return state.versions.replay_bound(session.replay_target)
        return state.log.durable_sequence_id if session.flushes else session.replay_target  # as above

    # --- the blob ----------------------------------------------------------------------------------------------------

    def _read_blob(self) -> None:
        read = self.lifecycle.recovery.next_read()
        if read is None:
            self.state.session.advance(Step.BLOB_SENT)
        else:
            self.state.session.reading = True
            self.state.effects.append(read)

    def checkpoint_chunk_read(self, event: ev.CheckpointChunkRead) -> None:
        session = self.state.session
        session.reading = False
        if session.phase is not Phase.RESTORING:
            return
        self.lifecycle.recovery.chunk_read(event.data)
        self.state.outbox.send(event.data)
        if self.lifecycle.recovery.next_read() is None:
            session.advance(Step.BLOB_SENT)  # from here on the app may say what a restored app may

    # --- records -----------------------------------------------------------------------------------------------------

    def records_read(self, event: ev.RecordsRead) -> None:
        state, session = self.state, self.state.session
        if event.session not in (None, session.number):
            return  # whoever asked is gone
        session.reading = False
        if session.phase not in GETS_RECORDS or state.shutdown.feeds_no_more or state.pause.is_paused:
            return
        if state.write_lease.follows and event.summary is not None and not self.lifecycle.log_grew(event.summary):
            return
        replaying = session.phase in REPLAYS
        for value in event.values:
            header = decode_header(value)
            if header.sequence_id != session.fed_sequence_id + 1:
                return  # of a session that has ended, or from behind the replay's end
            if header.sequence_id > self._last_sequence_id():
                return
            record = memoryview(value)[: header.size_bytes]
            trailer = decode_trailer(memoryview(value)[header.size_bytes :], header.check)
            if replaying:
                self.peers.outbound.expected.record(header.sequence_id, record, trailer)
                self.peers.admission.replayed(header.sequence_id, record, trailer.batches)
                if state.following:
                    self.peers.outbound.place(trailer.outputs)
            session.fed_sequence_id = header.sequence_id
            state.outbox.send_record(record, trailer.batches)

    def committed(self, group: Group) -> None:
        """Give an app that is up to date the record of ``group``, which is durable: the very bytes just written."""
        session = self.state.session
        if (
            group.record is not None
            and group.sequence_id == session.fed_sequence_id + 1
            and session.phase in RECOVERED
            and group.sequence_id <= self._last_sequence_id()
            and not self._takes_none
        ):
            session.fed_sequence_id = group.sequence_id
            self.state.outbox.send_record(group.record, group.batches)
