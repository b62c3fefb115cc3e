"""Service in one process: its coordinator runs in the app's own thread. `docs/how-to/embedded.md`.

    run(Orders, "orders")                           as a program of its own; never returns
    with start(Orders, "orders"):                   in a thread: for tests, notebooks, several instances

The log, the wire and the guarantees are those of `immortal run`; a log can move between both ways without change.
"""

from __future__ import annotations

import contextvars
import os
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from immortal.appsdk.effects.stored_files import STORE_VARIABLE
from immortal.appsdk.embedded.app import EmbeddedApp
from immortal.appsdk.errors import EXIT_FAILED, AppError, StartError
from immortal.appsdk.handlers.definition import Definition, definition_of
from immortal.appsdk.running.life import print_message
from immortal.appsdk.running.options import RunOptions, run_options
from immortal.appsdk.running.runner import check_determinism
from immortal.appsdk.running.user_modules import explain
from immortal.coordinator.config import ConfigError, InstanceSettings
from immortal.coordinator.config.values import check_app
from immortal.coordinator.core.notices import Level
from immortal.coordinator.instances.registry import HOME_DEFAULT, HOME_VARIABLE, Registry, RegistryError
from immortal.coordinator.notices import Notices, configure
from immortal.coordinator.notices.sinks import ReadinessSink
from immortal.coordinator.operator import control
from immortal.coordinator.peers.security import check_start
from immortal.coordinator.service.runtime import Coordinator, run_coordinator
from immortal.protocol import shared_registry
from immortal.protocol.errors import ImmortalError
from immortal.protocol.executions import FILE_NAME
from immortal.protocol.process import register
from immortal.protocol.timings import FOLDER_NAME

if TYPE_CHECKING:
    from immortal.appsdk.immortal import Immortal

HASH_SEED_VARIABLE = "PYTHONHASHSEED"
PEER_DEFAULT = "tcp://127.0.0.1:*"
READY_TIMEOUT_S = 60.0

__all__ = ["Embedded", "run", "start"]


class _Instance:
    """Instance of ``cls`` that runs in the thread that calls :meth:`serve`."""

    def __init__(self, cls: type, name: str, home: str | os.PathLike[str] | None, level: Level, given: Any) -> None:
        self.definition: Definition = definition_of(cls)
        for one in self.definition.chain:
            one.resolve(names_may_be_missing=False)
        self.label = cls.__qualname__
        self.options: RunOptions = run_options()
        check_determinism(self.definition, self.label, strict=self.options.strict)
        self.registry = Registry(home or os.environ.get(HOME_VARIABLE) or HOME_DEFAULT)
        copy = self.registry.copy
        shared_registry.chosen_home = self.registry.home if copy is None else copy.url
        self.settings = _settings(self.registry, name, given)
        control.refuse_running(self.settings.folder)
        if (app := _name_of(cls)) is not None:
            self.settings = self.registry.remember_app(name, app)
        check_start(self.settings)
        os.environ[STORE_VARIABLE] = self.settings.files_place
        self.level: Level = level
        self.ready = threading.Event()
        self.app: EmbeddedApp | None = None
        self.coordinator: Coordinator | None = None

    def serve(self) -> int:
        """Run the instance until it is stopped and return its exit status. Messages for the user go to stderr."""
        log = Notices(
            self.settings.name,
            configure(self.settings.name, level=self.level),
            ReadinessSink(self.ready.set),
        )
        status = run_coordinator(self.settings, self.registry, log, make_app=self._make_app)
        error = None if self.app is None else self.app.error
        if error is None:
            return status
        print_message(self.label, str(error))
        return error.exit_status if isinstance(error, AppError) else EXIT_FAILED

    def _make_app(self, coordinator: Coordinator, settings: InstanceSettings, log: Notices, epoll: Any) -> EmbeddedApp:
        self.coordinator = coordinator
        options = self.options
        if settings.timings_limit_mb:
            options = replace(options, timings=(settings.folder / FOLDER_NAME, settings.timings_limit_mb << 19))
        if (days := settings.executions_days) is not None:
            options = replace(options, executions=(settings.folder / FILE_NAME, days))
        self.app = EmbeddedApp(self.definition, options, epoll, coordinator.request_stop)
        return self.app


def run(
    cls: type[Immortal],
    name: str,
    *,
    home: str | os.PathLike[str] | None = None,
    log_level: Level = "info",
    **settings: Any,
) -> NoReturn:
    """Run ``cls`` as the instance ``name`` in this process's main thread; never return.

    If ``name`` is not registered in ``home`` (IMMORTAL_HOME, else .immortal), it is registered, with ``settings`` as in
    :meth:`Registry.register`; a registered instance keeps its settings. SIGTERM and Ctrl-C stop it cleanly, with a
    checkpoint. A second one, while a handler runs, ends the process at once, as a crash would.

    The exit status is that of `immortal run`: 0 after a clean stop, 70 if a handler stops the app, 3 if its log can't
    be replayed, 1 after another error, 2 for a class that can't be run.
    """
    _fix_hash_seed()
    try:
        instance = _Instance(cls, name, home, log_level, settings)
        if "PYTHONBREAKPOINT" not in os.environ and sys.breakpointhook is sys.__breakpointhook__:
            sys.breakpointhook = _breakpoint
        sys.exit(instance.serve())
    except ImmortalError as error:
        print_message(getattr(cls, "__qualname__", repr(cls)), explain(error, cls))
        sys.exit(error.exit_status if isinstance(error, AppError) else EXIT_FAILED)


