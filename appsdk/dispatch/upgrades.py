"""``@upgrades``: which class's state a class takes over, and the way of a state along such a chain of classes.

A checkpoint says which version of the app wrote it. The class of that version restores it and handles records, as it
did then, until the app is told to upgrade: then each class of the chain makes its state from the one before.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from immortal.appsdk.calls.annotations import signature_of
from immortal.appsdk.calls.context import Context
from immortal.appsdk.calls.report import user_traceback
from immortal.appsdk.calls.run_failures import is_failure
from immortal.appsdk.errors import AppError, DefinitionError, StateError, UpgradeError
from immortal.appsdk.handlers.contexts import attach, new_instances_live_in
from immortal.appsdk.handlers.decorators import AnImmortal, Handler
from immortal.appsdk.handlers.definition import Definition, definition_of
from immortal.appsdk.state.schema import Envelope, copied_envelope

C = TypeVar("C", bound=type[AnImmortal])

REASON_CHARACTERS_MAX = 1000
USAGE = "@classmethod def upgrade(cls, old: {old}) -> {new}"


def upgrades(old: type[AnImmortal], *, retry_refused: bool = False) -> Callable[[C], C]:
    """``@upgrades(CounterV1)``: the class can take over the state of ``CounterV1``, with its ``upgrade``::

        @upgrades(CounterV1)
        class Counter(Immortal):
            @classmethod
            def upgrade(cls, old: CounterV1) -> Counter: ...

    ``upgrade`` gets the old object as it was after the last record and returns a new one. It is repeated by replays, so
    it takes time and randomness from ``old`` (``old.now()``), and like ``__init__`` it can't send calls. The class's
    version is the old one's + 1, unless ``version=`` gives another (a lower one: the way back). With ``retry_refused``
    the upgrade gives the app once more what was refused because its method or parameters were unknown, and nobody waits
    for. Raises DefinitionError.
    """
    old_definition = definition_of(old)

    def decorate(cls: C) -> C:
        definition = definition_of(cls)
        if definition.upgrades is not None:
            raise DefinitionError(f"{definition.name}: a class upgrades one other: there are two @upgrades")
        usage = USAGE.format(old=old_definition.name, new=definition.name)
        function = _check_upgrade(definition, vars(cls).get("upgrade"), usage)
        if definition.given_version == old_definition.version:
            raise DefinitionError(
                f"{definition.name}: it has the version of the class that it upgrades, {old_definition.version}: "
                f"leave version= out (it is then {old_definition.version + 1}), or give another"
            )
        definition.upgrades = old_definition
        definition.retries_refused = retry_refused
        setattr(cls, "upgrade", classmethod(function))  # noqa: B010 (a type checker knows no such attribute)
        return cls

    return decorate


def _check_upgrade(definition: Definition, found: object, usage: str) -> Callable[..., Any]:
    if found is None:
        raise DefinitionError(f"{definition.name}: @upgrades needs an upgrade method: write '{usage}'")
    function = found.__func__ if isinstance(found, classmethod) else found
    if isinstance(found, (Handler, staticmethod)) or not inspect.isfunction(function):
        raise DefinitionError(
            f"{definition.name}.upgrade: with @upgrades it is a class method, this is a {type(found).__name__}: "
            f"write '{usage}'"
        )
    if (
        inspect.iscoroutinefunction(function)
        or inspect.isgeneratorfunction(function)
        or inspect.isasyncgenfunction(function)
    ):
        raise DefinitionError(f"{definition.name}.upgrade: a plain function was expected: write '{usage}'")
    try:
        signature_of(function).bind(object, object)
    except TypeError:
        raise DefinitionError(
            f"{definition.name}.upgrade{signature_of(function)}: it is called with the class and the old object: "
            f"write '{usage}'"
        ) from None
    return function


# --- which class ------------------------------------------------------------------------------------------------------


def class_that_restores(main: Definition, envelope: Envelope) -> Definition:
    """The class of the checkpoint's version: of several, the one nearest to ``main``. Raises StateError."""
    for definition in main.chain:
        if definition.version == envelope.version:
            return definition
    raise StateError(
        f"the checkpoint is of version {envelope.version} ({envelope.class_name}), the app {main.label} has "
        f"{_versions(main.chain)}: run the app that has version {envelope.version}. To get from one version to the "
        f"other, run an app that has both (@upgrades) and 'immortal upgrade NAME --to {main.version}'"
    )


