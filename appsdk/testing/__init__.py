"""Tests of immortals: several in one process, on a clock of the test's own. See docs/guide/testing.md."""

from appsdk.running.local_app import ProcessDies
from appsdk.testing.environment import Environment
from appsdk.testing.exploring import crash_everywhere
from appsdk.testing.golden import assert_replays
from appsdk.testing.instance import Instance, Pending
from appsdk.testing.replaying import ReplayDiffers
from appsdk.testing.world import NoAnswerError

__all__ = [
    "Environment",
    "Instance",
    "NoAnswerError",
    "Pending",
    "ProcessDies",
    "ReplayDiffers",
    "assert_replays",
    "crash_everywhere",
]
