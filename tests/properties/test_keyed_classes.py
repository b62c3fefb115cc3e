"""Keyed classes against a map of maps: whatever is called, fails, crashes or moves, each key has its books."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

import immortal
from immortal import Immortal, rpc
from immortal.testing import Environment
from tests.helpers.effort import effort

KEYS = ("ann", "bob", "eve", "joe", "kim")


class Book(Immortal, keyed=str):
    rows: dict[str, int]

    def __init__(self) -> None:
        self.rows = {}

    @rpc
    def put(self, row: str, n: int) -> int:
        self.rows[row] = self.rows.get(row, 0) + n
        immortal.signal("put", n)
        return self.rows[row]

    @rpc
    def fail(self, row: str) -> None:
        self.rows[row] = -1
        immortal.forget_key()
        raise ValueError(row)

    @rpc
    def forget(self) -> int:
        immortal.forget_key()
        return len(self.rows)

    @rpc(limit=1)
    async def collect(self, row: str) -> int:
        await immortal.event("next put")  # never signalled before it is told to end
        return await immortal.step(self.put, row, 1)

    @rpc
    def end(self) -> None:
        immortal.signal("next put")


class Model:
    """What must come of it: the rows by key, and of each key the rows for which handlers wait, in order."""

    def __init__(self) -> None:
        self.books: dict[str, dict[str, int]] = {}
        self.waiting: dict[str, list[str]] = {}
        self.signals: dict[str, int] = {}

    def of(self, key: str) -> dict[str, int]:
        return self.books.setdefault(key, {})

    def settle(self, key: str) -> None:
        while self.signals.get(key) and self.waiting.get(key):
            self.signals[key] -= 1
            row = self.waiting[key].pop(0)
            self.of(key)[row] = self.of(key).get(row, 0) + 1


STEP = st.tuples(
    st.sampled_from(
        ["put", "put", "fail", "forget", "collect", "end", "move", "crash", "crash_app", "checkpoint", "stop"]
    ),
    st.sampled_from(KEYS),
    st.sampled_from(["tea", "jam"]),
)


@settings(max_examples=effort(7), deadline=None)
@given(shards=st.sampled_from([1, 3]), steps=st.lists(STEP, max_size=25))
def test_each_key_has_its_books(shards: int, steps: list[tuple[str, str, str]]) -> None:
    model, target = Model(), 0
    with Environment(fail_alone=True) as env:
        books = env.start(Book, "books", shards=shards)
        for what, key, row in steps:
            book: Any = books[key]
            if what == "put":
                rows = model.of(key)
                rows[row] = rows.get(row, 0) + 2
                assert book.call(Book.put, row, 2) == rows[row]
            elif what == "fail":
                failed = book.begin(Book.fail, row)
                env.run()
                assert failed.done
            elif what == "forget":
                assert book.call(Book.forget) == len(model.books.pop(key, {}))
            elif what == "collect":
                book.send(Book.collect, row)
                env.run()
                model.waiting.setdefault(key, []).append(row)
                model.settle(key)
            elif what == "end":
                model.of(key)
                book.call(Book.end)
                model.signals[key] = model.signals.get(key, 0) + 1
                model.settle(key)
            elif what == "move":
                target = target or {1: 3, 3: 2, 2: 1}[books.count]
                waiting = env.change_shards(books, target)
                assert bool(waiting) == (books.count != target)
                assert not waiting or any(model.waiting.values())
                target = target if waiting else 0
            elif what == "checkpoint":
                book.instance.checkpoint()
            else:
                getattr(book.instance, what)()
                book.instance.recover()
            assert {name: one.rows for name, one in books.keys.items()} == model.books