def upgrade_path(main: Definition, current: Definition, version: int | None) -> list[Definition]:
    """The classes that the state passes, from ``current``'s version to ``version`` (None: that of ``main``).

    The first one is ``current`` or, where only that has a way, another class of its version: after a way back there are
    two. Raises UpgradeError.
    """
    chain = main.chain
    version = main.version if version is None else version
    if current.version == version:
        return [current]
    starts = [definition for definition in chain if definition.version == current.version]
    for start in sorted(starts, key=lambda definition: definition is not current):
        newer = chain[: chain.index(start)][::-1]
        for count, definition in enumerate(newer, 1):
            if definition.version == version:
                return [start, *newer[:count]]
    held = f"{main.label} has {_versions(chain)}"
    reason = f"{held}: the app is of version {main.version}, the upgrade is to version {version}"
    raise UpgradeError(
        f"{reason}; the app stops\n"
        f"  Nothing has changed: the instance is of version {current.version}. Run an app whose class of version "
        f"{version} has\n"
        f"  @upgrades(<the class of version {current.version}>), or ask for another version: 'immortal upgrade NAME "
        f"--to ...'.",
        reason,
    )


def _versions(chain: Sequence[Definition]) -> str:
    versions = [str(version) for version in sorted({definition.version for definition in chain})]
    if len(versions) == 1:
        return f"version {versions[0]} only"
    return f"versions {', '.join(versions[:-1])} and {versions[-1]}"


# --- one step ---------------------------------------------------------------------------------------------------------


def upgraded(definition: Definition, old: Any, context: Context) -> Any:
    """The instance that ``definition``'s class makes of ``old``; it takes over ``context``. Raises UpgradeError."""
    what = f"{definition.name}.upgrade"
    record_index = context.message_index
    context.message_index = -definition.version  # the random streams of each upgrade are its own
    try:
        with new_instances_live_in(lambda: _beside(context)):
            new: Any = guarded(definition, what, partial(definition.cls.upgrade, old))  # type: ignore[attr-defined]
        kind: type = type(new)
        if kind is not definition.cls:  # a subclass has a definition of its own
            came = "None" if new is None else f"a {kind.__qualname__}"
            raise failed(definition, f"{what} returned {came}, a {definition.name} was expected")
        attach(new, context)
        if hasattr(new, "prepare"):
            guarded(definition, f"{definition.name}.prepare", new.prepare)
    finally:
        context.message_index = record_index
    return new


def moved(definition: Definition, old_definition: Definition, old: Any, context: Context) -> Any:
    """The state of ``old`` in another class of the same version; it takes over ``context``. Raises UpgradeError."""
    schema = old_definition.state()
    new = definition.new_instance()
    attach(new, context)

    def move() -> None:
        envelope = copied_envelope(definition.name, schema.serializer, context.sites.rules)
        state = schema.encode(old, keeps_types=context.keeps_types)
        definition.state().restore(new, envelope, memoryview(state))

    guarded(definition, f"{definition.name}.restore", move)
    if hasattr(new, "prepare"):
        guarded(definition, f"{definition.name}.prepare", new.prepare)
    return new


def _beside(context: Context) -> Context:
    """A context for one more instance in the same life: the same time, the same randomness, no calls."""
    made = Context(context.seed, context.outbox)
    made.sites = context.sites
    made.committer_id = context.committer_id
    made.sequence_id = context.sequence_id
    made.message_index = context.message_index
    made.record_time_ns = context.record_time_ns
    return made


def guarded(definition: Definition, what: str, function: Callable[[], Any]) -> Any:
    """Call ``function``; whatever it raises becomes the UpgradeError of an upgrade to ``definition``."""
    try:
        return function()
    except AppError as error:
        text = str(error)
        raise failed(definition, text if text.startswith(definition.name) else f"{what}: {text}") from error
    except BaseException as error:
        if not is_failure(error):
            raise
        summary = "".join(traceback.format_exception_only(error)).strip()
        reason = f"{what} raised {summary}{_place(error.__traceback__)}"
        raise failed(definition, reason, user_traceback(error)) from error


def failed(definition: Definition, reason: str, details: str = "") -> UpgradeError:
    reason = " ".join(reason.split())
    if len(reason) > REASON_CHARACTERS_MAX:
        reason = f"{reason[: REASON_CHARACTERS_MAX - 3]}..."
    old = definition.upgrades.version if definition.upgrades else definition.version
    return UpgradeError(
        f"the upgrade from version {old} to version {definition.version} failed: {reason}; the app stops\n"
        f"{details}{details and chr(10)}"
        f"  Nothing has changed: the log and the state are those of the old version. Fix {definition.name}.upgrade and "
        f"start again.",
        reason,
    )


def _place(trace: TracebackType | None) -> str:
    """`` (file:line)`` of the last line in the file that the SDK called, which may have called others."""
    frames = traceback.extract_tb(trace)[1:]
    own = [frame for frame in frames if frame.filename == frames[0].filename]
    return f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
