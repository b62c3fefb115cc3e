"""Proof of the what-if's tests: a mistake that is planted in its engine makes them fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from immortal.appsdk.handlers.definition import definition_of
from immortal.appsdk.testing.instance import MemorySource
from immortal.replay.fleet import player
from immortal.replay.fleet.model import Logs, Rules
from immortal.replay.fleet.outcome import what_if_fleet
from immortal.replay.fleet.simulation import Simulation
from immortal.testing import Environment
from tests.properties import test_what_if_fleet as fleets
from tests.properties.test_what_if_fleet import Node, compare, said, variant
from tests.simulation.mutations import Mutation, planted


@pytest.fixture(autouse=True)
def nothing_ran() -> Iterator[None]:
    yield
    fleets.RAN.clear()


def another_call() -> None:
    """What the changed service asks another one for, and the answer, are others."""
    compare([[("call", 1, 0)], []], {0: [("call", 1, 3)]}, [(0, 0, 5), (3, 0, 7)], {})


def a_call_of_the_last_service() -> None:
    compare([[], [], [], [("call", 0, 1)]], {3: [("call", 0, 2)]}, [(0, 3, 5), (3, 3, 7)], {})


def another_effect() -> None:
    compare([[("effect", 0, 0)], []], {0: [("effect", 0, 1), ("effect", 0, 2)]}, [(0, 0, 1), (3, 0, 4)], {})


def a_run_from_a_checkpoint() -> None:
    """It says what a run from the beginning says, if the change matters only later."""
    with Environment(fail_alone=True) as env:
        classes: dict[str, type[Node]] = {"a": variant([("refuse", 0, 1)]), "b": variant([])}
        nodes = {name: env.start(cls, name) for name, cls in classes.items()}
        nodes["a"].begin(Node.add, 5)
        env.advance(seconds=1)
        for node in nodes.values():
            node.checkpoint()
        begin_ns = env._world.now_ns
        env.advance(seconds=1)
        nodes["a"].begin(Node.add, 7)
        env.advance(seconds=1)
        for node in nodes.values():  # a run from here on would miss what differs
            node.checkpoint()
        env.run()
        changes = {"a": variant([("refuse", 0, 2)])}
        sources = {name: MemorySource(name, env._world.nodes[name].store) for name in classes}
        definitions = {name: definition_of(cls) for name, cls in changes.items()}
        logs = Logs(sources, lambda name: definition_of(classes[name]), definitions, begin_ns)
        assert said(what_if_fleet(logs, Rules()))["a"] == {"total": (12, 5), "counts[7]": (1, None)}


MISTAKES: list[tuple[Mutation, Callable[[], None]]] = [
    (
        Mutation(
            "a service is left out of the cone",
            Simulation,
            "_send",
            "receiver = self._join(name, number)",
            "return",
        ),
        another_call,
    ),
    (
        Mutation(
            "a message comes before its cause",
            Simulation,
            "_is_ready",
            "if made_in is not None and made_in > sender.reached:",
            "if False:",
        ),
        a_call_of_the_last_service,
    ),
    (
        Mutation(
            "an effect is let outside",
            Rules,
            "_run",
            "        positional, named = request.arguments\n",
            "        positional, named = request.arguments\n        request.function(*positional, **named)\n",
        ),
        another_effect,
    ),
    (
        Mutation(
            "an effect gets the result of another one",
            Rules,
            "result",
            "if one.encoded == encoded",
            "if True",
        ),
        another_effect,
    ),
    (
        Mutation(
            "a call gets the answer that the log has, to what was asked then",
            Simulation,
            "_handle_others",
            "if sent.message != slot.message:",
            "if False:",
        ),
        another_call,
    ),
    (
        Mutation(
            "a run begins at a checkpoint of a later cut",
            player,
            "first_checkpoint",
            "if one.time_ns <= not_after_ns",
            "if True",
        ),
        a_run_from_a_checkpoint,
    ),
]


@pytest.mark.parametrize(("mistake", "check"), [pytest.param(*one, id=one[0].name) for one in MISTAKES])
def test_a_mistake_is_found(mistake: Mutation, check: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    check()
    fleets.RAN.clear()
    if mistake.owner is player:  # the function is known by name elsewhere
        for room in ("simulation", "outcome"):
            monkeypatch.setattr(f"immortal.replay.fleet.{room}.first_checkpoint", _late_bound)
    with planted(mistake), pytest.raises(AssertionError):
        check()


def _late_bound(*arguments: Any) -> Any:
    return player.first_checkpoint(*arguments)
