"""What a turn looks at: streams of which something is to be done, not all that there are."""

from __future__ import annotations

from collections import Counter

import pytest

from immortal.coordinator.core.output.output_stream import OutputStream
from immortal.protocol.peer_frames import FrameType
from tests.helpers.core import Driven, attach, call

PEERS_COUNT = 50


def with_idle_peers() -> Driven:
    driven = Driven.started()
    for number in range(PEERS_COUNT):
        driven.open_stream(f"p{number}")
        driven.reply(FrameType.TRIM_TO, 1, destination=f"p{number}")
    driven.forget()
    return driven


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    counts: Counter[str] = Counter()
    for name in ("next_batch", "memory_is_full", "awaits_reply"):
        original = getattr(OutputStream, name)
        function = original.fget if isinstance(original, property) else original

        def counted(self: OutputStream, *args: object, function=function):  # type: ignore[no-untyped-def]
            counts[self.destination] += 1
            return function(self, *args)

        monkeypatch.setattr(OutputStream, name, property(counted) if isinstance(original, property) else counted)
    return counts


@pytest.mark.source
def test_idle_streams_cost_nothing(looked_at: Counter[str]) -> None:
    driven = with_idle_peers()
    looked_at.clear()
    driven.data(call("p7", 2))
    assert len(driven.frames(FrameType.BATCH)) == 1
    assert set(looked_at) == {"p7"}


@pytest.mark.source
def test_a_stream_is_looked_at_until_all_of_it_is_acknowledged(looked_at: Counter[str]) -> None:
    driven = with_idle_peers()
    driven.data(call("p7", 2))
    looked_at.clear()
    driven.data(attach("p8"))
    assert set(looked_at) == {"p7"}
    driven.reply(FrameType.TRIM_TO, 2, destination="p7")
    looked_at.clear()
    driven.data(attach("p8"))
    assert not looked_at


def test_one_that_has_to_begin_anew_is_looked_at_again() -> None:
    driven = with_idle_peers()
    driven.reply(FrameType.RESEND, 0, destination="p3")
    assert [frame.receiver for frame in driven.frames(FrameType.HELLO)] == ["p3"]
    driven.data(call("p3", 2))
    driven.reply(FrameType.WELCOME, 1, destination="p3")
    assert [frame.position for frame in driven.frames(FrameType.BATCH)] == [2]
