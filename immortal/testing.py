"""A test environment for services: real coordinators in memory, crashes and replays. `docs/how-to/testing.md`."""

from immortal.appsdk.testing import (
    Environment,
    Instance,
    NoAnswerError,
    Pending,
    ProcessDies,
    ReplayDiffers,
    assert_replays,
    crash_everywhere,
)

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
