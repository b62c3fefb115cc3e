"""Every interleaving of small cases of the algorithm of ordered multicast; each step begins at a checkpoint."""

from __future__ import annotations

import pytest

from immortal.appsdk.ordering.groups import QueuedRun, Sent
from immortal.appsdk.ordering.machine import Key, Ordering
from immortal.appsdk.ordering.messages import Scope, Timestamp
from tests.helpers.ordering_world import Script, ViolationError, explore, multicast, plain

TO_TWO: Script = {"s": (multicast("a", "b"),), "t": (multicast("a", "b"),)}
TO_THREE: Script = {"s": (multicast("a", "b", "c"),), "t": (multicast("a", "b", "c"),)}
OVERLAPPING: Script = {"s": (multicast("a", "b"), multicast("b", "c")), "t": (multicast("a", "c"),)}
WITH_CALLS: Script = {"s": (multicast("a", "b"), plain("c")), "a": (plain("b"),), "c": (plain("b"),)}
THIRD_PARTY: Script = {"s": (multicast("a", "b"),), "t": (multicast("b", "c"),), "a": (plain("b"),)}
AMONG_PEERS: Script = {"p": (multicast("p", "q"), multicast("p", "q")), "q": (multicast("p", "q"), plain("p"))}
CLOCKS_APART: Script = {"u": (multicast("a"),), "z": (multicast("a", "b"),), "t": (multicast("b"),)}
FROM_ONE: Script = {"u": (multicast("a"), multicast("a")), "s": (multicast("a", "b"), multicast("b"))}
HELD: Script = {"s": (multicast("a"), plain("b"), multicast("b"), plain("a"))}
TWICE_HELD: Script = {"s": (multicast("a"), plain("b"), multicast("c"), plain("b")), "b": (plain("c"),)}
LARGE = (TO_THREE, OVERLAPPING)
ALL = (TWICE_HELD, FROM_ONE, HELD, CLOCKS_APART, TO_TWO, TO_THREE, OVERLAPPING, WITH_CALLS, THIRD_PARTY, AMONG_PEERS)


@pytest.mark.parametrize("script", [pytest.param(one, marks=pytest.mark.slow) if one in LARGE else one for one in ALL])
def test_each_interleaving_keeps_the_order(script: Script) -> None:
    states, ends = explore(script, early_commits=script is TO_THREE)  # the largest one
    assert states > 10
    assert ends > 0


@pytest.mark.parametrize("script", [THIRD_PARTY, AMONG_PEERS, CLOCKS_APART, TO_TWO, WITH_CALLS])
def test_each_interleaving_keeps_the_order_where_runs_are_late(script: Script) -> None:
    assert explore(script, lates=1)[0] > explore(script)[0]


class MovesByItself(Ordering):
    """Who holds others up is moved without its sender, for which it may stand."""

    def postpone(self, filed: QueuedRun) -> None:
        self._settle(filed.sender, filed.number, self.state.clock + 1)
        self._release()


def test_a_run_that_is_moved_without_its_sender_is_found() -> None:
    with pytest.raises(ViolationError):
        explore(THIRD_PARTY, MovesByItself, lates=1)


class TickForgotten(Ordering):
    def _propose(self, estimate: Timestamp) -> Timestamp:
        return max(self.state.clock, estimate)


class UnblockBeforeSync(Ordering):
    def _destinations_before_final(self, sent: Sent) -> list[str]:
        return []


class CallPastABlock(Ordering):
    @property
    def is_busy(self) -> bool:
        return False


class TiesByArrival(Ordering):
    @staticmethod
    def _key(filed: QueuedRun) -> Key:
        return filed.timestamp, not filed.sender, "", id(filed)


class FinalInAnyOrder(Ordering):
    def _finalize(self, sent: Sent) -> None:
        self.state.last_final = 0  # of the run before: it is not looked at
        super()._finalize(sent)


class EarlyStanding(Ordering):
    """A call of the sender leaves before the blocks of its multicast stand."""

    def multicast(
        self,
        method_id: int,
        destinations: list[str],
        calls: list[list[bytes]],
        now_ns: int = 0,
        scope: Scope | None = None,
    ) -> int:
        number = super().multicast(method_id, destinations, calls, now_ns, scope)
        self.state.standing = max(number, self.state.standing)
        return number


@pytest.mark.parametrize(
    ("broken", "script"),
    [
        (TickForgotten, TO_TWO),
        (UnblockBeforeSync, CLOCKS_APART),
        (CallPastABlock, THIRD_PARTY),
        (TiesByArrival, TO_TWO),
        (FinalInAnyOrder, FROM_ONE),
        (EarlyStanding, WITH_CALLS),
    ],
)
def test_each_planted_bug_is_found(broken: type[Ordering], script: Script) -> None:
    with pytest.raises(ViolationError):
        explore(script, broken)
