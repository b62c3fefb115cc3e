"""The positions of replayed outputs are those that the output stream itself gives them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from immortal.coordinator.core.interfaces import ImpulseBatch, OutputMark
from immortal.coordinator.core.limits import Limits
from immortal.coordinator.core.output.output_stream import OutputStream
from immortal.protocol.extensions import Origin
from immortal.protocol.messages import encode_incoming_rpc
from immortal.replay.session import KeptImpulses, Outputs, StreamPositions, cut_origins


def messages(first: int, count: int) -> bytes:
    return b"".join(encode_incoming_rpc(3, 1, number.to_bytes(2, "big")) for number in range(first, first + count))


@given(
    runs=st.lists(st.tuples(st.booleans(), st.integers(1, 6)), min_size=1, max_size=8),
    cuts=st.lists(st.integers(1, 7), min_size=1, max_size=12),
    start=st.integers(0, 5),
)
def test_outputs_and_kept_impulses_take_turns_as_they_did(
    runs: list[tuple[bool, int]], cuts: list[int], start: int
) -> None:
    """``runs``: what was sent then, impulses or not. A replay makes the calls again, in batches of its own."""
    mark = OutputMark(start, 17)
    live = OutputStream("b", Limits(), mark=mark)
    impulses: list[ImpulseBatch] = []
    called = bytearray()
    count = 0
    for is_impulse, size in runs:
        payload = messages(count, size)
        if is_impulse:
            impulses.append(live.append_impulses(size, payload, 0))
        else:
            live.append(size, payload)
            called += payload
            count += size
    replayed = StreamPositions("b", mark, impulses)
    found: list[Outputs | KeptImpulses] = [*replayed.add_kept_impulses()]
    made, size_bytes = 0, len(messages(0, 1))
    for cut in cuts * (count + 1):
        taken = min(cut, count - made)
        if not taken:
            break
        payload = bytes(called[made * size_bytes : (made + taken) * size_bytes])
        origins = [Origin(index, 0, 1) for index in range(made, made + taken)]
        found += replayed.append(taken, payload, origins)
        made += taken
    # Whatever was sent then is there again, at its place.
    position = start
    again = bytearray()
    origins_again: list[Origin] = []
    for part in found:
        assert part.first_position == position + 1
        position += part.count
        if isinstance(part, Outputs):
            again += part.payload
            assert part.origins is not None
            assert sum(origin.count for origin in part.origins) == part.count
            origins_again += part.origins
    assert bytes(again) == bytes(called)
    assert [origin.sequence_id for origin in origins_again] == list(range(count))
    assert position == live.position
    kept = [(part.first_position, part.payload) for part in found if isinstance(part, KeptImpulses)]
    assert kept == [(batch.first_position, batch.payload) for batch in impulses]


def test_impulses_that_a_checkpoint_has_behind_it_take_no_place() -> None:
    stream = StreamPositions("b", OutputMark(5, 0), [ImpulseBatch(4, 2, b"", "b"), ImpulseBatch(7, 1, b"", "b")])
    parts = list(stream.append(2, messages(0, 2), None))
    assert [(type(part).__name__, part.first_position) for part in parts] == [
        ("Outputs", 6),
        ("KeptImpulses", 7),
        ("Outputs", 8),
    ]


def test_origins_are_cut_with_their_messages() -> None:
    origins = [Origin(1, 0, 2), Origin(1, 1, 3), Origin(2, 0, 1)]
    assert cut_origins(origins, 3) == ([Origin(1, 0, 2), Origin(1, 1, 1)], [Origin(1, 1, 2), Origin(2, 0, 1)])
    assert cut_origins(origins, 2) == ([Origin(1, 0, 2)], [Origin(1, 1, 3), Origin(2, 0, 1)])
    assert cut_origins(origins, 6) == (origins, [])
