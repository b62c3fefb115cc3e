"""Keys that an instance knows, as its coordinator sees them, without a running one."""

from __future__ import annotations

from datetime import date

from immortal.coordinator.instances.registry import Registry
from immortal.coordinator.peers import keys
from immortal.coordinator.peers.security import POLL_NS, PeerSecurity


class Watched:
    """Security of "alice", and its warnings. ``today``: a day that can be set."""

    def __init__(self, registry: Registry, today: date | None = None) -> None:
        self.today = today or keys.today()
        self.warnings: list[str] = []
        self.now_ns = 0
        settings = registry.load("alice")
        self.it = PeerSecurity(
            settings, registry, lambda endpoint: [endpoint], self.warnings.append, lambda: self.today
        )
        self.it.poll(self.now_ns)

    def look(self) -> bool:
        self.now_ns += POLL_NS
        return self.it.poll(self.now_ns)

    @property
    def callers(self) -> set[str]:
        """Return the callers without the instance itself, whose keys its owner's clients show."""
        assert self.it.security is not None
        names = set(self.it.security.callers.values())
        assert "alice" in names
        return names - {"alice"}
