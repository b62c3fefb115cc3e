"""A table with the journal's rows over it is what it would be with them in it, from wherever it is read, both ways."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from immortal.coordinator.log.backends.lmdb.environment import open_environment
from immortal.coordinator.log.backends.lmdb.tables import JournalRows, create_tables, view_of
from immortal.protocol.varint import Readable
from tests.helpers.effort import effort
from tests.helpers.memory import in_memory

KEYS = st.integers(0, 12).map(lambda number: b"%02d" % number)
EVERY_KEY = [b"%02d" % number for number in range(14)]


def read(rows: Iterable[tuple[Readable, Readable]]) -> list[tuple[bytes, bytes]]:
    return [(bytes(key), bytes(value)) for key, value in rows]


@settings(max_examples=effort(25), deadline=None)
@given(st.dictionaries(KEYS, st.just(b"table")), st.dictionaries(KEYS, st.just(b"journal")))
def test_as_if_the_rows_were_in_the_table(below: dict[bytes, bytes], above: dict[bytes, bytes]) -> None:
    rows: JournalRows = {("peers", key): value for key, value in above.items()} | {("meta", b"05"): b"elsewhere"}
    with tempfile.TemporaryDirectory(dir=in_memory()) as folder:
        environment = open_environment(Path(folder), readonly=False, map_size_bytes=1 << 22)
        tables = create_tables(environment)
        try:
            with environment.begin(write=True) as write:
                for key, value in below.items():
                    write.put(key, value, db=tables["peers"])
            expected = sorted({**below, **above}.items())
            with environment.begin(buffers=True) as transaction:
                view = view_of(transaction, tables, rows)
                assert read(view.scan("peers")) == expected
                assert read(view.scan_back("peers")) == expected[::-1]
                for key in EVERY_KEY:
                    assert read(view.scan("peers", key)) == [row for row in expected if row[0] >= key]
                    assert read(view.scan_back("peers", key)) == [row for row in reversed(expected) if row[0] <= key]
                    value = view.get("peers", key)
                    assert (None if value is None else bytes(value)) == dict(expected).get(key)
        finally:
            environment.close()
