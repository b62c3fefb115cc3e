"""Every interleaving of small cases of the counting of handles; each step begins at a checkpoint."""

from __future__ import annotations

import pytest

from immortal.appsdk.nodes.reference_counts import Forgotten, Grant, Holder, Key, Owner, SendMessage, Stage
from tests.helpers.nodes_world import Script, ViolationError, explore

CHAIN: Script = {"o": ("pass p",), "p": ("pass q", "release"), "q": ("pass r", "release"), "r": ("release",)}
CIRCLE: Script = {"o": ("pass p",), "p": ("pass q", "release", "release"), "q": ("pass p", "release")}
TWO_WAYS: Script = {
    "o": ("pass p", "pass r"),
    "p": ("pass q", "release"),
    "r": ("pass q", "release"),
    "q": ("release", "release"),
}
DESTROYED: Script = {"o": ("pass p", "destroy"), "p": ("pass q", "release"), "q": ("pass p",)}
DESTROYED_LATE: Script = {"o": ("pass p", "pass q", "destroy"), "p": ("pass r", "release"), "q": ("pass r",)}
BANNED: Script = {"o": ("pass p", "pass q", "ban q", "destroy"), "p": ("pass q", "release"), "q": ("pass p", "release")}
HOME: Script = {"o": ("pass p", "destroy"), "p": ("pass o", "pass p", "release")}
AGAIN: Script = {"o": ("pass p", "pass p", "pass q"), "p": ("release", "release"), "q": ("pass p", "release")}
ALL = (CHAIN, CIRCLE, TWO_WAYS, DESTROYED, DESTROYED_LATE, BANNED, HOME, AGAIN)


@pytest.mark.parametrize("script", ALL)
def test_each_interleaving_counts_right(script: Script) -> None:
    states, ends = explore(script)
    assert states > 10
    assert ends > 0


class SumOfAll(Owner):
    @staticmethod
    def _is_free(grant: Grant) -> bool:
        return sum(grant.holders.values()) <= 0


class ForgottenAtOnce(Owner):
    """The key is gone with its node, whatever copies are under way."""

    def end(self, key: Key, how: str) -> None:
        told = self.grants[key].notified
        super().end(key, how)
        if self.grants.pop(key, None) is not None:
            self.actions += [SendMessage(one, Forgotten(key)) for one in told]


class OnlyThoseKnown(Owner):
    """Who gets a copy behind the end is not told."""

    def note_passed(self, key: Key, to: str) -> bool:
        told, ended = len(self.actions), self.grants[key].stage == Stage.ENDED
        found = super().note_passed(key, to)
        if ended:
            del self.actions[told:]
        return found


class ReceiverTells(Holder):
    """Not who passes a copy on says so, but who gets it."""

    def pass_on(self, owner: str, key: Key, to: str) -> None:
        return


class NoTombstone(Holder):
    def note_end(self, owner: str, key: Key, how: str) -> bool:
        was_held = super().note_end(owner, key, how)
        del self.held[owner, key]
        return was_held


class Unreturned(Holder):
    """A copy that comes behind the end is dropped."""

    def return_copy(self, owner: str, key: Key) -> None:
        return


@pytest.mark.parametrize(
    ("owner", "holder", "script"),
    [
        (SumOfAll, Holder, CHAIN),
        (ForgottenAtOnce, Holder, DESTROYED_LATE),
        (OnlyThoseKnown, Holder, DESTROYED_LATE),
        (Owner, ReceiverTells, CHAIN),
        (Owner, NoTombstone, DESTROYED),
        (Owner, Unreturned, DESTROYED_LATE),
    ],
)
def test_each_planted_bug_is_found(owner: type[Owner], holder: type[Holder], script: Script) -> None:
    with pytest.raises((ViolationError, KeyError)):
        explore(script, owner, holder)
