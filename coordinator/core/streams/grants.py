"""The windows that a receiver grants: how many bytes each peer may have on their way here, unacknowledged.

All peers that send share one budget, less what waits for the disk already: so a disk that falls behind, or more peers,
make the windows smaller, and one that floods can't fill the memory that others need. Who sends more is refused: a
window that shrinks takes nothing back, so the largest one counts that may still be known there.
"""

from __future__ import annotations

from dataclasses import dataclass

from immortal.coordinator.core.limits import Limits


@dataclass(slots=True, eq=False, repr=False)
class _Granted:
    """To one peer. What was said in a period counts until the end of the next."""

    began_ns: int  # of this period
    peak_bytes: int  # said in it, or last before it
    before_bytes: int = 0  # of the period before


class Grants:
    """``now_ns``: the time, as last told."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._sent_ns: dict[str, int] = {}  # peers that send: when they did last
        self._looked_ns = 0
        self._granted: dict[str, _Granted] = {}
        self._began_ns: int | None = None  # when the first peer of this life was heard
        self.now_ns = 0
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
        granted_bytes = min(max(share_bytes, limits.grant_bytes_min), limits.peer_window_bytes)
        self.granted_bytes[peer] = granted_bytes
        known = self._granted.get(peer)
        if known is None:
            self._granted[peer] = _Granted(self.now_ns, granted_bytes)
        elif self._is_over(known):
            self._granted[peer] = _Granted(self.now_ns, granted_bytes, known.peak_bytes)
        else:
            known.peak_bytes = max(known.peak_bytes, granted_bytes)
        return granted_bytes

    def allowed_bytes(self, peer: str) -> int:
        """What ``peer`` may have on its way here by what it was told; in a life before this one perhaps."""
        if self._began_ns is None:
            self._began_ns = self.now_ns
        known = self._granted.get(peer)
        if known is None:
            return max(self._limits.peer_window_bytes, self._limits.unsaid_window_bytes)
        if self.now_ns - self._began_ns < self._limits.active_ns:
            # What a life before this one has said may have reached the peer after what this one did.
            return max(self._limits.peer_window_bytes, known.peak_bytes)
        return known.peak_bytes if self._is_over(known) else max(known.peak_bytes, known.before_bytes)

    def _is_over(self, known: _Granted) -> bool:
        return self.now_ns - known.began_ns >= self._limits.active_ns

    def forget(self, peer: str) -> None:
        for known in (self._sent_ns, self._granted, self.granted_bytes):
            known.pop(peer, None)
