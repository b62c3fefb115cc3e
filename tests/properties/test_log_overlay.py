"""A table with the journal's rows over it is what it would be with them in it, however a cursor moves."""

from __future__ import annotations

import tempfile
from pathlib import Path

import lmdb
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.log.environment import Tables, open_environment, open_tables
from coordinator.log.journal import Rows
from coordinator.log.overlay import laid_over
from tests.helpers.memory import in_memory

KEYS = st.integers(0, 12).map(lambda number: b"%02d" % number)
MOVES = st.lists(st.sampled_from(("first", "last", "next", "prev", "range")) | KEYS, max_size=12)


def open_log_tables(folder: Path) -> tuple[lmdb.Environment, Tables]:
    environment = open_environment(folder, readonly=False, map_size_bytes=1 << 22)
    return environment, open_tables(environment, folder, create=True)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(KEYS, st.just(b"table")), st.dictionaries(KEYS, st.just(b"journal")), MOVES)
def test_as_if_the_rows_were_in_the_table(below: dict[bytes, bytes], above: dict[bytes, bytes], moves: list) -> None:
    rows: Rows = {("peers", key): value for key, value in above.items()}
    with tempfile.TemporaryDirectory(dir=in_memory()) as folder:
        environment, tables = open_log_tables(Path(folder))
        try:
            with environment.begin(write=True) as write:
                for key, value in below.items():
                    write.put(key, value, db=tables.peers)
            expected = sorted({**below, **above}.items())
            with environment.begin(buffers=True) as transaction:
                overlay = laid_over(transaction, tables, rows)
                with overlay.cursor(tables.peers) as cursor:
                    assert [(bytes(key), bytes(value)) for key, value in cursor] == expected
                with overlay.cursor(tables.peers) as cursor:
                    at: int | None = None  # of ``expected``
                    for move in moves:
                        at, found = moved(cursor, move, at, [key for key, _ in expected])
                        assert found == (at is not None)
                        if at is None:
                            break
                        assert (bytes(cursor.key()), bytes(cursor.value())) == expected[at]
                        rest = [bytes(key) for key, _ in cursor] if move == "range" else None
                        if rest is not None:
                            assert rest == [key for key, _ in expected[at:]]
                            break
                for key in (b"%02d" % number for number in range(13)):
                    value = overlay.get(key, db=tables.peers)
                    assert (None if value is None else bytes(value)) == dict(expected).get(key)
        finally:
            environment.close()


def moved(cursor, move: str | bytes, at: int | None, keys: list[bytes]) -> tuple[int | None, bool]:  # type: ignore[no-untyped-def]
    """Move; where that should be, and what the cursor says."""
    if isinstance(move, bytes) or move == "range":
        wanted = move if isinstance(move, bytes) else b"05"
        to = next((index for index, key in enumerate(keys) if key >= wanted), None)
        return to, cursor.set_range(wanted)
    if move == "first" or (move == "next" and at is None):
        to = 0
    elif move == "last" or (move == "prev" and at is None):
        to = len(keys) - 1
    else:
        to = (at or 0) + (1 if move == "next" else -1)
    return (to if 0 <= to < len(keys) else None), getattr(cursor, move)()
