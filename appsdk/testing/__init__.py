"""Test environment: several instances in one process, on the test's own clock. See docs/how-to/testing.md."""

from immortal.appsdk.running.local_app import ProcessDies
from immortal.appsdk.testing.environment import Environment, crash_everywhere
from immortal.appsdk.testing.instance import Instance, Pending
from immortal.appsdk.testing.replay_check import ReplayDiffers, assert_replays
from immortal.appsdk.testing.world import NoAnswerError

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
