"""Arrays that a what-if keeps of a log: runs of positions, numbers of executions, messages on their way."""

from __future__ import annotations

from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from immortal.protocol.extensions import RandomDraw
from immortal.replay.fleet.recorded import Draws, Runs
from immortal.replay.fleet.streams import Stream

STEPS = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4), st.integers(0, 2)), max_size=8)
"""Of runs: the gap before it, its length, and how many records later it is made."""


@given(STEPS)
def test_runs_find_what_a_table_of_all_positions_has(steps: list[tuple[int, int, int]]) -> None:
    runs, table, position, record = Runs(), dict[int, int](), 0, 0
    for gap, length, later in steps:
        record += later
        runs.add(position + gap + 1, position + gap + length, record)
        table |= dict.fromkeys(range(position + gap + 1, position + gap + length + 1), record)
        position += gap + length
    assert dict(runs.positions()) == table
    for at in range(position + 2):
        found = runs.find(at)
        assert (None if found is None else runs.records[found]) == table.get(at)
        assert runs.next_after(at) == min((one for one in table if one > at), default=None)
    for number in range(record + 1):
        made = [at for run in runs.of_record(number) for at in run]
        assert made == [at for at, made_in in table.items() if made_in == number]


@given(st.lists(st.lists(st.integers(-1, 5), max_size=5), max_size=6))
def test_draws_are_found_by_what_began_the_execution(records: list[list[int]]) -> None:
    """Each number: -1 starts an execution, others draw for one that runs, or for one from before the checkpoint."""
    draws, number, waited = Draws(), 100, []
    chains: dict[tuple[int, int], list[RandomDraw]] = {}
    for sequence_id, wanted in enumerate(records):
        drawn = []
        for index, what in enumerate(wanted):
            number += 1
            running = list(chains)
            if what == -1:
                drawn.append(RandomDraw(number, 0, "", index))
                chains[sequence_id, index] = [drawn[-1]]
            elif what < len(running):
                chain = chains[running[what]]
                drawn.append(RandomDraw(number, chain[0].number, f"call {what}", 2**64 - 1 - index))
                chain.append(drawn[-1])
            else:
                drawn.append(RandomDraw(number, 7, "sleep", index))
                waited.append(drawn[-1])
        draws.add(sequence_id, drawn)
    assert draws.waited == waited
    for place, chain in chains.items():
        assert list(draws.draws_of(*place)) == chain
        assert draws.start_of_task(chain[0].number) == place
        assert [draws.task_of(one.number) for one in chain[1:]] == [chain[0].number] * (len(chain) - 1)
        assert draws.task_of(chain[0].number) is None
    assert list(draws.draws_of(len(records), 0)) == []
    assert draws.start_of_task(7) is None


@given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.lists(st.integers(1, 5), max_size=6))
def test_messages_on_their_way_are_taken_in_order(lengths: list[int], batches: list[int]) -> None:
    stream = Stream()
    ends = list(accumulate(lengths))
    stream.equal.extend(range(end - length + 1, end + 1) for length, end in zip(lengths, ends, strict=True))
    taken = 0
    for count in batches:
        is_there = stream.has(taken + 1, taken + count)
        assert is_there == (taken + count <= ends[-1])
        if is_there:
            taken += count
            stream.pop_until(taken)
    assert [at for run in stream.equal for at in run] == list(range(taken + 1, ends[-1] + 1))
