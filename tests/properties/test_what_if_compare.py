"""The comparison against a plain one over whole lists: batches and timing must not matter."""

from __future__ import annotations

from itertools import groupby

from hypothesis import given
from hypothesis import strategies as st

from immortal.protocol.messages import RpcType, decode_messages, encode_incoming_rpc
from immortal.replay.comparison import Comparison, Difference, Kind, Outputs, Side

Made = list[tuple[int, bytes]]  # (sequence ID, message)

calls = st.builds(
    lambda method_id, argument: encode_incoming_rpc(method_id, RpcType.FORK, argument),
    st.sampled_from([1, 2, 200]),
    st.sampled_from([b"", b"a", b"b", b"a" * 90]),
)
runs = st.dictionaries(st.integers(0, 12), st.lists(calls, max_size=5)).map(
    lambda by_input: [(sequence_id, message) for sequence_id in sorted(by_input) for message in by_input[sequence_id]]
)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Made, Made]:
    """Two runs that are mostly alike."""
    old = draw(runs)
    new = list(old)
    for _ in range(draw(st.integers(0, 4))):
        place = draw(st.integers(0, len(new)))
        if place < len(new) and draw(st.booleans()):
            del new[place]
        else:
            near = new[place - 1][0] if place else 0
            new.insert(place, (near, draw(calls)))
    return old, new


def pieces(draw: st.DrawFn, made: Made) -> list[Outputs]:
    batches = []
    position = 1
    while made:
        count = draw(st.integers(1, len(made)))
        payload = b"".join(message for _, message in made[:count])
        batches.append(Outputs([(key, 0) for key, _ in made[:count]], payload, position))
        made, position = made[count:], position + count
    return batches


@st.composite
def feeds(draw: st.DrawFn) -> tuple[Made, Made, list[tuple[Side, Outputs | None]]]:
    """Two runs, and their batches in some interleaving; None is a side's end."""
    old, new = draw(pairs())
    waiting: dict[Side, list[Outputs | None]] = {
        Side.OLD: [*pieces(draw, old), None],
        Side.NEW: [*pieces(draw, new), None],
    }
    steps = []
    while any(waiting.values()):
        side = draw(st.sampled_from([side for side in Side if waiting[side]]))
        steps.append((side, waiting[side].pop(0)))
    return old, new, steps


def play(steps: list[tuple[Side, Outputs | None]], memory_bytes_max: int) -> tuple[list[Difference], Comparison]:
    found: list[Difference] = []
    comparison = Comparison(found.append, memory_bytes_max)
    for side, batch in steps:
        if batch is None:
            comparison.finish(side)
        else:
            comparison.add(side, "b", batch)
    assert set(comparison.pending_size_bytes.values()) == {0}
    return found, comparison


@given(feeds(), st.sampled_from([0, 500, 1 << 20]))
def test_batches_and_timing_do_not_matter(
    feed: tuple[Made, Made, list[tuple[Side, Outputs | None]]], memory_bytes_max: int
) -> None:
    old, new, steps = feed
    found, comparison = play(steps, memory_bytes_max)
    whole = [
        (side, Outputs([(key, 0) for key, _ in made], b"".join(message for _, message in made)))
        for side, made in ((Side.OLD, old), (Side.NEW, new))
    ]
    expected, plain = play([*whole, (Side.OLD, None), (Side.NEW, None)], 1 << 20)
    assert found == expected
    assert comparison.equal_count == plain.equal_count


@given(feeds())
def test_the_differences_lead_from_the_old_run_to_the_new_one(
    feed: tuple[Made, Made, list[tuple[Side, Outputs | None]]],
) -> None:
    old, new, steps = feed
    found, comparison = play(steps, 1 << 20)
    assert comparison.equal_count + sum(each.old is not None for each in found) == len(old)
    assert comparison.equal_count + sum(each.new is not None for each in found) == len(new)
    assert all(old[each.position - 1][1] == each.old for each in found if each.old is not None)
    for each in found:
        assert each.old != each.new
        assert (each.kind is Kind.ADDED) == (each.old is None)
        assert (each.kind is Kind.MISSING) == (each.new is None)
    old_by_input, new_by_input = ({k: [m for _, m in g] for k, g in groupby(made, lambda x: x[0])} for made in feed[:2])
    for key in old_by_input.keys() | new_by_input.keys():
        before, after = old_by_input.get(key, []), new_by_input.get(key, [])
        here = [each for each in found if each.key == (key, 0)]
        assert bool(here) == (before != after)
        # Without what differs, both made the same in the same order.
        assert without(before, [each.old for each in here]) == without(after, [each.new for each in here])


def without(messages: list[bytes], taken: list[bytes | None]) -> list[bytes]:
    rest = sorted(messages)
    for message in taken:
        if message is not None:
            rest.remove(message)
    return rest


@given(st.lists(calls, max_size=30))
def test_equal_runs_are_compared_by_their_bytes_alone(messages: list[bytes]) -> None:
    payload = b"".join(messages)
    assert sum(1 for _ in decode_messages(payload)) == len(messages)
    batch = Outputs([(index // 3, index % 3) for index in range(len(messages))], payload)
    found, comparison = play([(Side.OLD, batch), (Side.NEW, batch), (Side.OLD, None), (Side.NEW, None)], 1 << 20)
    assert (found, comparison.equal_count) == ([], len(messages))
