"""Threads that are woken one at a time: none of the work is left lying, and what waits holds up nothing."""

from __future__ import annotations

import threading
from queue import SimpleQueue

import pytest

from immortal.appsdk.effects.runner import Threads
from tests.helpers.sdk import WAIT_S

COUNT = 8


def test_as_many_pieces_run_side_by_side_as_there_are_threads() -> None:
    """Each waits for all of the others, round by round, whoever adds them."""
    done: SimpleQueue[int] = SimpleQueue()

    def work(gate: threading.Barrier) -> None:
        done.put(gate.wait(WAIT_S))

    threads = Threads(COUNT, work)
    for _ in range(100):
        gate = threading.Barrier(COUNT)
        threads.add(gate)
        others = threading.Thread(target=lambda gate=gate: [threads.add(gate) for _ in range(COUNT // 2)])
        others.start()
        for _ in range(COUNT - COUNT // 2 - 1):
            threads.add(gate)
        assert sorted(done.get(timeout=WAIT_S) for _ in range(COUNT)) == list(range(COUNT))
        others.join()


def test_each_piece_is_done_once_in_order_by_few() -> None:
    """Work that waits for nothing is begun in its order; no more threads are made than there may be."""
    begun: list[int] = []
    by: set[int] = set()
    last = threading.Event()

    def work(number: int) -> None:
        begun.append(number)
        by.add(threading.get_ident())
        if number == 9_999:
            last.set()

    threads = Threads(1, work)
    for number in range(10_000):
        threads.add(number)
    assert last.wait(WAIT_S)
    assert begun == list(range(10_000))
    assert len(by) == 1


def test_what_was_not_begun_is_forgotten() -> None:
    done: SimpleQueue[str] = SimpleQueue()
    go = threading.Event()

    def work(name: str) -> None:
        done.put(name)
        assert go.wait(WAIT_S)

    threads = Threads(1, work)
    threads.add("first")
    assert done.get(timeout=WAIT_S) == "first"
    threads.add("forgotten")
    threads.clear()
    threads.add("last")
    go.set()
    assert done.get(timeout=WAIT_S) == "last"


def test_without_another_thread_those_that_there_are_do_it_all(monkeypatch: pytest.MonkeyPatch) -> None:
    done: SimpleQueue[int] = SimpleQueue()
    go = threading.Event()

    def work(number: int) -> None:
        assert go.wait(WAIT_S)
        done.put(number)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    threads = Threads(COUNT, work)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            Threads(COUNT, work).add(0)
    threads.add(1)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    for number in (2, 3):
        threads.add(number)
    go.set()
    assert [done.get(timeout=WAIT_S) for _ in range(3)] == [1, 2, 3]
