"""Homes on disk: one with the logs of an Environment, and the states at the ends of logs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from immortal.appsdk.running.inspection import inspect_state
from immortal.coordinator.instances.registry import Registry
from immortal.coordinator.log.open import place_of
from immortal.replay.fleet.opening import opened_fleet
from immortal.replay.fleet.player import first_checkpoint
from immortal.replay.fleet.recorded import Recorded
from immortal.testing import Environment


def write_home(env: Environment, folder: Path, apps: Mapping[str, str], *, keep_code: bool = True) -> Path:
    """Write the logs of ``apps`` ("module:Class" by instance) as a registry folder.

    ``keep_code`` False: for classes that are made as the test runs, which their module's source does not have.
    """
    registry = Registry(folder)
    for name, app in apps.items():
        settings = registry.register(name, "tcp://127.0.0.1:*", app=app, keep_code=keep_code)
        backend = env._world.nodes[name].store.backend
        with backend.view() as view:
            place_of(settings.log).copy(view, backend.identity, None)
    return folder


def states(home: Path) -> dict[str, Any]:
    """Return the state behind the last record of each service."""
    found = {}
    with opened_fleet(home, trust_pickle=False) as opened:
        for name, reader in opened.readers.items():
            route = first_checkpoint(reader, None)
            code = opened.code_of(name)
            recorded = Recorded(reader, route, code, frozenset(), None)
            found[name] = inspect_state(code, recorded.state).state
    return found
