"""Where SQL cuts the logs of a fleet: no call without its cause, and none that was there is left out."""

from __future__ import annotations

import pytest

from immortal.pipeline.sql.database import LogCut, make_consistent

duckdb = pytest.importorskip("duckdb")


@pytest.mark.parametrize(
    ("marks", "called_at", "last"),
    [
        pytest.param([(2, 1)], [20, 120], 1, id="a mark in the next record, and a call behind it"),
        pytest.param([(2, 2)], [20, 99], 2, id="both are marked"),
        pytest.param([(4, 2)], [20, 99], 2, id="the mark comes late: both came before the sender's next record"),
        pytest.param([(4, 2)], [20, 100], 1, id="the second may be of the sender's next record"),
        pytest.param([(4, 2)], [100, 120], 0, id="both may be"),
        pytest.param([], [20, 99], 2, id="the log ends before the mark"),
    ],
)
def test_a_call_is_shown_if_it_was_made_by_then(marks: list[tuple[int, int]], called_at: list[int], last: int) -> None:
    """A is cut behind its record 1, and its record 2 came at 100; B has a call of A in its records 1 and 2."""
    database = duckdb.connect()
    database.execute(
        'create table _logged_messages (instance text, sequence_id bigint, "index" int, time_ns bigint, kind text,'
        " source text, position bigint)"
    )
    database.execute(
        "create table _logged_outputs (instance text, sequence_id bigint, destination text, position bigint)"
    )
    messages = [("A", number, 0, 50 * number, "impulse", "A", number) for number in range(5)]
    messages += [("B", n, 0, time_ns, "stream", "A", n) for n, time_ns in enumerate(called_at, 1)]
    database.executemany("insert into _logged_messages values (?, ?, ?, ?, ?, ?, ?)", messages)
    for sequence_id, position in marks:
        database.execute("insert into _logged_outputs values ('A', ?, 'B', ?)", [sequence_id, position])
    cuts = [LogCut("A", 0, 1, True), LogCut("B", 0, 2, False)]
    make_consistent(database, cuts)
    assert [cut.last for cut in cuts] == [1, last]
    database.close()
