"""The checks of LMDB's pages accept every file that LMDB writes: whatever was put, replaced, deleted and given up."""

from __future__ import annotations

import os
import random
import tempfile
from pathlib import Path
from typing import Any

import lmdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from immortal.coordinator.log.backends.lmdb.files import DATA_FILE_NAME, structure_problems
from immortal.coordinator.log.backends.lmdb.pages import check_pages
from tests.helpers.effort import effort

SIZES = (8, 100, 2000, 5000, 1 << 16, 1 << 20)


def check(folder: Path) -> None:
    problems = structure_problems(folder / DATA_FILE_NAME)
    if problems is None:
        pytest.skip("the installed py-lmdb has no walk over pages")
    assert problems == []
    assert check_pages(folder / DATA_FILE_NAME) is None


def write(
    transaction: lmdb.Transaction, tables: list[Any], known: list[tuple[bytes, Any]], draw: random.Random
) -> None:
    """One change: a value is deleted, or put, perhaps in another's place and twice, the second time smaller."""
    if known and draw.random() < 0.35:
        key, table = known.pop(draw.randrange(len(known)))
        transaction.delete(key, db=table)
        return
    if known and draw.random() < 0.4:
        key, table = draw.choice(known)
    else:
        key, table = draw.randbytes(draw.choice([8, 100])), draw.choice(tables)
        known.append((key, table))
    size_bytes = draw.randint(1, 60) << 20 if draw.random() < 0.04 else draw.choice(SIZES)
    transaction.put(key, bytes(size_bytes), db=table)
    if draw.random() < 0.15:
        transaction.put(key, bytes(draw.randint(1, size_bytes)), db=table)


@settings(max_examples=effort(12), deadline=None)
@given(st.integers(0, 1 << 32))
def test_all_that_lmdb_writes_is_accepted(seed: int) -> None:
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        with lmdb.open(folder, max_dbs=2, map_size=1 << 33, sync=False) as environment:
            tables = [environment.open_db(name) for name in (b"a", b"b")]
            known: list[tuple[bytes, Any]] = []
            reader = None
            for _ in range(draw.randint(4, 20)):
                if reader is None and draw.random() < 0.1:
                    reader = environment.begin()  # what it sees is not used again meanwhile
                elif reader is not None and draw.random() < 0.3:
                    reader.abort()
                    reader = None
                transaction, before = environment.begin(write=True), list(known)
                for _ in range(draw.choice([1, 1, 2, 5, 50])):
                    write(transaction, tables, known, draw)
                if draw.random() < 0.1:
                    transaction.abort()
                    known[:] = before
                else:
                    transaction.commit()
            if reader is not None:
                reader.abort()
            environment.sync(True)
        check(Path(folder))


def test_a_value_that_keeps_pages_that_it_needs_no_more_is_accepted(tmp_path: Path) -> None:
    with lmdb.open(str(tmp_path), max_dbs=1, map_size=1 << 30) as environment:
        table = environment.open_db(b"a")
        with environment.begin(write=True) as transaction:
            transaction.put(b"key", bytes(1 << 20), db=table)
            transaction.put(b"key", bytes(1 << 16), db=table)
    check(tmp_path)


def test_a_list_of_free_pages_that_became_shorter_is_accepted(tmp_path: Path) -> None:
    with lmdb.open(str(tmp_path), max_dbs=2, map_size=1 << 33, sync=False) as environment:
        large, small = environment.open_db(b"large"), environment.open_db(b"small")
        with environment.begin(write=True) as transaction:
            transaction.put(b"key", bytes(100 << 20), db=large)
        with environment.begin(write=True) as transaction:
            transaction.delete(b"key", db=large)
        for number in range(10):
            with environment.begin(write=True) as transaction:
                transaction.put(b"%d" % number, b"x", db=small)
            environment.sync(True)
            check(tmp_path)


@pytest.mark.parametrize("pages", [0, 2, 30, 1 << 20])
def test_another_count_of_pages_of_a_value_is_found(tmp_path: Path, pages: int) -> None:
    with lmdb.open(str(tmp_path), max_dbs=1, map_size=1 << 30) as environment:
        table = environment.open_db(b"a")
        for number in range(4):
            with environment.begin(write=True) as transaction:
                transaction.put(b"%d" % number, bytes([number]) * (1 << 16), db=table)
    path = tmp_path / DATA_FILE_NAME
    content = bytearray(path.read_bytes())
    page_size_bytes = int.from_bytes(content[16 + 24 : 16 + 28], "little")
    (at,) = [
        offset
        for offset in range(0, len(content), page_size_bytes)
        if content[offset + 10] == 4 and content[offset + 16 : offset + 32] == b"\1" * 16
    ]
    content[at + 12 : at + 16] = pages.to_bytes(4, "little")
    path.write_bytes(content)
    assert structure_problems(path)
