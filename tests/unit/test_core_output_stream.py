"""The sending end of a stream, case by case: kept impulses, divergence, windows, giving up."""

from __future__ import annotations

import pytest

from immortal.coordinator.core.errors import DivergenceError
from immortal.coordinator.core.interfaces import ImpulseBatch, OutputBatch, OutputMark
from immortal.coordinator.core.limits import Limits
from immortal.coordinator.core.output.output_stream import OutputStream, StreamState
from immortal.protocol.checksum import crc64
from tests.helpers.core import rpc

LIMITS = Limits(peer_window_bytes=1000, peer_window_frames=3, peer_frame_bytes=100, peer_gather_bytes=50)


def opened(**options: object) -> OutputStream:
    stream = OutputStream("b", LIMITS, **options)  # type: ignore[arg-type]
    stream.state = StreamState.OPEN
    return stream


def payload(*numbers: int) -> bytes:
    return b"".join(rpc(number) for number in numbers)


def kept(position: int, *numbers: int) -> ImpulseBatch:
    return ImpulseBatch(position, len(numbers), payload(*numbers), "b")


def taken(stream: OutputStream, durable_ticket: int = 0) -> list[tuple[int, bytes]]:
    found = []
    while (batch := stream.next_batch(durable_ticket)) is not None:
        found.append((batch.first_position, batch.payload))
        stream.acknowledge(batch.last_position)
    return found


@pytest.mark.parametrize(
    ("impulses", "replayed"),
    [
        ([kept(1, 91)], [1, 91, 2, 3]),  # in the front: 91 first
        ([kept(2, 91)], [1, 91, 2, 3]),  # in the middle of the batch
        ([kept(2, 91, 92), kept(5, 93)], [1, 91, 92, 2, 93, 3]),
        ([kept(2, 91), kept(3, 92)], [1, 91, 92, 2, 3]),  # next to each other
        ([kept(4, 91)], [1, 2, 3, 91]),  # behind all
        ([kept(4, 91), kept(5, 92)], [1, 2, 3, 91, 92]),
    ],
)
@pytest.mark.parametrize("singly", [True, False])
def test_kept_impulses_go_back_to_their_places(impulses: list[ImpulseBatch], replayed: list[int], singly: bool) -> None:
    if impulses[0].first_position == 1:
        replayed = [91, 1, 2, 3]
    stream = opened(impulses=impulses)
    if singly:
        for number in (1, 2, 3):
            stream.append(1, payload(number))
    else:
        stream.append(3, payload(1, 2, 3))
    stream.finish_replay()
    assert b"".join(found for _, found in taken(stream)) == payload(*replayed)
    assert stream.position == len(replayed)
    assert stream.checksum == crc64(payload(1, 2, 3)), "impulses are no part of what a replay makes again"


def test_an_acknowledged_impulse_keeps_its_place_without_its_bytes() -> None:
    stream = opened(acknowledged=3, impulses=[ImpulseBatch(2, 2, b"", "b")])
    stream.append(2, payload(1, 2))
    stream.finish_replay()
    assert taken(stream) == [(4, payload(2))]


def test_impulses_before_the_checkpoint_are_in_it() -> None:
    stream = opened(
        mark=OutputMark(5, 99),
        unacknowledged=[OutputBatch(4, 2, payload(91, 5))],
        acknowledged=3,
        impulses=[kept(4, 91)],
    )
    stream.finish_replay()
    assert taken(stream) == [(4, payload(91, 5))]
    assert stream.mark == OutputMark(5, 99)


def test_what_is_unacknowledged_in_a_checkpoint_and_known_by_now_is_dropped() -> None:
    stream = opened(mark=OutputMark(5, 99), unacknowledged=[OutputBatch(3, 3, payload(3, 4, 5))], acknowledged=4)
    assert taken(stream) == [(5, payload(5))]


def test_a_replay_that_made_less_than_the_receiver_has() -> None:
    stream = opened(acknowledged=3)
    stream.append(2, payload(1, 2))
    with pytest.raises(DivergenceError, match=r"'b' has 3 messages of this instance, the replay made only 2"):
        stream.finish_replay()


def test_a_base_app_may_send_later_what_its_replay_made() -> None:
    stream = opened(acknowledged=3)
    stream.append(2, payload(1, 2))
    stream.finish_replay(all_sent=False)
    stream.append(2, payload(3, 4))
    assert taken(stream) == [(4, payload(4))]


def test_of_an_impulse_that_was_left_in_the_log_what_is_not_acknowledged_is_read() -> None:
    stream = opened(acknowledged=2, impulses=[ImpulseBatch(1, 4, b"", "b", 400)])
    stream.finish_replay()
    assert stream.position == 4
    read = stream.next_read(0)
    assert read is not None
    assert read[:2] == (3, 4)


def test_a_replay_that_ends_before_a_kept_impulse() -> None:
    stream = opened(impulses=[kept(4, 91)])
    stream.append(2, payload(1, 2))
    with pytest.raises(DivergenceError, match=r"an impulse to 'b' has position 4, the replay has made 2 messages"):
        stream.finish_replay()


