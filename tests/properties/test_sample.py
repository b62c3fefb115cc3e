"""Samples of recorded fleets against the fleets: all inputs give the same states, and some give logs that replay."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, given, settings

from immortal.testing import sample_fleet
from tests.helpers.effort import effort
from tests.helpers.homes import states, write_home
from tests.properties.test_what_if_fleet import NAMES, Fleet, Run, fleets, variant


@settings(max_examples=effort(5), deadline=None, suppress_health_check=list(HealthCheck))
@given(fleets())
def test_all_inputs_give_the_states_of_the_fleet_and_some_give_logs_that_replay(fleet: Fleet) -> None:
    made, _, calls, events = fleet
    kills = {at: one for at, one in events.items() if one[0] != "upgrade"}  # today's class handles all of a sample
    classes = [variant(program) for program in made]
    names = NAMES[: len(classes)]
    for name, cls in zip(names, classes, strict=True):
        setattr(sys.modules[__name__], f"Node_{name}", cls)
    run = Run(classes, {}, calls, kills)
    with tempfile.TemporaryDirectory() as folder:
        home = write_home(
            run.env, Path(folder, "home"), {name: f"{__name__}:Node_{name}" for name in names}, keep_code=False
        )
        whole = sample_fleet(home, Path(folder, "whole"))
        assert [one.inputs for one in whole.services] == [one.inputs_then for one in whole.services]
        assert [one.messages for one in whole.services] == [one.messages_then for one in whole.services]
        assert states(Path(folder, "whole")) == states(home)
        sample_fleet(home, Path(folder, "some"), keep=lambda one: one.arguments["number"] % 2 == 0)
