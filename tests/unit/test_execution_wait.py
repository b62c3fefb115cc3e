"""The sampled wait until execution: what a coordinator of the test's own says, by a clock of the test's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry

from immortal.coordinator.notices.metrics import (
    INTERVAL_S,
    METHOD_CHARACTERS_MAX,
    METHODS_MAX,
    PAUSE_FACTOR,
    WAIT_S_MAX,
    ExecutionWait,
)
from immortal.protocol.errors import ImmortalError


class Scene:
    """``takes_s``: how long the app takes to come to a question. ``backlog``: of each status in turn."""

    def __init__(self, *backlog: int, takes_s: float = 0.0, status_s: float = 0.0, **status: Any) -> None:
        self.now_s = 100.0
        self.asked: list[str] = []
        self.takes_s = takes_s
        self.times: list[tuple[str, int]] = []
        self._backlog = list(backlog)
        self._status_s = status_s
        self._given = {"app_connected": True, "handling": None} | status
        self._registry = CollectorRegistry()
        self.sampler = ExecutionWait("a", self._registry, self.ask, self.wait, lambda: self.now_s)

    def ask(self, verb: str, argument: object, timeout_s: float) -> Mapping[str, Any]:
        self.asked.append(verb)
        if verb == "status":
            self.now_s += self._status_s
            backlog = self._backlog.pop(0) if len(self._backlog) > 1 else self._backlog[0]
            return {"fed_sequence_id": 100 - backlog, "backlog_records": backlog, **self._given}
        self.now_s += min(self.takes_s, timeout_s)
        if self.takes_s > timeout_s:
            raise ImmortalError("no answer in time")
        return {"handler": None, "times": self.times}

    def wait(self, seconds: float) -> bool:
        self.now_s += seconds
        return False

    def handler(self, what: str, method: str) -> float | None:
        labels = {"instance_name": "a", "method": method}
        return self._registry.get_sample_value(f"immortal_handler_seconds_{what}", labels)

    @property
    def observed(self) -> tuple[float, float]:
        """(count, sum)."""
        found = [self._registry.get_sample_value(f"immortal_execution_wait_seconds_{what}", {"instance_name": "a"})
                 for what in ("count", "sum")]  # fmt: skip
        return float(found[0] or 0), round(float(found[1] or 0), 6)


def test_the_time_until_the_app_has_come_to_it() -> None:
    scene = Scene(0, takes_s=0.25)
    assert scene.sampler.sample() == INTERVAL_S
    assert scene.asked == ["status", "handlers"]
    assert scene.observed == (1, 0.25)


def test_what_the_app_was_not_given_yet_counts() -> None:
    scene = Scene(7, 3, 0, takes_s=1.0)
    scene.sampler.sample()
    assert scene.asked == ["status", "status", "status", "handlers"]
    assert scene.observed == (1, 1.1)


def test_a_backlog_that_does_not_move_is_the_longest_wait() -> None:
    scene = Scene(7)
    assert scene.sampler.sample() == WAIT_S_MAX
    assert "handlers" not in scene.asked
    assert scene.observed == (1, WAIT_S_MAX)


def test_an_app_that_does_not_answer_is_asked_again_much_later() -> None:
    scene = Scene(0, takes_s=1e9)
    assert scene.sampler.sample() == WAIT_S_MAX
    assert scene.observed == (1, WAIT_S_MAX)


def test_no_questions_pile_up_behind_a_handler_that_takes_long() -> None:
    scene = Scene(0, handling={"for_s": 30.0})
    scene.sampler.sample()
    assert scene.asked == ["status"]
    assert scene.observed == (0, 0)


def test_without_an_app_there_is_nothing_to_measure() -> None:
    scene = Scene(0, app_connected=False)
    scene.sampler.sample()
    assert scene.asked == ["status"]


def test_what_costs_more_is_asked_less_often() -> None:
    scene = Scene(0, status_s=0.05)
    assert round(scene.sampler.sample(), 6) == 0.05 * PAUSE_FACTOR


def test_a_coordinator_that_refuses_is_no_sample() -> None:
    class Refusing(Scene):
        def ask(self, verb: str, argument: object, timeout_s: float) -> Mapping[str, Any]:
            if verb == "handlers":
                raise ImmortalError("the app does not work now")
            return super().ask(verb, argument, timeout_s)

    scene = Refusing(0)
    assert scene.sampler.sample() == INTERVAL_S
    assert scene.observed == (0, 0)


def test_handler_times_come_with_the_answer() -> None:
    scene = Scene(0)
    scene.times = [("Shop.buy", 2_000_000), ("Shop.buy", 3_000_000), ("other", -5)]
    scene.sampler.sample()
    assert scene.handler("count", "Shop.buy") == 2
    assert scene.handler("sum", "Shop.buy") == 0.005
    assert scene.handler("sum", "other") == 0


def test_an_app_that_names_ever_new_methods_has_no_more_labels() -> None:
    scene = Scene(0)
    scene.times = [(f"method {number}".ljust(300, "x"), 1) for number in range(METHODS_MAX + 50)]
    scene.sampler.sample()
    assert scene.handler("count", "other") == 50
    assert scene.handler("count", "method 7".ljust(METHOD_CHARACTERS_MAX, "x")) == 1
