"""What every backend promises the log: rows in order, views of one moment, appends whole or not at all, one writer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from immortal.coordinator.core.errors import (
    FencedError,
    InvariantError,
    LogError,
    LogFormatError,
    LogIdentityError,
    LogLockedError,
)
from immortal.coordinator.log.backend import Append, Backend, Options, Place, Span, View
from immortal.coordinator.log.format import ALL_TABLES, FORMAT_VERSION, SEQUENCE_KEY
from immortal.coordinator.log.identity import LogIdentity, first_and_last_sequence_id
from immortal.coordinator.log.open import place_of
from tests.helpers.toy_backend import ToyPlace

IDENTITY = LogIdentity(FORMAT_VERSION, "alice", 77, 1)
OPTIONS = Options(1 << 24, 1 << 26)
KEYS = [b"a\0", b"b\0", b"b\0c", b"d\0", b"zz"]


@pytest.fixture(params=["lmdb", "memory", "toy", "postgresql"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    location = str(tmp_path / "log")
    if request.param == "postgresql":
        place = place_of(request.getfixturevalue("postgres").url(f"log-{request.node.name}"))
    else:
        place = ToyPlace(location) if request.param == "toy" else place_of(f"{request.param}:{location}")
    yield place
    place.remove()


@pytest.fixture
def backend(place: Place) -> Iterator[Backend]:
    backend = place.create(IDENTITY, IDENTITY.rows(), OPTIONS)
    yield backend
    backend.close()


def reopened(place: Place, backend: Backend, *, crashed: bool = False) -> Backend:
    if crashed:
        backend.close_uncleanly()
    else:
        backend.close()
    return place.open("alice", OPTIONS)


def put(backend: Backend, last: int = -1, *, count: int = 0, **rows: list[bytes]) -> None:
    """``count`` records behind ``last``, and in each table the keys with themselves as values."""
    puts = [(table, key, b"=" + key) for table, keys in rows.items() for key in keys]
    records = [(number, b"record %d" % number) for number in range(last + 1, last + 1 + count)]
    backend.append(Append(last, backend.fence, records, puts))


def remove(backend: Backend, *spans: Span, last: int = -1) -> None:
    backend.append(Append(last, backend.fence, deletes=spans))


def keys(view: View, table: str = "peers", first: bytes = b"") -> list[bytes]:
    return [bytes(key) for key, _ in view.scan(table, first)]


def keys_back(view: View, table: str = "peers", last: bytes | None = None) -> list[bytes]:
    return [bytes(key) for key, _ in view.scan_back(table, last)]


def contents(view: View) -> dict[str, list[tuple[bytes, bytes]]]:
    found = {table: [(bytes(key), bytes(value)) for key, value in view.scan(table)] for table in ALL_TABLES}
    return {table: rows for table, rows in found.items() if rows and table != "meta"}


def test_a_new_log_has_what_it_was_created_with(place: Place, backend: Backend) -> None:
    assert place.exists()
    assert backend.identity == IDENTITY
    with backend.view() as view:
        assert contents(view) == {}
        assert [("meta", bytes(key), bytes(value)) for key, value in view.scan("meta")] == sorted(IDENTITY.rows())
        assert first_and_last_sequence_id(view) == (0, -1)
        assert view.get("peers", b"a\0") is None
        assert view.get("record_seals", b"a\0") is None
        assert keys(view, "no such table") == keys_back(view, "no such table") == []


def test_appends_that_are_begun_come_one_behind_the_other(place: Place, backend: Backend) -> None:
    """Where a backend begins any: the last one is found to be there with all before it."""
    put(backend, count=1)
    begun = [
        Append(last, backend.fence, [(last + 1, b"begun")], [("peers", b"last", b"%d" % last)]) for last in (0, 1, 2)
    ]
    is_begun = [backend.begin_append(append) for append in begun]
    assert is_begun == [backend.appends_max > 1] * 3
    if backend.appends_max > 1:
        assert [backend.finish_oldest(wait=True) for _ in begun] == [True] * 3
    else:
        for append in begun:
            backend.append(append)
    assert backend.resolve() == 0
    backend = reopened(place, backend, crashed=True)
    with backend.view() as view:
        assert first_and_last_sequence_id(view) == (0, 3)
        assert view.get("peers", b"last") == b"2"
    put(backend, 3, count=1)
    backend.close()


def test_rows_come_in_the_order_of_their_keys(backend: Backend) -> None:
    put(backend, peers=[KEYS[index] for index in (3, 0, 4, 2, 1)], clients=[b"another table"])
    with backend.view() as view:
        assert keys(view) == KEYS
        assert keys(view, first=b"b\0") == KEYS[1:]
        assert keys(view, first=b"b\0a") == KEYS[2:]
        assert keys(view, first=b"zzz") == []
        assert keys_back(view) == KEYS[::-1]
        assert keys_back(view, last=b"b\0c") == KEYS[2::-1]
        assert keys_back(view, last=b"c") == KEYS[2::-1]
        assert keys_back(view, last=b"\0") == []
        assert [bytes(value) for _, value in view.scan("peers", b"d")] == [b"=d\0", b"=zz"]
        assert bytes(view.get("peers", b"d\0") or b"") == b"=d\0"
        assert view.get("peers", b"d") is None
        assert view.size("peers").rows_count == 5


def test_copies_outlive_their_view(backend: Backend) -> None:
    put(backend, peers=KEYS)
    with backend.view(copies=True) as view:
        rows = [*view.scan("peers")]
    assert rows == [(key, b"=" + key) for key in KEYS]


@pytest.mark.parametrize(
    ("span", "left"),
    [
        (Span.of_key("peers", b"b\0"), [0, 2, 3, 4]),
        (Span.of_key("peers", b"nothing"), [0, 1, 2, 3, 4]),
        (Span("peers", b"b\0", b"d\0"), [0, 3, 4]),
        (Span("peers", b"b\0c"), [0, 1]),
        (Span("peers", end=b"d\0"), [3, 4]),
        (Span("peers"), []),
        (Span("clients"), [0, 1, 2, 3, 4]),
        (Span("no such table"), [0, 1, 2, 3, 4]),
    ],
)
def test_a_span_is_removed(backend: Backend, span: Span, left: list[int]) -> None:
    put(backend, peers=KEYS)
    remove(backend, span)
    with backend.view() as view:
        assert keys(view) == [KEYS[index] for index in left]


def test_rows_go_before_others_come(backend: Backend) -> None:
    put(backend, peers=KEYS)
    backend.append(Append(-1, backend.fence, puts=[("peers", b"b\0", b"new")], deletes=[Span("peers")]))
    with backend.view() as view:
        assert contents(view) == {"peers": [(b"b\0", b"new")]}


@pytest.mark.parametrize("crashed", [False, True])
def test_what_was_appended_is_there_again(place: Place, backend: Backend, crashed: bool) -> None:
    put(backend, count=3, sources=[b"bob\0"])  # small: a backend may keep it elsewhere at first
    put(backend, 2, count=2, peers=KEYS, replies=[b"x" * 200])
    remove(backend, Span.of_key("peers", KEYS[0]), last=4)
    put(backend, 4, count=1)
    with backend.view() as view:
        before = contents(view)
    assert [SEQUENCE_KEY.unpack(key)[0] for key, _ in before["records"]] == [0, 1, 2, 3, 4, 5]
    again = reopened(place, backend, crashed=crashed)
    with again.view() as view:
        assert contents(view) == before
        assert first_and_last_sequence_id(view) == (0, 5)
    put(again, 5, count=1)
    again.close()


def test_records_are_removed_at_their_beginning(backend: Backend) -> None:
    put(backend, count=5)
    remove(backend, Span("records", end=SEQUENCE_KEY.pack(3)), last=4)
    with backend.view() as view:
        assert first_and_last_sequence_id(view) == (3, 4)
    put(backend, 4, count=1)


def test_an_append_may_hold_very_many_rows(backend: Backend) -> None:
    """More than a backend that maps its file has mapped at first."""
    value = bytes(1 << 20)

    class Rows:
        def __iter__(self) -> Iterator[tuple[str, bytes, bytes]]:
            for number in range(30):
                yield "chunks", SEQUENCE_KEY.pack(number), value

    backend.append(Append(-1, backend.fence, puts=Rows()))
    with backend.view() as view:
        assert len(keys(view, "chunks")) == 30
        assert view.size("chunks").size_bytes >= 30 << 20
    space = backend.space()
    assert space.used_bytes >= 30 << 20
    assert space.free_bytes > 0


@pytest.mark.parametrize("expected", [-1, 1, 3])
def test_an_append_that_does_not_follow_the_last_record_is_refused(backend: Backend, expected: int) -> None:
    put(backend, count=3)
    with pytest.raises(InvariantError, match="the log ends with 2"):
        backend.append(Append(expected, backend.fence, [(expected + 1, b"record")]))
    with backend.view() as view:
        assert first_and_last_sequence_id(view) == (0, 2)


def test_there_is_one_writer(place: Place, backend: Backend) -> None:
    """Refused, or it takes the log over from the one before, which hears of it before it writes anything more."""
    put(backend, count=2)
    try:
        second = place.open("alice", OPTIONS)
    except LogLockedError:
        put(backend, 1, count=1)
        return
    assert second.fence > backend.fence
    for _ in range(2):
        with pytest.raises(FencedError) as raised:
            put(backend, 1, count=1)
        assert raised.value.holder
    put(second, 1, count=2)
    second.close()
    with place.open_reader("alice").view() as view:
        assert first_and_last_sequence_id(view) == (0, 3)


def test_a_reader_beside_the_writer_sees_what_is_durable(place: Place, backend: Backend) -> None:
    put(backend, count=2)
    if place.scheme == "lmdb":
        backend.close()  # which this process may have open once
    reader = place.open_reader(None)
    with reader.view() as view:
        assert first_and_last_sequence_id(view) == (0, 1)
    if place.scheme != "lmdb":
        put(backend, 1, count=1, peers=KEYS)
        with reader.view() as view:
            assert first_and_last_sequence_id(view) == (0, 2)
            assert keys(view) == KEYS
    reader.close()


def test_a_thread_reads_whole_appends_beside_the_writer(backend: Backend) -> None:
    stopped = threading.Event()
    torn: list[object] = []

    def read() -> None:
        while not stopped.is_set():
            with backend.view() as view:
                last = first_and_last_sequence_id(view)[1]
                if len(keys(view, "sources")) != last + 1 or len(keys(view, "peers")) != (last + 1) // 10:
                    torn.append((last, keys(view, "sources"), keys(view)))

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(100):  # every tenth one is larger than the others
        rows = {"sources": [SEQUENCE_KEY.pack(number)]}
        if number % 10 == 9:
            rows["peers"] = [SEQUENCE_KEY.pack(number)]
        put(backend, number - 1, count=1, **rows)
    stopped.set()
    reader.join()
    assert torn == []


def test_a_closed_log_is_neither_read_nor_written(backend: Backend) -> None:
    backend.close()
    backend.close()
    with pytest.raises(LogError, match="closed"):
        put(backend, count=1)
    with pytest.raises(LogError, match="closed"), backend.view():
        pass


def test_whose_log_it_is(place: Place, backend: Backend) -> None:
    backend.close()
    for open_it in (lambda: place.open("bob", OPTIONS), lambda: place.open_reader("bob")):
        with pytest.raises(LogIdentityError, match="belongs to instance 'alice', not to 'bob'"):
            open_it()
    with pytest.raises(LogFormatError, match="already"):
        place.create(IDENTITY, IDENTITY.rows(), OPTIONS)
    place.remove()
    assert not place.exists()
    for open_it in (lambda: place.open("alice", OPTIONS), lambda: place.open_reader(None)):
        with pytest.raises(LogFormatError, match="there is no log"):
            open_it()