def test_a_new_impulse_before_one_that_the_replay_has_to_reach_is_a_divergence() -> None:
    with pytest.raises(DivergenceError, match="has position 4, the replay has made 0 messages"):
        opened(impulses=[kept(4, 91)]).append_impulses(1, payload(1), 7)


def test_an_impulse_and_what_is_behind_it_wait_for_its_commit() -> None:
    stream = opened()
    stream.append(1, payload(1))
    stream.append_impulses(1, payload(91), 7)
    stream.append(1, payload(2))
    assert taken(stream, 6) == [(1, payload(1))]
    assert taken(stream, 7) == [(2, payload(91, 2))]


@pytest.mark.parametrize("state", [StreamState.CLOSED, StreamState.GREETING, StreamState.FAILED])
def test_only_an_open_stream_sends(state: StreamState) -> None:
    stream = opened()
    stream.append(1, payload(1))
    stream.state = state
    assert stream.next_batch(0) is None


def test_small_batches_are_joined_up_to_the_frame_size() -> None:
    stream = opened()
    for number in range(30):
        stream.append(1, payload(number))
    batch = stream.next_batch(0)
    assert batch is not None
    assert batch.count == 100 // len(rpc(0))
    assert batch.payload == payload(*range(batch.count))


def test_a_large_message_is_a_frame_of_its_own() -> None:
    stream = opened()
    stream.append(1, payload(1))
    stream.append(1, rpc(b"x" * 500))
    stream.append(1, payload(2))
    assert [len(found) for _, found in taken(stream)] == [len(rpc(1)), len(rpc(b"x" * 500)), len(rpc(2))]


def test_the_window_in_bytes_and_in_frames() -> None:
    for size, frames in ((600, 1), (90, 3)):
        stream = opened()
        for _ in range(8):
            stream.append(1, rpc(b"x" * size))
        sent = []
        while (batch := stream.next_batch(0)) is not None:
            sent.append(batch)
        assert len(sent) == frames
        stream.acknowledge(1)
        assert stream.next_batch(0) is not None


def test_while_two_frames_are_on_their_way_small_ones_gather() -> None:
    stream = opened()
    for number in (1, 2):
        stream.append(1, payload(number))
        assert stream.next_batch(0) is not None
    stream.append(1, payload(3))
    assert stream.next_batch(0) is None
    stream.append(5, payload(4, 5, 6, 7, 8))
    batch = stream.next_batch(0)
    assert batch is not None
    assert batch.count == 6
    stream.append(1, payload(9))
    stream.acknowledge(2)
    batch = stream.next_batch(0)
    assert batch is not None, "one frame on its way must not make others wait"
    assert batch.first_position == 9


def test_what_was_given_up_is_sent_again_in_order() -> None:
    stream = opened()
    for number in (1, 2):
        stream.append(1, payload(number))
        stream.next_batch(0)
    stream.append(1, payload(3))
    stream.requeue_in_flight()
    assert stream.attempt == 1
    assert taken(stream) == [(1, payload(1, 2, 3))]


def test_a_failed_stream_keeps_its_messages() -> None:
    stream = opened()
    stream.append(1, payload(1))
    stream.next_batch(0)
    stream.fail("because")
    assert (stream.state, stream.error) == (StreamState.FAILED, "because")
    assert [batch.payload for batch in stream.unacknowledged] == [payload(1)]
    assert stream.waiting_bytes == len(payload(1))


def test_an_acknowledgement_in_the_middle_of_a_frame_waits_for_its_end() -> None:
    stream = opened()
    stream.append(3, payload(1, 2, 3))
    stream.next_batch(0)
    stream.acknowledge(2)
    assert (stream.acknowledged, stream.waiting_bytes) == (2, len(payload(1, 2, 3)))
    stream.acknowledge(1)
    assert stream.acknowledged == 2
    stream.acknowledge(3)
    assert stream.waiting_bytes == 0


def test_a_frame_acknowledged_in_part_and_given_up() -> None:
    stream = opened()
    stream.append(3, payload(1, 2, 3))
    stream.next_batch(0)
    stream.acknowledge(2)
    stream.requeue_in_flight()
    assert b"".join(found for _, found in taken(stream)) in (payload(3), payload(1, 2, 3))
    assert stream.waiting_bytes == 0


def test_a_welcome_in_the_middle_of_what_waits() -> None:
    stream = OutputStream("b", LIMITS)
    stream.append(2, payload(1, 2))
    stream.append(3, payload(3, 4, 5))
    stream.acknowledge(4)
    assert stream.waiting_bytes == len(payload(5))
    stream.state = StreamState.OPEN
    assert taken(stream) == [(5, payload(5))]


def test_a_mark_is_new_once() -> None:
    stream = opened()
    assert stream.pop_new_mark(1) is None
    stream.append(2, payload(1, 2))
    assert stream.pop_new_mark(1) == OutputMark(2, crc64(payload(1, 2)))
    assert stream.pop_new_mark(1) is None


def test_a_mark_waits_for_the_impulses_before_it() -> None:
    # A crash may take an impulse away whose commit comes after the record's; nothing may count it before.
    stream = opened()
    stream.append_impulses(1, payload(7), ticket=4)
    stream.append(1, payload(1))
    assert stream.pop_new_mark(3) is None
    assert stream.pop_new_mark(4) == OutputMark(2, crc64(payload(1)))
