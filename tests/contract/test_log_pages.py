"""LMDB's own pages have no checksums: a flipped bit in them is found, ends the process, or changes nothing."""

from __future__ import annotations

import random
import struct
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from immortal.coordinator.core.errors import DamagedLogError
from immortal.coordinator.log.backends.lmdb.files import DATA_FILE_NAME
from immortal.coordinator.log.backends.lmdb.pages import PageError, check_pages
from immortal.log import open_log, open_reader
from tests.faults.sample_log import (
    NAMED,
    OTHER,
    PAGE_SIZE_BYTES,
    SAME,
    Contents,
    outcome,
    page_kinds,
    put_checkpoint,
    put_record,
    read_contents,
    write_log,
)
from tests.helpers.effort import effort

TRANSACTION_ID_OFFSET_BYTES = 144  # in a meta page
ROOT_OFFSET_BYTES = 16 + 24 + 48 + 40  # of the table of tables, in a meta page
FLIPS = effort(30)  # of each kind of page; every bit of the meta pages, and 6,000 others, were tried once


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, Contents]:
    """The file of a log, and all that is in it."""
    folder = tmp_path_factory.mktemp("sample")
    write_log(folder)
    written = read_contents(folder)
    return (folder / DATA_FILE_NAME).read_bytes(), written


def put(folder: Path, data: bytes | bytearray) -> None:
    folder.mkdir(exist_ok=True)
    for left_over in folder.iterdir():
        left_over.unlink()
    (folder / DATA_FILE_NAME).write_bytes(data)


def flipped(data: bytes, offset_bytes: int, bit: int) -> bytearray:
    changed = bytearray(data)
    changed[offset_bytes] ^= 1 << bit
    return changed


def transaction_ids(data: bytes | bytearray) -> list[int]:
    places = (page * PAGE_SIZE_BYTES + TRANSACTION_ID_OFFSET_BYTES for page in (0, 1))
    return [struct.unpack_from("=Q", data, place)[0] for place in places]


@pytest.mark.parametrize("kind", ["meta", "branch", "leaf", "overflow"])
def test_a_flipped_bit_never_changes_what_is_executed(
    tmp_path: Path, sample: tuple[bytes, Contents], kind: str
) -> None:
    data, written = sample
    pages = defaultdict(list)
    for number, found in page_kinds(data):
        pages[found].append(number)
    rng = random.Random(7)
    outcomes: Counter[str] = Counter()
    for _ in range(FLIPS):
        # The header and the pointers behind it are where a page can be made another one.
        offset_bytes = rng.choice((rng.randrange(PAGE_SIZE_BYTES), rng.randrange(16), rng.randrange(160)))
        offset_bytes += rng.choice(pages[kind]) * PAGE_SIZE_BYTES
        bit = rng.randrange(8)
        put(tmp_path, flipped(data, offset_bytes, bit))
        found, text = outcome(tmp_path, written)
        assert found != OTHER, (offset_bytes, bit, text)
        outcomes[found] += 1
    assert outcomes[SAME], outcomes
    assert outcomes[NAMED], outcomes


@pytest.mark.parametrize("page", [0, 1])
@pytest.mark.parametrize("bit", range(8))
def test_a_meta_page_that_names_another_transaction(
    tmp_path: Path, sample: tuple[bytes, Contents], page: int, bit: int
) -> None:
    """It would bring back the log as it was one transaction ago, with every value intact."""
    place = page * PAGE_SIZE_BYTES + TRANSACTION_ID_OFFSET_BYTES
    (was,) = struct.unpack_from("=Q", sample[0], place)
    put(tmp_path, flipped(sample[0], place, bit))
    if bit == 1 and was & 2 and was == max(transaction_ids(sample[0])):  # which LMDB does, where a sync fails
        unnamed = check_pages(tmp_path / DATA_FILE_NAME)
        assert unnamed is not None
        assert unnamed.transaction_id == was
        assert outcome(tmp_path, sample[1]) == (SAME, "")
        return
    with pytest.raises(PageError, match=r"transaction"):
        check_pages(tmp_path / DATA_FILE_NAME)


def test_a_whole_transaction_that_its_meta_page_does_not_name_counts(
    tmp_path: Path, sample: tuple[bytes, Contents]
) -> None:
    """As LMDB leaves it where a sync fails: the number of the transaction before, two less."""
    data = bytearray(sample[0])
    newest = max(transaction_ids(data))
    place = transaction_ids(data).index(newest) * PAGE_SIZE_BYTES + TRANSACTION_ID_OFFSET_BYTES
    struct.pack_into("=Q", data, place, newest - 2)
    put(tmp_path, data)
    store = open_log(tmp_path, "alice")
    assert [text for text in store.repairs if "it counts, and its meta page says so now" in text]
    store.close()
    assert newest in transaction_ids((tmp_path / DATA_FILE_NAME).read_bytes())
    assert read_contents(tmp_path) == sample[1]


def test_a_root_that_is_an_earlier_one(tmp_path: Path, sample: tuple[bytes, Contents]) -> None:
    """The newest meta page points to the table of tables of the transaction before: a page that is free by now."""
    data = bytearray(sample[0])
    transactions = transaction_ids(data)
    newest = transactions.index(max(transactions))
    roots = [struct.unpack_from("=Q", data, page * PAGE_SIZE_BYTES + ROOT_OFFSET_BYTES)[0] for page in (0, 1)]
    assert roots[0] != roots[1]
    struct.pack_into("=Q", data, newest * PAGE_SIZE_BYTES + ROOT_OFFSET_BYTES, roots[1 - newest])
    put(tmp_path, data)
    with pytest.raises(PageError, match="is used, and listed as free"):
        check_pages(tmp_path / DATA_FILE_NAME)
    for opener in (open_log, open_reader):
        with pytest.raises(DamagedLogError, match=r"LMDB's own pages: .*; restore the log from a copy"):
            opener(tmp_path, "alice")


def test_a_sound_log_is_sound_after_every_transaction(tmp_path: Path) -> None:
    """Also one whose pages were freed and used again, and one that is used by a reader."""
    write_log(tmp_path, 20)
    store = open_log(tmp_path, "alice", map_size_bytes=1 << 24)
    for number in range(20, 120):
        put_record(store, number, random.Random(number).choice((300, 6000, 90_000)))
        check_pages(tmp_path / DATA_FILE_NAME)
        if number % 15 == 0:
            put_checkpoint(store, number, number)
            while store.trim(keep_checkpoints=1):
                check_pages(tmp_path / DATA_FILE_NAME)
    store.close()