class Embedded:
    """Instance that runs in a thread of this process, until :meth:`stop` or the end of its ``with`` block."""

    def __init__(self, instance: _Instance) -> None:
        self._instance = instance
        self._status: int | None = None
        self._error: BaseException | None = None
        self._ended = threading.Event()
        run, name = contextvars.copy_context().run, f"immortal {instance.settings.name}"
        self._thread = threading.Thread(target=run, args=(self._run,), name=name, daemon=True)
        self._is_parents = False
        self._thread.start()
        register(self)

    def forked_in_child(self) -> None:
        """Mark this object in a forked child: the instance runs in the parent, and can be stopped only there."""
        self._is_parents = True

    def _run(self) -> None:
        try:
            self._status = self._instance.serve()
        except BaseException as error:
            self._error = error
        finally:
            self._ended.set()
            self._instance.ready.set()

    @property
    def running(self) -> bool:
        return not (self._is_parents or self._ended.is_set())

    def wait_until_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Wait until the app has started or recovered. Raises StartError if it ends first, or after ``timeout_s``."""
        name = self._instance.settings.name
        if not self._instance.ready.wait(timeout_s):
            raise StartError(f"{name!r} is not ready within {timeout_s:g} s: 'immortal status {name}' says where it is")
        if not self.running:
            why = "its lines on stderr say why" if self._error is None else str(self._error)
            raise StartError(f"{name!r} has ended as it started: {why}") from self._error

    def stop(self) -> int:
        """Stop the instance with a checkpoint, wait for its end, and return the exit status as in :func:`run`.

        Do nothing in a forked child of the process that runs it.
        """
        if self._is_parents:
            return 0
        if (coordinator := self._instance.coordinator) is not None and self.running:
            coordinator.request_stop()
        self._thread.join()
        if self._error is not None:
            raise self._error
        return 0 if self._status is None else self._status

    def __enter__(self) -> Embedded:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def start(
    cls: type[Immortal],
    name: str,
    *,
    home: str | os.PathLike[str] | None = None,
    log_level: Level = "warning",
    ready_timeout_s: float = READY_TIMEOUT_S,
    **settings: Any,
) -> Embedded:
    """Run ``cls`` as the instance ``name`` in a thread of this process; return once it takes input.

    Unlike :func:`run` it leaves signals and Python's hash seed to the caller: without PYTHONHASHSEED in the environment
    the order of a set can differ at the next start. Raises ImmortalError.
    """
    embedded = Embedded(_Instance(cls, name, home, log_level, settings))
    try:
        embedded.wait_until_ready(ready_timeout_s)
    except BaseException:
        if embedded.running:
            embedded.stop()
        raise
    return embedded


def _settings(registry: Registry, name: str, given: dict[str, Any]) -> InstanceSettings:
    if registry.path(name).exists():
        if given:
            raise RegistryError(
                f"{name!r} is registered already, so {', '.join(sorted(given))} can't be given here: "
                f"{registry.path(name)} has its settings"
            )
        return registry.load(name)
    return registry.register(name, given.pop("peer", PEER_DEFAULT), with_log_key=True, **given)


def _name_of(cls: type) -> str | None:
    """Return the "module:Class" by which `immortal run` and `immortal log show` find ``cls``; None if they can't."""
    module = cls.__module__
    if module == "__main__":
        main = sys.modules["__main__"]
        spec, path = getattr(main, "__spec__", None), getattr(main, "__file__", None)
        if spec is not None and not spec.name.endswith("__main__"):
            module = spec.name
        elif path is not None:
            module = _module_of(path)
        else:
            return None
    try:
        return check_app(f"{module}:{cls.__qualname__}")
    except ConfigError:  # for example of a class in a function
        return None


def _module_of(path: str) -> str:
    """Return the module name of a program's file, or its path if it can't be imported by name."""
    stem = Path(path).stem
    if stem.isidentifier() and stem != "__main__":
        return stem
    path = os.path.abspath(path)
    below = os.path.relpath(path)
    return path if below.startswith(os.pardir) else below


def _breakpoint() -> None:
    """Break into pdb, but leave Ctrl-C to the instance: pdb would keep it from here on."""
    import pdb

    pdb.Pdb(nosigint=True).set_trace(sys._getframe(1))


def _fix_hash_seed() -> None:
    """Restart the program with a fixed hash seed, if possible, as `python -m immortal.appsdk` does."""
    if os.environ.get(HASH_SEED_VARIABLE, "random") != "random" or sys.flags.ignore_environment:
        return
    if not hasattr(sys, "ps1") and sys.orig_argv and threading.active_count() == 1:
        sys.stdout.flush()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, HASH_SEED_VARIABLE: "0"})
