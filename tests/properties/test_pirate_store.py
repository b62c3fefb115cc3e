"""The store of replies: as a plain dictionary of all that was ever replied would answer, within its limits."""

from __future__ import annotations

import contextlib
import tempfile
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from immortal.appsdk.patterns.pirate.frames import Frame, Kind, StoreError
from immortal.appsdk.patterns.pirate.store import REPLY_OVERHEAD_BYTES, Failure, Limits, ReplyStore, Rows
from tests.helpers.effort import effort

ROOMY = Limits()


def request(number: int, client: str = "c", settled: int = 0, body: bytes = b"") -> Frame:
    return Frame(Kind.REQUEST, number, settled, client, body or b"body %d" % number)


class Counting:
    """A function: counts in the store's own rows, and here how often it was called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, rows: Rows) -> bytes:
        self.calls += 1
        rows[b"n"] = b"%d" % (int(rows.get(b"n", b"0")) + 1)
        return rows[b"n"]


@contextlib.contextmanager
def opened(folder: Path, limits: Limits = ROOMY) -> Iterator[ReplyStore]:
    store = ReplyStore(folder, limits)
    try:
        yield store
    finally:
        store.close()


def answer(store: ReplyStore, frame: Frame, work: Counting, owner: str = "") -> Frame:
    with store.turn() as turn:
        return turn.answer(owner, frame, work)


def test_a_request_is_done_once_also_by_who_opens_the_store_next(tmp_path: Path) -> None:
    work = Counting()
    with opened(tmp_path / "s") as store:
        store_id = store.store_id
        first = answer(store, request(1), work)
        assert first == Frame(Kind.REPLY, 1, body=b"1")
        assert answer(store, request(1), work) == first
    with opened(tmp_path / "s") as store:
        assert store.store_id == store_id
        assert answer(store, request(1), work) == first
        assert answer(store, request(2), work).body == b"2"
    assert work.calls == 2


def rows_of(store: ReplyStore) -> dict[bytes, bytes]:
    with store._environment.begin() as transaction:
        return dict(Rows(transaction, store.tables["data"]))


def test_what_it_wrote_and_its_reply_are_kept_together_or_not_at_all(tmp_path: Path) -> None:
    work = Counting()

    def dies(rows: Rows) -> bytes:
        work(rows)
        raise KeyboardInterrupt

    with opened(tmp_path / "s") as store:
        with contextlib.suppress(KeyboardInterrupt), store.turn() as turn:
            turn.answer("", request(1), work)
            turn.answer("", request(2), dies)
            pytest.fail("it did not end the transaction")
        assert rows_of(store) == {}
        assert answer(store, request(1), work).body == b"1"


def test_a_failure_undoes_what_it_wrote_and_is_the_reply(tmp_path: Path) -> None:
    work = Counting()

    def fails(rows: Rows) -> bytes:
        work(rows)
        raise Failure(b"ValueError\nno")

    with opened(tmp_path / "s") as store:
        with store.turn() as turn:
            assert turn.answer("", request(1), fails) == Frame(Kind.FAILED, 1, body=b"ValueError\nno")
        assert rows_of(store) == {}
        assert answer(store, request(1), work).kind is Kind.FAILED
    assert work.calls == 1


def test_another_name_has_other_rows_whatever_id_it_gives(tmp_path: Path) -> None:
    work = Counting()
    with opened(tmp_path / "s") as store:
        assert answer(store, request(1), work, "ada").body == b"1"
        assert answer(store, request(1), work, "eve").body == b"2"
        assert answer(store, request(5, settled=5), work, "eve").body == b"3"
        assert answer(store, request(1), work, "ada").body == b"1"


def test_a_number_is_of_one_request(tmp_path: Path) -> None:
    work = Counting()
    with opened(tmp_path / "s") as store:
        answer(store, request(1), work)
        refused = answer(store, request(1, body=b"another"), work)
    assert refused.kind is Kind.REFUSED
    assert b"was used for another request" in refused.body
    assert work.calls == 1


def test_what_is_settled_is_let_go_and_never_done_again(tmp_path: Path) -> None:
    work = Counting()
    with opened(tmp_path / "s") as store:
        for number in (1, 2, 3):
            answer(store, request(number, settled=number), work)
        assert [answer(store, request(number), work).kind for number in (1, 2, 3)] == [Kind.GONE, Kind.GONE, Kind.REPLY]
    assert work.calls == 3


def test_what_is_settled_before_it_came_is_not_done_either(tmp_path: Path) -> None:
    """A copy that was long on its way, of a request that its client gave up."""
    work = Counting()
    with opened(tmp_path / "s") as store:
        answer(store, request(5, settled=5), work)
        assert answer(store, request(2), work).kind is Kind.GONE
    assert work.calls == 1


def test_damage_is_found(tmp_path: Path) -> None:
    work = Counting()
    with opened(tmp_path / "s") as store:
        answer(store, request(1, body=b"x"), work)
        with store._environment.begin(write=True) as transaction:
            table = store.tables["replies"]
            ((key, row),) = list(transaction.cursor(table))
            transaction.put(key, row[:-1] + b"7", db=table)
        with pytest.raises(StoreError, match="damaged"):
            answer(store, request(1, body=b"x"), work)


def test_a_store_of_another_format_and_one_that_others_can_write_to(tmp_path: Path) -> None:
    with opened(tmp_path / "s") as store, store._environment.begin(write=True) as transaction:
        transaction.put(b"format", b"9", db=store.tables["meta"])
    with pytest.raises(StoreError, match="format b'9', b'1' is known here"):
        ReplyStore(tmp_path / "s")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(StoreError, match="chmod go-w"):
        ReplyStore(tmp_path / "open")


@pytest.mark.parametrize(
    ("key", "value"),
    [(b"", b""), ("text", b""), (b"k" * 512, b""), (b"k", "text"), (b"k", None), (b"k", bytes(1 << 27))],
)
def test_rows_of_another_kind(tmp_path: Path, key: bytes, value: bytes) -> None:
    with opened(tmp_path / "s") as store, store._environment.begin(write=True) as transaction:
        rows = Rows(transaction, store.tables["data"])
        with pytest.raises(TypeError, match="bytes were expected"):
            rows[key] = value


def test_rows_are_a_mapping(tmp_path: Path) -> None:
    with opened(tmp_path / "s") as store, store._environment.begin(write=True) as transaction:
        rows = Rows(transaction, store.tables["data"])
        rows.update({b"b": b"2", b"a": b"1"})
        assert (list(rows), len(rows), rows.pop(b"a"), dict(rows)) == ([b"a", b"b"], 2, b"1", {b"b": b"2"})
        with pytest.raises(KeyError):
            del rows[b"a"]


# --- limits -----------------------------------------------------------------------------------------------------------

SMALL = Limits(replies_of_client=3, replies_of_client_bytes=4 * REPLY_OVERHEAD_BYTES, replies_bytes=1500, clients=4)
OWNERS = ("", "ada")
CLIENTS = ("a", "b", "c", "d", "e", "f")


@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(OWNERS),
            st.sampled_from(CLIENTS),
            st.integers(1, 12),
            st.integers(0, 12),
            st.integers(0, 900),
        ),
        max_size=60,
    )
)
@settings(max_examples=effort(15))
def test_within_its_limits(steps: list[tuple[str, str, int, int, int]]) -> None:
    """Nothing is done twice while its client is known, and never more is kept than is allowed."""
    done: set[tuple[str, str, int]] = set()
    recent: dict[str, OrderedDict[str, None]] = {owner: OrderedDict() for owner in OWNERS}
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder,
        opened(Path(folder) / "s", SMALL) as store,
    ):
        for owner, client, number, settled, size in steps:
            known = recent[owner]
            if client not in known:
                done = {one for one in done if one[:2] != (owner, client)}
            known[client] = None
            known.move_to_end(client)
            while len(known) > SMALL.clients:
                known.popitem(last=False)
            called: list[int] = []

            def work(rows: Rows, called: list[int] = called, size: int = size) -> bytes:
                called.append(1)
                return b"r" * size

            with store.turn() as turn:
                answered = turn.answer(owner, request(number, client, min(settled, number)), work)
            assert bool(called) == (answered.kind is Kind.REPLY and (owner, client, number) not in done)
            if (owner, client, number) in done:
                assert not called
            done.add((owner, client, number))
            check_kept(store, recent)


def check_kept(store: ReplyStore, recent: dict[str, OrderedDict[str, None]]) -> None:
    """The counts are those of the rows, and within the limits."""
    with store._environment.begin() as transaction:
        rows = {name: dict(transaction.cursor(table)) for name, table in store.tables.items()}
    assert len(rows["order"]) == len(rows["replies"])
    assert len(rows["uses"]) == len(rows["clients"])
    for owner, row in rows["owners"].items():
        clients = {key: value for key, value in rows["clients"].items() if key.startswith(owner)}
        replies = {key: value for key, value in rows["replies"].items() if key.startswith(owner)}
        count, size_bytes = (int.from_bytes(row[at : at + 8], "big") for at in (16, 24))
        assert count == len(clients) <= SMALL.clients
        assert size_bytes == sum(len(value) - 33 + REPLY_OVERHEAD_BYTES for value in replies.values())
        assert size_bytes <= SMALL.replies_bytes or len(replies) == 1
        for key, value in clients.items():
            of_client = [reply for place, reply in replies.items() if place.startswith(key)]
            assert int.from_bytes(value[16:24], "big") == len(of_client) <= SMALL.replies_of_client
    assert len(rows["clients"]) == sum(map(len, recent.values()))
