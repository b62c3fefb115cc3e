"""Test environment for services: real coordinators in memory, crashes and replays. `docs/how-to/testing.md`."""

from immortal.appsdk.testing import *  # noqa: F403
from immortal.appsdk.testing import __all__ as _names
from immortal.appsdk.testing.sample import sample_fleet as sample_fleet
from immortal.replay.fleet.opening import assert_fleet_unchanged as assert_fleet_unchanged
from immortal.replay.fleet.opening import what_if as what_if

__all__ = [*_names, "assert_fleet_unchanged", "sample_fleet", "what_if"]
