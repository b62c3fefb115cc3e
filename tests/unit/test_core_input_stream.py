"""The receiving end of a stream: duplicates, gaps, overlaps, and who the sender is."""

from __future__ import annotations

import pytest

from immortal.coordinator.core.input.input_stream import InputStream
from immortal.coordinator.core.interfaces import SourcePosition
from immortal.protocol.batch import CallRules
from immortal.protocol.errors import RemoteProtocolError
from immortal.protocol.peer_frames import FrameType, PeerFrame, RefusedCode
from tests.helpers.core import rpc


def batch(position: int, count: int, *, committer_id: int = 7, epoch: int = 1) -> PeerFrame:
    payload = b"".join(rpc(position + index) for index in range(count))
    return PeerFrame(FrameType.BATCH, "b", "a", committer_id, epoch, position, count, 0, payload)


def known(position: int, *, committer_id: int = 7, epoch: int = 1) -> InputStream:
    return InputStream("b", SourcePosition(committer_id, epoch, position))


@pytest.mark.parametrize(
    ("position", "count", "new"),
    [
        (11, 3, range(11, 14)),  # continues
        (9, 2, None),  # all known
        (1, 10, None),
        (10, 1, None),
        (9, 3, range(11, 12)),  # overlaps
        (10, 4, range(11, 14)),
        (1, 11, range(11, 12)),
        (12, 2, None),  # a gap
    ],
)
def test_new_part(position: int, count: int, new: range | None) -> None:
    stream = known(10)
    part = stream.new_part(batch(position, count), stream.rules)
    if new is None:
        assert part is None
    else:
        assert part == (new.start, len(new), b"".join(rpc(n) for n in new), [])


def test_a_batch_with_fewer_messages_than_it_says_is_an_error() -> None:
    frame = batch(9, 2)
    lying = PeerFrame(FrameType.BATCH, "b", "a", 7, 1, 9, 4, 0, frame.payload)
    with pytest.raises(RemoteProtocolError, match="a batch of 4 messages ends after 2"):
        known(10).new_part(lying, CallRules())


def test_taking_tells_the_log() -> None:
    stream = known(10)
    assert stream.accept(batch(11, 3, epoch=4), 13, 100) == SourcePosition(7, 4, 13)
    assert (stream.received, stream.durable) == (13, 10)


def hello(*, committer_id: int = 7, epoch: int = 1) -> PeerFrame:
    return PeerFrame(FrameType.HELLO, "b", "a", committer_id, epoch, 0)


def test_a_new_epoch_is_told_to_the_log_once_and_settled_when_durable() -> None:
    stream = known(10)
    assert stream.refusal(hello(epoch=2)) is None
    assert stream.new_epoch() == SourcePosition(7, 2, 10)
    assert stream.new_epoch() is None
    assert not stream.settled
    stream.became_durable(10, 2)
    assert stream.settled


def test_another_log_is_not_waited_for_because_of_a_reset_that_is_on_its_way() -> None:
    stream = known(10, epoch=-5)
    assert stream.refusal(hello(epoch=2)) is None
    stream.reset()
    assert not stream.settled
    assert stream.refusal(hello(committer_id=8)) is None
    assert stream.settled


def test_frames_are_acknowledged_once_their_last_message_is_durable() -> None:
    stream = known(0)
    stream.wait_for(3, "first")
    stream.wait_for(5, "second")
    stream.wait_for(3, "duplicate of the first")
    assert stream.became_durable(2, 1) == []
    assert stream.became_durable(4, 1) == ["first", "duplicate of the first"]
    assert stream.became_durable(4, 1) == []
    assert stream.became_durable(9, 1) == ["second"]


def test_another_committer_is_refused_by_both_ids() -> None:
    code, reason = known(10).refusal(batch(11, 1, committer_id=8)) or (None, "")
    assert code is RefusedCode.COMMITTER_CHANGED
    assert "'b' was committer 7 here and is 8 now" in reason


def test_an_epoch_from_a_past_life_is_refused() -> None:
    stream = known(10, epoch=3)
    assert stream.refusal(batch(11, 1, epoch=3)) is None
    assert stream.refusal(batch(11, 1, epoch=5)) is None
    code, reason = stream.refusal(batch(11, 1, epoch=4)) or (None, "")
    assert code is RefusedCode.STALE_EPOCH
    assert "epoch 4 of 'b', which has since started epoch 5" in reason


def test_a_new_sender_may_be_anyone() -> None:
    assert InputStream("b", None).refusal(batch(1, 1, committer_id=999, epoch=12)) is None
