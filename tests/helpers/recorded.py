"""Logs of SDK apps, written without a process or socket: real machines over real logs, with the apps' dispatchers."""

from __future__ import annotations

import importlib.util
import itertools
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from immortal.appsdk.calls.context import SEED_SIZE_BYTES
from immortal.appsdk.dispatch.dispatcher import Dispatcher
from immortal.appsdk.effects.effect import EffectRunner
from immortal.appsdk.handlers.definition import definition_of
from immortal.appsdk.handlers.proxy import Impulses
from immortal.coordinator.core import effects as ef
from immortal.coordinator.core import events as ev
from immortal.coordinator.core.limits import Limits
from immortal.log import create_log, open_log
from tests.helpers.core import Driven

_modules = itertools.count(1)


def write_module(folder: Path, source: str) -> str:
    """Write a module in ``folder``; return its name, for ``module:Class`` in a process with that folder on its path."""
    name = f"recorded_app_{next(_modules)}"
    (folder / f"{name}.py").write_text(source)
    return name


def load_module(folder: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


class RecordedInstance:
    """Instance of a test: ``cls`` runs in this process. All that it does goes through its log in ``folder``."""

    def __init__(self, instances: Instances, name: str, cls: type, *, upgrade_to: int | None = None) -> None:
        self.instances = instances
        self.folder = instances.folder / name / "log"
        self.name = name
        new = not (self.folder / "data.mdb").exists()
        store: Any = create_log(self.folder, name) if new else open_log(self.folder, name)
        self.driven = Driven(store, name=name, upgrade_to=upgrade_to, limits=instances.limits)
        self.driven.now_ns = instances.next_time_ns()
        self.dispatcher = Dispatcher(
            definition_of(cls),
            lambda: bytes(SEED_SIZE_BYTES),
            effects=instances.effects,
            fails_alone=instances.fails_alone,
        )
        self.driven.handle(ev.AppConnected())

    @property
    def app(self) -> Any:
        return self.dispatcher.instance

    def impulse(self, handler: str, *arguments: Any, to: str = "") -> None:
        """Send one impulse, which is logged and handled before this returns. ``to``: an attribute that is a peer."""
        self.impulses([(handler, arguments)], to=to)

    def impulses(self, calls: Sequence[tuple[str, Sequence[Any]]], *, to: str = "") -> None:
        """Send several impulses, in one record."""
        dispatcher = self.dispatcher
        impulses = Impulses(dispatcher.instance, dispatcher.definition, dispatcher.outbox.impulses)
        target = getattr(impulses, to) if to else impulses

        def send() -> None:
            for handler, arguments in calls:
                getattr(target, handler)(*arguments)

        hook = threading.Thread(target=send)  # a handlers' thread can't send impulses
        hook.start()
        hook.join()
        self.instances.settle()

    def checkpoint(self) -> None:
        self.driven.handle(ev.CheckpointRequested())
        self.instances.settle()

    def turn(self) -> bool:
        """Let the app handle its input; return False if there was none."""
        driven, dispatcher = self.driven, self.dispatcher
        driven.now_ns = self.instances.next_time_ns()
        data = bytes(driven.app_bytes)
        driven.app_bytes.clear()
        if data:
            driven.app_took_all()
            dispatcher.receive_data(data)
        while True:
            event = dispatcher.next_event()
            sent = b"".join(bytes(chunk) for chunk in dispatcher.data_to_send())
            if sent:
                driven.data(sent)
            if event is None:
                break
        return bool(data or sent)

    def close(self) -> None:
        self.driven.store.close()


class Instances:
    """Instances of one test, which reach each other."""

    def __init__(
        self,
        folder: Path,
        effects: EffectRunner | None = None,
        limits: Limits | None = None,
        *,
        fails_alone: bool = False,
    ) -> None:
        self.fails_alone = fails_alone  # if False, a message that fails makes the test fail
        self.folder = folder
        self.effects = effects
        self.limits = limits
        self._running: dict[str, RecordedInstance] = {}
        self._time_ns = 1_700_000_000_000_000_000

    def next_time_ns(self) -> int:
        self._time_ns += 1_000_000
        return self._time_ns

    def start(self, name: str, cls: type, *, upgrade_to: int | None = None) -> RecordedInstance:
        """Start an instance for the first time, or recover it."""
        instance = self._running[name] = RecordedInstance(self, name, cls, upgrade_to=upgrade_to)
        self.settle()
        return instance

    def stop(self, name: str) -> None:
        self._running.pop(name).close()

    def settle(self) -> None:
        """Run until no instance has anything to do."""
        moved = True
        while moved:
            moved = False
            for instance in list(self._running.values()):
                moved = instance.turn() or moved
                effects, instance.driven.effects = instance.driven.effects, []
                for effect in effects:
                    moved = self._carry(instance, effect) or moved

    def _carry(self, instance: RecordedInstance, effect: ef.Effect) -> bool:
        if isinstance(effect, ef.SendToPeer):
            receiver = self._running.get(effect.destination)
            if receiver is None:
                return False
            token = (instance.name, effect.tag)
            receiver.driven.handle(ev.PeerFrameReceived(token, effect.frame))
            return True
        if isinstance(effect, ef.ReplyToPeer):
            assert isinstance(effect.token, tuple)
            sender, tag = effect.token
            self._running[sender].driven.handle(ev.PeerReplied(instance.name, tag, effect.frame))
            return True
        if isinstance(effect, ef.Stop):
            raise AssertionError(f"{instance.name} stopped: {effect.error}")
        return False

    def close(self) -> None:
        for name in list(self._running):
            self.stop(name)
