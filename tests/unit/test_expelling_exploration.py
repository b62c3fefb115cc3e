"""Every interleaving of small cases in which a member of a group is expelled, dead or alive; larger ones by seed."""

from __future__ import annotations

from random import Random

import pytest

from immortal.appsdk.ordering.groups import Fences, FenceState, Sent
from immortal.appsdk.ordering.machine import Ordering
from immortal.appsdk.ordering.messages import Resolve
from tests.helpers.effort import effort
from tests.helpers.expelling_world import expel, explore_expelling, to_group, walk
from tests.helpers.ordering_world import Script, ViolationError, multicast, plain

ALL = ("a", "b", "d")
EXPEL = expel(*ALL)
TO_ALL = to_group(*ALL)
SENDER: Script = {"s": (TO_ALL,), "a": (EXPEL,)}
MEMBER: Script = {"b": (TO_ALL,), "a": (EXPEL,)}
EXPELLER: Script = {"a": (TO_ALL, EXPEL)}
DEAD_SENDER: Script = {"d": (TO_ALL,), "a": (EXPEL,)}

AHEAD: Script = {"u": (multicast("d"), multicast("d"), multicast("d")), "s": (TO_ALL,), "a": (EXPEL,)}
TWO: Script = {"s": (TO_ALL, TO_ALL), "t": (TO_ALL,), "a": (EXPEL,)}
TWO_EXPEL: Script = {"d": (TO_ALL,), "s": (TO_ALL,), "a": (EXPEL,), "b": (EXPEL,)}
DEAD_AND_OTHER: Script = {"d": (TO_ALL, TO_ALL), "b": (TO_ALL, TO_ALL), "a": (EXPEL,)}
OTHER_RUNS: Script = {"s": (TO_ALL, multicast("a", "b"), plain("b")), "t": (multicast("b", "c"),), "a": (EXPEL,)}
FOUR = ("a", "b", "c", "d")
OF_FOUR: Script = {"s": (to_group(*FOUR),), "b": (to_group(*FOUR),), "d": (to_group(*FOUR),), "a": (expel(*FOUR),)}
LARGER = (AHEAD, TWO, TWO_EXPEL, DEAD_AND_OTHER, OTHER_RUNS, OF_FOUR)


@pytest.mark.slow
@pytest.mark.parametrize("script", [SENDER, MEMBER, EXPELLER, DEAD_SENDER])
def test_each_interleaving_goes_on_without_who_is_expelled(script: Script) -> None:
    states, ends = explore_expelling(script)
    assert states > 100
    assert ends > 0


@pytest.mark.slow
def test_each_interleaving_with_one_whose_clock_is_ahead() -> None:
    states, ends = explore_expelling(AHEAD, first_of="u")
    assert states > 100
    assert ends > 0


@pytest.mark.slow
@pytest.mark.parametrize("script", LARGER)
def test_larger_cases_go_on_as_well(script: Script) -> None:
    for seed in range(effort(60)):
        walk(script, Random(seed), lates=seed % 3)


class SendersAreNotTold(Fences):
    """The change is sent, and whoever has runs in flight does not hear of it."""

    def _announce_to(self, fence: FenceState, sender: str) -> None:
        pass


class DeadSenderDecides(Fences):
    """Its own runs are left in the queues."""

    def _resolve(self, fence: FenceState, message: Resolve) -> None:
        pass


class DroppedUnseen(Fences):
    """Its own runs are dropped, whatever the others have seen of them."""

    def _resolve(self, fence: FenceState, message: Resolve) -> None:
        super()._resolve(fence, Resolve(message.group, message.member, message.view, 0))


class HeardAfterwards(Fences):
    """What the expelled one says of its runs still counts, once the others have reported."""

    def ignores(self, sender: str, number: int) -> bool:
        return any(number in one.decided for one in self._ordering.state.fences)


def with_fences(fences: type[Fences]) -> type[Ordering]:
    class Broken(Ordering):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments)  # type: ignore[arg-type]
            self.fences = fences(self)

    return Broken


class OnlyWithoutIt(Ordering):
    """A run goes on without the expelled one, where it is to be cancelled as a whole."""

    def cancel(self, sent: Sent) -> None:
        super().cancel(Sent(sent.number, 0, ["d"], 0, sent.proposed, sent.unsettled))
        sent.destinations.remove("d")
        sent.unsettled = [one for one in sent.unsettled if one != "d"]


@pytest.mark.parametrize(
    ("broken", "script"),
    [
        (with_fences(SendersAreNotTold), SENDER),
        (with_fences(DeadSenderDecides), DEAD_SENDER),
        (with_fences(DroppedUnseen), DEAD_SENDER),
        (with_fences(HeardAfterwards), DEAD_SENDER),
        (OnlyWithoutIt, SENDER),
    ],
)
def test_each_planted_bug_is_found(broken: type[Ordering], script: Script) -> None:
    with pytest.raises(ViolationError):
        explore_expelling(script, broken)
