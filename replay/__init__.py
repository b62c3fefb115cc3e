"""Time travel: a replay gives a log's records to a real app once more and observes its outputs.

A replay sends nothing to others, only reads the log, and its app never becomes primary.

    with open_reader(settings.log, name) as reader:
        result = run_replay(reader, ReplayPlan(last_sequence_id=1000), AppCommand.of("counter:Counter"), sink)
"""

from __future__ import annotations

from immortal.coordinator.log.reader import RecordSource
from immortal.replay.app_process import BY_HAND, AppCommand
from immortal.replay.host import run_replay
from immortal.replay.plan import (
    OWN_VERSION,
    AppExitedError,
    ReplayError,
    ReplayPlan,
    Route,
    SharedSource,
    UpgradeFailedError,
    plan_route,
)
from immortal.replay.result import ReplayResult, Sink

__all__ = [
    "BY_HAND",
    "OWN_VERSION",
    "AppCommand",
    "AppExitedError",
    "RecordSource",
    "ReplayError",
    "ReplayPlan",
    "ReplayResult",
    "Route",
    "SharedSource",
    "Sink",
    "UpgradeFailedError",
    "plan_route",
    "run_replay",
]
