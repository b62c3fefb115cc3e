"""Registry's home with the logs of real coordinators, and new code that changes some of its instances."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from immortal.coordinator.instances.registry import Registry
from tests.helpers import talk_app
from tests.helpers.recorded import Instances, write_module

TALK = "tests.helpers.talk_app"
CLASSES = {
    "asker": talk_app.Asker,
    "helper": talk_app.Helper,
    "tally-large": talk_app.Tally,
    "tally-negative": talk_app.Tally,
    "tally-small": talk_app.Tally,
}
_ADDED = {"tally-large": (5, 200), "tally-negative": (7, -1, 8), "tally-small": (1, 2, 3)}
_CHANGES = {
    "number * 2": "number * 3",
    "self.total += number": "self.total += min(number, 100)\n        assert number >= 0, 'a negative number'",
}


def record_talk(folder: Path) -> Path:
    """Return a home: an asker and a helper that talked, and three tallies of one class with different numbers."""
    instances = Instances(folder / "logs")
    running = {name: instances.start(name, CLASSES[name]) for name in reversed(CLASSES)}
    for number in range(5):
        running["asker"].impulse("ask", number)
    for name, numbers in _ADDED.items():
        for number in numbers:
            running[name].impulse("add", number)
    instances.close()
    registry = Registry(folder / "home")
    for name, cls in CLASSES.items():
        registry.register(name, "tcp://127.0.0.1:*", log=folder / "logs" / name / "log")
        registry.remember_app(name, f"{TALK}:{cls.__name__}")
    return folder / "home"


def write_changed_code(folder: Path) -> str:
    """Write a module of the same classes: helper answers otherwise, a tally counts at most 100, and no negative number.

    On the logs of :func:`record_talk` helper and tally-large act otherwise, a call of tally-negative fails, the others
    do the same.
    """
    source = Path(talk_app.__file__).read_text()
    for old, new in _CHANGES.items():
        assert source.count(old) == 1
        source = source.replace(old, new)
    folder.mkdir()
    return write_module(folder, source)


def is_little(fleet: Mapping[str, Any]) -> bool:
    """Check of a fleet's what-if, which is broken at the end by new code alone."""
    return fleet["asker"].count <= 20


def app_options(module: str) -> list[str]:
    """Return ``--app`` for every instance, by its class in ``module``."""
    return [part for name, cls in CLASSES.items() for part in ("--app", f"{name}={module}:{cls.__name__}")]
