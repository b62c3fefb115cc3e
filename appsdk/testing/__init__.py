"""Tests of immortals: several in one process, on a clock of the test's own. See docs/guide/testing.md."""

from appsdk.testing.environment import Environment, Instance, NoAnswerError, Pending
from appsdk.testing.exploring import crash_everywhere
from appsdk.testing.golden import assert_replays
from appsdk.testing.replaying import ReplayDiffers

__all__ = [
    "Environment",
    "Instance",
    "NoAnswerError",
    "Pending",
    "ReplayDiffers",
    "assert_replays",
    "crash_everywhere",
]
