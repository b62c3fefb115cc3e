"""Four instances whose new code, under the same module name or another, changes state, calls, both or nothing."""

from __future__ import annotations

from pathlib import Path

from immortal.coordinator.instances.registry import Registry
from tests.helpers.recorded import Instances, load_module

STATUSES = {"both": 3, "calls": 3, "nothing": 0, "state": 3}
"""Exit status of a what-if with the new code, by instance."""

OLD = """
from immortal import Immortal, peer, rpc, impulse


class Store(Immortal):
    @rpc
    def ship(self, number: int) -> None:
        pass


class {name}(Immortal):
    store = peer(Store, "store")
    total: int

    def __init__(self) -> None:
        self.total = 0

    @impulse
    def order(self, number: int) -> None:
        self.total += {added}
        self.store.ship.fork({shipped})
"""
_NEW = {"both": ("number * 2", "number * 2"), "calls": ("number", "number * 2"), "nothing": ("number", "number")}
_NEW["state"] = ("number * 2", "number")


def source_of(instance: str, *, new: bool = False) -> str:
    added, shipped = _NEW[instance] if new else ("number", "number")
    return OLD.format(name=instance.capitalize(), added=added, shipped=shipped)


def write_code(folder: Path, module: str, *, new: bool = False) -> None:
    """Write a package ``module`` with a submodule for each instance."""
    (folder / module).mkdir(parents=True)
    (folder / module / "__init__.py").write_text(f"from {module} import state\n")
    for instance in STATUSES:
        (folder / module / f"{instance}.py").write_text(source_of(instance, new=new))


def app_of(instance: str, module: str = "flow") -> str:
    return f"{module}.{instance}:{instance.capitalize()}"


def app_options(module: str = "flow") -> list[str]:
    return [part for name in STATUSES for part in ("--app", f"{name}={app_of(name, module)}")]


def record_flow(folder: Path) -> None:
    """Register in folder/home the logs of folder/old/flow; folder/new/flow and folder/new/flow2 are new code."""
    instances = Instances(folder / "logs")
    registry = Registry(folder / "home")
    for name in STATUSES:
        module = f"flow_{name}_as_recorded"
        (folder / f"{module}.py").write_text(source_of(name))
        running = instances.start(name, getattr(load_module(folder, module), name.capitalize()))
        for number in range(1, 6):
            running.impulse("order", number)
        registry.register(name, "tcp://127.0.0.1:*", log=folder / "logs" / name / "log")
        registry.remember_app(name, app_of(name))
    instances.close()
    write_code(folder / "old", "flow")
    write_code(folder / "new", "flow", new=True)
    write_code(folder / "new", "flow2", new=True)
