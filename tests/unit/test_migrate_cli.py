"""`immortal migrate`: what it says of a move that takes long."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from immortal.cli import lifecycle as module
from immortal.cli import main
from immortal.coordinator.instances.registry import Registry

HEIR = "two (process 7)"


class SlowPlace:
    """A log in a database whose successor takes it over at the third look."""

    is_shared = True

    def __init__(self) -> None:
        self.looks: Iterator[str | None] = iter(["one (process 5)", None, HEIR])

    def holder(self) -> str | None:
        return next(self.looks, HEIR)

    def endpoint(self) -> str:
        return "tcp://two:7000"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    Registry(tmp_path).register("shop", "tcp://127.0.0.1:*")
    place = SlowPlace()
    monkeypatch.setattr(module, "place_of", lambda log: place)
    monkeypatch.setattr(module, "TIMEOUT_S", 0.0)
    monkeypatch.setattr(module, "POLL_S", 0.0)

    def query(*arguments: Any, **options: Any) -> dict[str, str]:
        return {"to": HEIR}

    monkeypatch.setattr(module.control, "query", query)
    return tmp_path


def test_a_move_that_outlasts_the_limit_goes_on(home: Path) -> None:
    result = CliRunner().invoke(main, ["--home", str(home), "migrate", "shop"])
    assert result.exit_code == 1
    assert "the move continues" in result.output
    assert "--wait waits longer" in result.output


def test_with_wait_its_end_is_waited_for(home: Path) -> None:
    result = CliRunner().invoke(main, ["--home", str(home), "migrate", "shop", "--wait"])
    assert (result.exit_code, result.output) == (0, f"shop now runs on {HEIR}, at tcp://two:7000\n")
