"""What of a stream lies in the log: a queue of what gathers to be a row and what is stored."""

from __future__ import annotations

from immortal.coordinator.core.interfaces import OutputBatch, SpilledExtent
from immortal.coordinator.core.limits import Limits
from immortal.coordinator.core.output.output_stream import OutputStream
from immortal.coordinator.core.output.send_buffer import Spill
from tests.helpers.core import rpc

SIZE_BYTES = len(rpc(0))


def batch(first: int, last: int) -> OutputBatch:
    return OutputBatch(first, last - first + 1, b"".join(rpc(number) for number in range(first, last + 1)))


def gathered(spill: Spill) -> list[int]:
    return [position for one in spill.gathered for position in range(one.first_position, one.last_position + 1)]


def test_an_acknowledgement_in_the_middle_of_what_gathers_leaves_the_rest() -> None:
    spill = Spill(1000)
    spill.add(batch(1, 3), 0, logged=False)
    spill.add(batch(4, 5), 0, logged=False)
    spill.acknowledge(2)
    assert gathered(spill) == [3, 4, 5]
    assert spill.gathered_bytes == 3 * SIZE_BYTES
    assert spill.store(7) == [batch(3, 5)]
    spill.acknowledge(5)
    assert not spill.active
    assert (spill.gathered_bytes, spill.stored_bytes, spill.kept_bytes) == (0, 0, 0)


def test_an_acknowledgement_in_the_middle_of_what_is_stored_leaves_its_share() -> None:
    spill = Spill(1000)
    spill.add_stored(11, 20, 1000)
    for position, left_bytes in ((10, 1000), (11, 900), (15, 500), (18, 200), (20, 0)):
        spill.acknowledge(position)
        assert spill.stored_bytes == left_bytes
    assert not spill.active


def test_what_another_has_written_meanwhile_need_not_gather() -> None:
    spill = Spill(1000)
    spill.add(batch(1, 4), 0, logged=False)
    spill.replace_known([SpilledExtent(2, 3, 2 * SIZE_BYTES)])
    assert gathered(spill) == [1, 4]
    assert (spill.gathered_bytes, spill.stored_bytes, spill.kept_bytes) == (
        2 * SIZE_BYTES,
        2 * SIZE_BYTES,
        2 * SIZE_BYTES,
    )


def test_a_stream_that_follows_lets_go_of_what_its_writer_has_spilled() -> None:
    stream = OutputStream("b", Limits(output_memory_bytes=4 * SIZE_BYTES, spill_row_bytes=2 * SIZE_BYTES))
    for number in range(1, 11):
        stream.append(1, rpc(number))
    before_bytes = stream.memory_bytes
    assert stream.spill.gathered_bytes == 8 * SIZE_BYTES
    stream.spilled_by_writer([SpilledExtent(3, 10, 8 * SIZE_BYTES)])
    assert stream.memory_bytes == before_bytes - 8 * SIZE_BYTES
    assert stream.spilled_bytes == 8 * SIZE_BYTES
