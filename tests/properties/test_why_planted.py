"""`immortal why` finds planted bugs: the input from outside, the message that ran the wrong line, and that line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.planted import BUGS, Planted


@pytest.mark.parametrize("seed", range(0, len(BUGS), 3), ids=list(BUGS)[::3])
def test_it_names_input_handler_and_line(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    planted = Planted(seed)
    found = planted.ask(tmp_path)
    assert found.is_wrong
    assert found.names_culprit, found.text
    assert found.names_handler, found.text
    assert found.names_line, found.text


def test_without_the_culprit_there_is_nothing_wrong(tmp_path: Path) -> None:
    planted = Planted(0)
    runs = [planted.record(tmp_path, is_right=is_right, without=planted.culprit) for is_right in (True, False)]
    assert runs[0].states[planted.service].stock == runs[1].states[planted.service].stock
