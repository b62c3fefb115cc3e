"""Opening of a home's logs with the classes that made them, for a what-if; a test assertion; loading of user code."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from msgspec import Struct

from immortal.appsdk.calls.user_code import is_user_failure, is_users_module
from immortal.appsdk.handlers.definition import Definition, definition_of
from immortal.appsdk.immortal import Immortal
from immortal.appsdk.running.runner import load
from immortal.appsdk.running.user_modules import add_to_path
from immortal.coordinator.instances import own_logs
from immortal.coordinator.instances.registry import Registry
from immortal.coordinator.log.open import log_exists
from immortal.coordinator.log.reader import LogReader
from immortal.protocol import personal_keys
from immortal.protocol.errors import ImmortalError
from immortal.replay.app_process import code_at_end, code_environment, forgotten_notes
from immortal.replay.fleet.model import Answer, Check, Logs, Rules
from immortal.replay.fleet.outcome import FleetOutcome, what_if_fleet
from immortal.replay.fleet.player import first_checkpoint, limited
from immortal.replay.fleet.report import outcome_lines
from immortal.replay.plan import ReplayError

IMPORT_S = 60.0  # for a module, at least


@personal_keys.without_new_keys()
def what_if(
    home: Path | str,
    changes: Mapping[str, type[Immortal] | str] | None,
    *,
    code: Path | None = None,
    begin_ns: int | None = None,
    to_ns: int | None = None,
    effects: str | Answer = "fail",
    answer: Answer | None = None,
    check: Check | None = None,
    seeds: int = 1,
    delays: str = "recorded",
    trust_pickle: bool = False,
    details: bool = False,
    progress: Callable[[int, int], object] = lambda now_ns, end_ns: None,
    without: Collection[str] = (),
    orders: Sequence[int] | None = None,
) -> FleetOutcome:
    """Return what would differ if other code had handled the logs of a fleet, with all consequences in its services.

    ``home``: the registry folder. ``changes``: service name to the class to try, or "module:Class"; None: each
    service's app, as its settings name it. ``code``: a folder or a wheel with the changed classes. ``begin_ns``,
    ``to_ns``: times in ns since the Unix epoch; the run begins at the newest checkpoint before. ``effects``: for
    effects that no log has: "fail", "by-key" (the recorded result of the same function with the same key), or a
    function of the :class:`Call` that returns or raises. ``answer``: such a function for calls to services without a
    log. ``check``: called with the services' objects by name, after each message; it fails by False or AssertionError.
    ``seeds``: the number of orders to try. ``delays``: how long new messages take: "recorded", or always the "shortest"
    or "longest" that their stream has in the log. ``details``: the outcome also has what grows with the logs.
    ``progress``: called with the time that a run has reached, and that of its end. ``without``: services that count as
    ones without a log. ``orders``: as for :func:`what_if_fleet`.

    Raises ReplayError if it can't be run, LogError.
    """
    with opened_fleet(home, without, trust_pickle=trust_pickle, needs_apps=changes is None) as fleet:
        logs = Logs(
            fleet.readers,
            fleet.code_of,
            {
                name: load_definition(app, code) if isinstance(app, str) else definition_of(app)
                for name, app in (fleet.apps if changes is None else changes).items()
            },
            begin_ns,
            to_ns,
        )
        rules = Rules(effects, answer, check, delays=delays, progress=progress)
        outcome = what_if_fleet(logs, rules, seeds=seeds, details=details, orders=orders)
        outcome.notes += [*fleet.notes, *forgotten_notes(sorted(personal_keys.noted))]
        return outcome


class OpenedFleet(Struct):
    """Logs of a home. ``apps``: "module:Class" by service; ``code_of``: returns the class that made a log."""

    readers: dict[str, LogReader]
    apps: dict[str, str]
    code_of: Callable[[str], Definition]
    notes: list[str]


@contextmanager
def opened_fleet(
    home: Path | str, without: Collection[str] = (), *, trust_pickle: bool, needs_apps: bool = True
) -> Iterator[OpenedFleet]:
    """Open the logs of a home, but of the services ``without``.

    Raises LogError, ReplayError if one of ``without`` is not there; with ``needs_apps``, if no service has an app.
    """
    registry = Registry(Path(home))
    if unknown := sorted(set(without).difference(names := registry.names())):
        raise ReplayError(f"{unknown[0]!r} is not here: --without can name {', '.join(names)}")
    with ExitStack() as stack:
        readers: dict[str, LogReader] = {}
        notes: list[str] = []
        for name in names:
            settings = registry.load(name)
            if not log_exists(settings.log):
                continue
            if name in without:
                notes.append(f"{name} counts as a service without a log: --without")
                continue
            reader = stack.enter_context(own_logs.open_reader(settings, trust_pickle=trust_pickle))
            if reader.summary().extensions:
                readers[name] = reader
            else:  # its past messages stay as they were
                notes.append(
                    f"{name} counts as a service without a log: its app does not use this SDK, or never started"
                )
        apps = {name: app for name in readers if (app := registry.load(name).app) is not None}
        if needs_apps and not apps:
            raise ReplayError(f"{str(home)!r} has no service with a log and an app: a registry folder was expected")

        @cache
        def code_of(name: str) -> Definition:
            settings, route = registry.load(name), first_checkpoint(readers[name], None)
            own = code_at_end(settings, readers[name].summary(), route)
            return load_definition(own.app, own.archive)

        yield OpenedFleet(readers, apps, code_of, notes)


def assert_fleet_unchanged(
    home: Path | str,
    changes: Mapping[str, type[Immortal] | str] | None = None,
    *,
    at_least: int = 1,
    **options: Any,
) -> FleetOutcome:
    """Assert that today's code repeats the calls in the logs of a fleet; return the outcome.

    ``changes`` and ``options``: as for :func:`what_if`. Raises AssertionError with the differences, or
    if fewer than ``at_least`` messages were compared; raises the errors of :func:`what_if`.
    """
    __tracebackhide__ = True
    outcome = what_if(home, changes, **options)
    if outcome.is_different:
        raise AssertionError("\n".join(("the fleet would do other things", *outcome_lines(outcome))))
    compared = sum(one.messages for one in outcome.services)
    if compared < at_least:
        raise AssertionError(f"only {compared:,} messages were compared, and at least {at_least:,} were expected")
    return outcome


def load_function(text: str) -> Callable[..., Any]:
    """Load "module:function". Raises ReplayError."""
    add_to_path(os.getcwd())
    module_name, _, name = text.partition(":")
    try:
        with limited(IMPORT_S):
            found = getattr(importlib.import_module(module_name), name)
    except BaseException as error:  # the user's module
        if not is_user_failure(error):
            raise
        raise ReplayError(f"{text!r} can't be loaded: {type(error).__name__}: {error}") from None
    if not callable(found):
        raise ReplayError(f"{text!r} is no function: one was expected, such as module:function")
    function: Callable[..., Any] = found
    return function


def load_definition(app: str, code: Path | None = None) -> Definition:
    """Load the class "module:Class"; ``code``: a folder or a wheel to load it from, beside the loaded modules.

    Raises ReplayError.
    """
    add_to_path(os.getcwd())
    try:
        if code is None:
            with limited(IMPORT_S):
                return definition_of(load(app))
        code_environment(code)  # raises if it is neither a folder nor a wheel
        with _modules_of(app, code), limited(IMPORT_S):
            definition = definition_of(load(app))
            definition.state()  # resolves its types by the names of their modules, while these are loaded
            for handler in definition.handlers.values():
                definition.codec(handler)
            module = sys.modules[definition.cls.__module__]
            if not _is_in(code, str(module.__file__)):
                raise ReplayError(f"{app!r}: nothing of it is in {code}: give the folder or the wheel that has it")
            return definition
    except ReplayError:
        raise
    except ImmortalError as error:
        raise ReplayError(str(error)) from None
    except BaseException as error:  # the user's module
        if not is_user_failure(error):
            raise
        raise ReplayError(f"{app!r} can't be imported: {type(error).__name__}: {error}") from None


def _is_in(code: Path, file: str) -> bool:
    return Path(os.path.realpath(file)).is_relative_to(os.path.realpath(code))


@contextmanager
def _modules_of(app: str, code: Path) -> Iterator[None]:
    """Load modules from ``code`` inside this context; restore the modules loaded before afterwards."""
    top = app.partition(":")[0].partition(".")[0]
    hidden = {
        name: module
        for name, module in list(sys.modules.items())
        if name != "__main__" and is_users_module(top, name, os.path.abspath(getattr(module, "__file__", None) or ""))
    }
    kept = {
        name: module
        for name, module in hidden.items()
        if getattr(module, "__file__", None) or name.partition(".")[0] == top  # a package may have no file
    }
    for name in kept:
        del sys.modules[name]
    sys.path.insert(0, str(code.absolute()))
    importlib.invalidate_caches()
    before = set(sys.modules)
    try:
        yield
    finally:
        sys.path.remove(str(code.absolute()))
        for name in [name for name in sys.modules if name not in before]:
            origin = getattr(sys.modules[name], "__file__", None) or ""
            if _is_in(code, origin) or name in kept:
                del sys.modules[name]
        sys.modules.update(kept)
