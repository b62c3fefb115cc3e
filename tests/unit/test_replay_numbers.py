"""Numbers of the old code on their way to the new: in the order of the records, and none too early."""

from __future__ import annotations

import threading

import pytest

from immortal.protocol.extensions import RandomDraw, pack_numbers
from immortal.replay import findings
from immortal.replay.findings import DrawnNumbersQueue


def data(sequence_id: int) -> bytes:
    return pack_numbers(sequence_id, [RandomDraw(sequence_id, 0, "", 0)])


def test_a_record_waits_until_all_that_was_drawn_in_it_is_known() -> None:
    ahead = DrawnNumbersQueue()
    assert ahead.pop_until(5) is None
    ahead.add(5, data(5), complete=False)
    assert ahead.pop_until(5) is None
    ahead.add(7, data(7), complete=False)
    ahead.add(7, b"", complete=True)
    assert [ahead.pop_until(sequence_id) for sequence_id in (5, 6, 7, 8)] == [[data(5)], [], [data(7)], None]
    ahead.end()
    assert ahead.pop_until(8) == []


def test_the_first_record_has_one_in_any_case() -> None:
    ahead = DrawnNumbersQueue()
    ahead.add(5, b"", complete=True)
    assert [ahead.pop_until(4), ahead.pop_until(5)] == [[pack_numbers(4)], []]


def test_old_code_that_tells_none_holds_nothing_up() -> None:
    ahead = DrawnNumbersQueue()
    ahead.end()
    assert ahead.pop_until(5) == []


def test_old_code_that_is_far_ahead_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings, "AHEAD_SIZE_BYTES_MAX", 0)
    monkeypatch.setattr(findings, "PAUSE_S", 60.0)
    ahead = DrawnNumbersQueue()
    ahead.add(4, b"", complete=True)

    def tell() -> None:
        ahead.add(5, data(5), complete=False)
        ahead.add(5, b"", complete=True)

    telling = threading.Thread(target=tell)
    telling.start()
    while not ahead._size_bytes:  # until it has told the first, and pauses
        assert telling.is_alive()
    assert ahead.pop_until(4) == [pack_numbers(4)]
    assert ahead.pop_until(5) is None
    ahead.end()
    assert ahead.pop_until(5) == [data(5)]
    telling.join(30)
    assert not telling.is_alive()
