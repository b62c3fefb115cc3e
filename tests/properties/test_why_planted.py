"""`immortal why` finds planted bugs: the input from outside, the message that ran the wrong line, and that line."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import cast

import pytest

from immortal.replay.travel.minimal import PartialRuns
from immortal.replay.travel.sessions import Sessions
from immortal.replay.why import Explainer
from tests.helpers.planted import BUGS, InProcess, Planted


@pytest.mark.parametrize("seed", range(0, len(BUGS), 3), ids=list(BUGS)[::3])
def test_it_names_input_handler_and_line(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    planted = Planted(seed)
    found = planted.ask(tmp_path)
    assert found.is_wrong
    assert found.names_culprit, found.text
    assert found.names_handler, found.text
    assert found.names_line, found.text


def test_the_fewest_inputs_are_looked_for_among_those_that_explain_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    tried: list[int] = []
    whole = PartialRuns.value_after
    monkeypatch.setattr(
        PartialRuns, "value_after", lambda runs, kept, look: (tried.append(len(kept)), whole(runs, kept, look))[1]
    )
    planted = Planted(10)  # a handler adds to an answer
    registry = planted.record(tmp_path).registry
    with closing(InProcess(registry)) as sessions:
        explainer = Explainer(registry, cast("Sessions", sessions))
        found = explainer.minimal(explainer.explain(planted.service, planted.path))
    assert tried[0] == found.of
    assert max(tried[1:]) < found.of / 2
    assert len(found.inputs) == 3


def test_without_the_culprit_there_is_nothing_wrong(tmp_path: Path) -> None:
    planted = Planted(0)
    runs = [planted.record(tmp_path, is_right=is_right, without=planted.culprit) for is_right in (True, False)]
    assert runs[0].states[planted.service].stock == runs[1].states[planted.service].stock
