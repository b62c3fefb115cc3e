"""Which line is noted for a change: the innermost one that made it, and the last."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from immortal.replay.travel import lines
from immortal.replay.travel.lines import LineWatch


class Box:
    def __init__(self) -> None:
        self.value = 0

    def put(self, value: int) -> int:
        self.value = value
        return value

    def raised(self) -> int:
        return self.value + 1


def watched(box: Box, action: Callable[[], object], *, is_late: bool = False) -> LineWatch:
    package = __name__.partition(".")[0]
    watch = LineWatch(lambda: box.value, package, lambda: None, lambda: is_late, box)
    try:
        action()
    finally:
        watch.stop()
    assert sys.gettrace() is not watch
    return watch


def text(watch: LineWatch) -> str:
    place = watch.place()
    return "" if place is None else place["text"]


def test_the_line_of_the_innermost_call_is_noted() -> None:
    box = Box()

    def action() -> None:
        box.put(3)
        len("no change")

    assert text(watched(box, action)) == "self.value = value"


def test_a_line_that_calls_and_then_assigns_is_the_one() -> None:
    box = Box()

    def action() -> None:
        box.value = box.raised()

    assert text(watched(box, action)) == "box.value = box.raised()"


def test_the_last_change_counts_also_one_behind_an_exception() -> None:
    box = Box()

    def action() -> None:
        box.put(1)
        try:
            raise ValueError
        except ValueError:
            box.value += 5

    assert text(watched(box, action)) == "box.value += 5"


def test_no_change_has_no_line() -> None:
    watch = watched(Box(), lambda: None)
    assert (watch.place(), watch.changed, watch.is_cut) == (None, False, False)


def test_one_that_is_late_gives_up() -> None:
    box = Box()
    watch = watched(box, lambda: box.put(1), is_late=True)
    assert (watch.place(), watch.is_cut) == (None, True)


class Shelf(Box):
    def __init__(self) -> None:
        super().__init__()
        self.left = {"tea": 2}
        self.items = [1, 2]
        self.mode = "open"

    def take(self, item: str) -> None:
        other = "rice"
        count = self.left.get(item, 0)
        unused = self.left
        assert unused
        if self.mode == "open":
            count = count * 3
        count += self.items[-1]
        self.items.append(other)
        self._set(self.left[item], count)
        self.value += 0 * len(self.left.values())

    def _set(self, key: int, number: int) -> None:
        twice = number * 2
        self.value = twice


def test_values_that_were_read_before_are_noted_by_their_paths() -> None:
    shelf = Shelf()
    watch = watched(shelf, lambda: shelf.take("tea"))
    assert watch.read == ["left['tea']", "left", "mode", "items[1]"]


def test_lines_behind_it_are_those_that_set_what_it_uses() -> None:
    shelf = Shelf()
    watch = watched(shelf, lambda: shelf.take("tea"))
    assert text(watch) == "self.value = twice"
    assert [line["text"] for line in watch.lines_before()] == [
        "twice = number * 2",
        "self._set(self.left[item], count)",
        "count += self.items[-1]",
        "count = count * 3",
        "count = self.left.get(item, 0)",
        'watch = watched(shelf, lambda: shelf.take("tea"))',
    ]


def test_behind_a_line_that_runs_often_each_place_is_shown_once() -> None:
    box = Box()

    def action() -> None:
        for number in range(20):
            box.put(number)
        box.value = 50

    assert [line["text"] for line in watched(box, action).lines_before()] == ["self.value = value"]


def test_lines_that_were_not_kept_make_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "TRAIL_MAX", 3)
    box = Box()

    def action() -> None:
        number = 1
        box.put(number)
        for one in range(9):
            number = one + 5
        box.value = number

    watch = watched(box, action)
    assert text(watch) == "box.value = number"
    assert [line["text"] for line in watch.lines_before()] == ["self.value = value"]
