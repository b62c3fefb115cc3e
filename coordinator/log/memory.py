"""Store in memory that crashes on a test's order: for tests and the simulation."""

from __future__ import annotations

from immortal.coordinator.core.errors import LogError
from immortal.coordinator.core.interfaces import AuditEntry
from immortal.coordinator.log import verdicts
from immortal.coordinator.log.backends.memory import MemoryBackend, MemoryTables
from immortal.coordinator.log.cut import cut_checkpoint_ids, rows_removed_by_cut
from immortal.coordinator.log.format import FORMAT_VERSION
from immortal.coordinator.log.identity import LogIdentity
from immortal.coordinator.log.store import RowLogStore

NAME = "memory"


class MemoryLogStore(RowLogStore):
    """Store in which every commit is durable; :meth:`crash` returns the store that the next start would find."""

    backend: MemoryBackend

    def __init__(self, committer_id: int = 1, durable: MemoryTables | None = None, *, name: str = NAME) -> None:
        """``durable``: its earlier durable data."""
        if durable is None:
            durable = MemoryTables()
            for row in LogIdentity(FORMAT_VERSION, name, committer_id, 0).rows():
                durable.put(*row)
        super().__init__(MemoryBackend(durable, "in memory", None))

    @property
    def free_bytes(self) -> int:
        """Free bytes that the simulated disk reports."""
        return self.backend.free_bytes

    @free_bytes.setter
    def free_bytes(self, size_bytes: int) -> None:
        self.backend.free_bytes = size_bytes

    @property
    def last_sequence_id(self) -> int:
        """Sequence ID of the last durable record. Raises DamagedLogError."""
        return self.backend.durable.last_sequence_id()

    def copy(self) -> MemoryLogStore:
        """Copy the durable data into a separate store."""
        store = MemoryLogStore(durable=self.backend.durable.copy())
        store.impulses_loaded_size_bytes_max = self.impulses_loaded_size_bytes_max
        store.free_bytes = self.free_bytes
        store.clock_ns = self.clock_ns
        return store

    def crash(self) -> MemoryLogStore:
        """Return a new store with the durable data; this one accepts no further writes."""
        store = self.copy()
        self.backend.failure = LogError("this log is closed: its process crashed")
        return store

    def cut(self, sequence_id: int) -> None:
        """Remove the records from ``sequence_id`` on and the checkpoints that contain them, like `immortal recover`."""
        with self.backend.view() as view:
            self._write_changes(rows_removed_by_cut(view, sequence_id, cut_checkpoint_ids(view, sequence_id)))
            self._last_sequence_id = min(self._last_sequence_id, sequence_id - 1)

    def audit(self) -> list[AuditEntry]:
        """Return operators' actions in the log, oldest first."""
        return verdicts.load_audit(self.backend.durable, [])
