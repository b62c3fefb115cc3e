"""The windows that a receiver grants: how many bytes each peer may have on their way here, unacknowledged.

All peers that send share one budget, less what waits for the disk already: so a disk that falls behind, or more peers,
make the windows smaller, and one that floods can't fill the memory that others need.
"""

from __future__ import annotations

from coordinator.core.limits import Limits


class Grants:
    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._sent_ns: dict[str, int] = {}  # peers that send: when they did last
        self._looked_ns = 0
        self.granted_bytes: dict[str, int] = {}  # as last said

    def sent(self, peer: str, now_ns: int) -> None:
        """``peer`` has sent a Batch."""
        self._sent_ns[peer] = now_ns
        active_ns = self._limits.active_ns
        if now_ns - self._looked_ns >= active_ns // 10:
            self._looked_ns = now_ns
            self._sent_ns = {name: at_ns for name, at_ns in self._sent_ns.items() if now_ns - at_ns < active_ns}

    def window_bytes(self, peer: str, pending_bytes: int) -> int:
        """What to grant ``peer`` now, while ``pending_bytes`` wait for the disk."""
        limits = self._limits
        sharing = len(self._sent_ns) + (peer not in self._sent_ns)
        share_bytes = (limits.receive_budget_bytes - pending_bytes) // sharing
        granted = min(max(share_bytes, limits.grant_bytes_min), limits.peer_window_bytes)
        self.granted_bytes[peer] = granted
        return granted
