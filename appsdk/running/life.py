"""Parts of an app in this process from its start to its end: dispatcher, effects, hooks, watchdog."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from immortal.appsdk.calls.context import SEED_SIZE_BYTES, Context
from immortal.appsdk.calls.user_code import is_user_failure, user_traceback
from immortal.appsdk.dispatch.delivery import Delivery
from immortal.appsdk.dispatch.dispatcher import Dispatcher
from immortal.appsdk.dispatch.events import JournalGrew
from immortal.appsdk.effects.effect import EffectRunner
from immortal.appsdk.effects.runner import LocalEffectRunner, StubEffectRunner, load_stand_ins
from immortal.appsdk.errors import AppError, Disconnected, HookError, UsageError
from immortal.appsdk.handlers.definition import Definition
from immortal.appsdk.handlers.log import FailureReporter
from immortal.appsdk.handlers.proxy import Impulses
from immortal.appsdk.running import tracing
from immortal.appsdk.running.app_loop import AppLoop
from immortal.appsdk.running.debugger import HOST, listen, skip_in_replays
from immortal.appsdk.running.options import EFFECTS_VARIABLE, OptionError, RunOptions
from immortal.appsdk.running.time_limits import QueryLimit, Watchdog, limit_encoding_time
from immortal.appsdk.running.user_modules import sources_of
from immortal.protocol import kept_code
from immortal.protocol.safe_output import printable_message

if TYPE_CHECKING:
    from immortal.appsdk.running.executions import ExecutionWriter
    from immortal.appsdk.running.time_limits import HandlerTimings


class AppLife:
    """Life of an app from the connection with a coordinator to its end.

    ``wake``: called by other threads when ``loop`` has something to do. ``coordinator``: its address, for messages.
    ``send_from_other_thread`` and ``is_disconnected``: see :class:`Watchdog`.
    """

    def __init__(
        self,
        definition: Definition,
        options: RunOptions,
        wake: Callable[[], None],
        *,
        send_from_other_thread: Callable[[bytes], bool] = lambda message: False,
        is_disconnected: Callable[[], bool] = lambda: False,
        coordinator: str = "",
    ) -> None:
        skip_in_replays()
        self._debugpy = options.debugpy
        if options.stop is not None:
            self._listen(definition.name)
        self._wake = wake
        self._effects: LocalEffectRunner | None = None
        if any(one.has_tasks for one in definition.chain):
            warn = partial(print_message, definition.name)
            self._effects = LocalEffectRunner(definition.concurrent_effects, warn, lambda: self.loop.now_ns())
        effects: EffectRunner | None = self._effects
        if effects is not None and options.effects:
            effects = StubEffectRunner(effects, load_run_stand_ins(options, definition.name))
        trace, stop = options.trace, options.stop
        folder = None if trace else os.environ.get(kept_code.FOLDER_VARIABLE)
        self._code_folder = Path(folder) if folder else None
        self._sources = sources_of(definition.cls) if folder else {}  # read now: they can be edited later
        make_dispatcher = tracing.TracingDispatcher if trace else Dispatcher
        self.dispatcher = make_dispatcher(
            definition,
            lambda: os.urandom(SEED_SIZE_BYTES),
            wake,
            effects=effects,
            make_delivery=self._make_delivery(definition, options),
            keeps_large_copies=options.rewound or trace,  # an inspected replay is not restarted
            compares_queries=options.checks_queries and trace,  # in a recovery queries are as right as in service
        )
        self.dispatcher.healing.may_recover = not (options.rewound or trace)
        self.dispatcher.limit_encoding(limit_encoding_time)
        if not trace:  # an inspected run reports failures in its own way
            self.dispatcher.context.reporter = FailureReporter(definition.name)
        self._executions: ExecutionWriter | None = None
        if options.executions is not None and any(one.has_executions for one in definition.chain):
            from immortal.appsdk.running.executions import ExecutionWriter

            self._executions = ExecutionWriter(*options.executions, partial(print_message, definition.name))
            self.dispatcher.tasks.executions = self._executions
        self.loop = AppLoop(self.dispatcher, coordinator, self._start_hooks, self._journal_grew)
        limit, handler_limit = QueryLimit(), definition.handler_time_limit
        if options.handler_limit_s is not None:
            handler_limit = timedelta(seconds=options.handler_limit_s)
        self.dispatcher.tasks.queries.run_limited = limit.run
        self._watchdog = Watchdog(
            lambda: self.dispatcher.records.current_handling,
            send_from_other_thread,
            None if stop is not None else handler_limit,
            partial(print_message, definition.name),
            is_disconnected if stop is None else lambda: False,
            query_limit=limit,
        )

    def _make_delivery(self, definition: Definition, options: RunOptions) -> Callable[[Definition, Context], Delivery]:
        self._timings: HandlerTimings | None = None
        if options.stop is not None:
            return options.stop.make_delivery
        if options.timings is None or options.trace:
            return Delivery
        from immortal.appsdk.running.time_limits import HandlerTimings

        folder, limit_bytes = options.timings
        self._timings = HandlerTimings(folder, limit_bytes, partial(print_message, definition.name))
        return self._timings.make_delivery

    def _listen(self, label: str) -> None:
        """Let debuggers attach after the replay, which would otherwise stop at their breakpoints."""
        if self._debugpy is not None and listen(self._debugpy):
            print_message(label, f"debuggers attach at {HOST}:{self._debugpy}")

    def _journal_grew(self, grown: JournalGrew) -> None:
        print_message(
            self.dispatcher.definition.name,
            f"warning: {grown.handler} waits (runs: {grown.tasks_count:,}), and has had {grown.results_count:,} results"
            f" ({grown.size_bytes:,} bytes) since it began: each checkpoint has them all, and each recovery runs it"
            " over them again. Let it go on with 'return immortal.continue_as(...)' from time to time"
            " (docs/how-to/async.md, Long-running handlers)",
        )

    def start(self) -> None:
        """Start the watchdog: the callbacks of :meth:`__init__` can be called from here on."""
        self._watchdog.start()

    def fail(self, error: AppError) -> None:
        """End the app with ``error``. Any thread can call it."""
        self.loop.fail(error)
        self._wake()

    def close(self, reason: str) -> None:
        """End the app's parts. ``reason``: told to hooks that still send impulses."""
        self._watchdog.stop()
        self.dispatcher.outbox.impulses.close(reason)
        if self._effects is not None:
            self._effects.stop()
        self.loop.close()
        if self._timings is not None:
            self._timings.close()
        if self._executions is not None:
            self._executions.close()

    def _save_code(self) -> None:
        cls, since, folder = self.dispatcher.definition.cls, self.dispatcher.primary_since, self._code_folder
        sources, self._sources = self._sources, {}
        if not sources or folder is None:
            return
        try:
            if not kept_code.store(folder, f"{cls.__module__}:{cls.__qualname__}", sources, since if since > 1 else 0):
                print_message(
                    cls.__qualname__,
                    f"its code is not kept with the log: it has over {kept_code.SOURCES_SIZE_BYTES_MAX >> 20} MiB",
                )
        except OSError as error:
            print_message(cls.__qualname__, f"its code is not kept with the log: {error}")

    def _start_hooks(self) -> None:
        self._save_code()
        definition, instance = self.dispatcher.definition, self.dispatcher.instance
        self._listen(definition.name)
        for name in definition.on_primary:
            impulses = Impulses(instance, definition, self.dispatcher.outbox.impulses)
            full_name = f"{definition.name}.{name}"
            arguments = (instance, full_name, name, impulses)
            threading.Thread(target=self._run_hook, args=arguments, name=full_name, daemon=True).start()

    def _run_hook(self, instance: Any, full_name: str, name: str, impulses: Impulses) -> None:
        try:
            self.dispatcher.context.run_contexts.run(getattr(instance, name), impulses)
        except Disconnected:
            pass  # the main thread reports it
        except BaseException as error:
            if not is_user_failure(error):
                raise
            self.fail(
                HookError(
                    f"{full_name}, an @on_primary hook, raised {type(error).__name__}; the app "
                    f"stops\n{user_traceback(error)}\n"
                    f"  What it sent and what was accepted is in the log. Fix it and start the app again: the hook "
                    f"runs once\n"
                    f"  more, with the state as it is then."
                )
            )


def print_message(label: str, text: str) -> None:
    """Write one message to the user, on stderr."""
    print_text(f"app {label}: {text}")


def print_text(text: str) -> None:
    """Print a text on stderr as it is."""
    print(printable_message(text), file=sys.stderr, flush=True)  # noqa: T201 (the one place)


def load_run_stand_ins(options: RunOptions, label: str) -> dict[Callable[..., Any], Callable[..., Any]]:
    """Load the functions that replace effects, and tell the user of them. Raises OptionError."""
    try:
        found = load_stand_ins(options.effects)
    except Exception as error:  # also of the import of the user's module
        what = str(error) if isinstance(error, UsageError) else f"{type(error).__name__}: {error}"
        raise OptionError(f"{EFFECTS_VARIABLE}: what is to run in place of effects can't be loaded: {what}") from error
    for function, stand_in in options.effects.items():
        print_message(label, f"in place of the effect {function} runs {stand_in}")
    return found
