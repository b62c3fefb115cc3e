"""What operators reset while the coordinator runs: the streams of one peer, or of all, where a copy of the log has run.

Each is answered once it is durable. `peer_reset.py` does the same to a log that no coordinator writes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from immortal.coordinator.core import events as ev
from immortal.coordinator.core import notices
from immortal.coordinator.core.effects import PeerResetDone
from immortal.coordinator.core.epoch import Epoch
from immortal.coordinator.core.group_commit import GroupCommit
from immortal.coordinator.core.interfaces import Token
from immortal.coordinator.core.streams.peers import Peers
from immortal.coordinator.core.streams.reset import RECLAIM_EPOCHS
from immortal.coordinator.core.turn import Turn


@dataclass(slots=True, eq=False, repr=False)
class Resets:
    log: GroupCommit
    peers: Peers
    epoch: Epoch
    turn: Turn
    _resets: deque[tuple[int, Token]] = field(default_factory=deque)  # (commit to wait for, token)
    _reclaims: deque[tuple[int, Token]] = field(default_factory=deque)  # the same, while their epoch is not durable

    def peer_reset(self, event: ev.PeerReset) -> None:
        group = self.peers.reset(event.peer)
        if group is None:
            self.turn.effects.append(PeerResetDone(event.token, False))
            return
        self._resets.append((group.ticket, event.token))
        self.turn.report(notices.PeerForgotten(event.peer))

    def reclaimed(self, event: ev.Reclaimed) -> None:
        """First an epoch ahead of the copy's: the greetings with it follow once it is durable."""
        self._reclaims.append((self.epoch.begin(ahead=RECLAIM_EPOCHS), event.token))

    def committed(self, ticket: int) -> None:
        """Everything up to this commit is durable."""
        while self._reclaims and self._reclaims[0][0] <= ticket:
            self._reset_all(self._reclaims.popleft()[1])
        while self._resets and self._resets[0][0] <= ticket:
            self.turn.effects.append(PeerResetDone(self._resets.popleft()[1], True))

    def _reset_all(self, token: Token) -> None:
        peers = self.peers
        peers.epoch, peers.epoch_began_ns = self.epoch.number, self.epoch.began_ns
        group = self.log.append_outside_record(0)
        for peer in peers.known():
            group = peers.reset(peer, forked=True) or group
        self._resets.append((group.ticket, token))
        self.turn.report(notices.LogReclaimed(self.epoch.number))
