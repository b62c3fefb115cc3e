"""Log lines of handlers (``immortal.logger``), with handler and record; a replay does not write them again.

    immortal.logger.info("took order", order=3)
    12:00:01.250 info    shop> took order  order=3 handler=Shop.take record=12:0

The interface is structlog's: levels as methods, values by name, ``bind``. A line is written when its handler runs for
the first time. A message that is handled again (a recovery, a rewind after a failure, a rebuilt async handler) writes
none. So no line is written twice, and a line from just before a crash can be missing.

Logging must never change what a handler does: a replay, which writes no lines, would do something else. So a method
here never raises, whatever the values are, and also if the pipe is closed.
"""

from __future__ import annotations

import inspect
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from types import FrameType, FunctionType
from typing import TYPE_CHECKING, Any

from immortal.appsdk.calls.context import Context
from immortal.appsdk.calls.user_code import running, user_traceback
from immortal.protocol.safe_output import RateLimit, logfmt_value, printable, printable_json, printable_lines
from immortal.protocol.verdicts import Verdict, VerdictKind

if TYPE_CHECKING:
    from immortal.appsdk.handlers.definition import Definition

FORMAT_VARIABLE = "IMMORTAL_LOG_FORMAT"  # "human" or "json", as --log-format of `immortal run`
LEVEL_VARIABLE = "IMMORTAL_LOG_LEVEL"
REPLAYED_VARIABLE = "IMMORTAL_LOG_REPLAYED"  # "1": a replay writes lines as well
LEVELS = ("debug", "info", "warning", "error")

_FRAMES_MAX = 100  # between the handler and the code that writes the line


class HandlerLog:
    """Logger of handlers: the class of ``immortal.logger``."""

    __slots__ = ("_bound",)

    def __init__(self, bound: Mapping[str, Any] | None = None) -> None:
        self._bound = bound or {}

    def debug(self, event: object, *arguments: object, **values: Any) -> None:
        self._write("debug", event, arguments, values)

    def info(self, event: object, *arguments: object, **values: Any) -> None:
        self._write("info", event, arguments, values)

    def warning(self, event: object, *arguments: object, **values: Any) -> None:
        self._write("warning", event, arguments, values)

    warn = warning

    def error(self, event: object, *arguments: object, **values: Any) -> None:
        self._write("error", event, arguments, values)

    critical = fatal = error

    def exception(self, event: object, *arguments: object, **values: Any) -> None:
        """Log an error with the exception that is being handled."""
        self._write("error", event, arguments, {**values, "exception": sys.exc_info()[1]})

    def bind(self, **values: Any) -> HandlerLog:
        """Return a logger that adds these values to each of its lines."""
        return HandlerLog({**self._bound, **values})

    def new(self, **values: Any) -> HandlerLog:
        return HandlerLog(values)

    def unbind(self, *names: str) -> HandlerLog:
        return self.new(**{name: value for name, value in self._bound.items() if name not in names})

    def _write(self, level: str, event: object, arguments: tuple[object, ...], values: Mapping[str, Any]) -> None:
        if not _is_shown(level):
            return
        context, task = _owner()
        here = context is not None and threading.get_ident() == context.thread_id
        is_new = not runs_again()
        if not is_new and os.environ.get(REPLAYED_VARIABLE) != "1":
            return
        try:
            text = str(event) % arguments if arguments else _text(event)
        except Exception:
            text = f"{_text(event)} {_text(arguments)}"
        fields = {**self._bound, **values}
        if context is not None and here:
            fields |= _place(context, task, sys._getframe(2))
        if not is_new:
            fields["replayed"] = True
        if context is None:
            instance = running.get() or "app"
        else:
            instance = context.instance_name or context.definition.name
        write_line(level, instance, text, fields)


def _place(context: Context, task: Any, frame: FrameType) -> dict[str, Any]:
    if context.sequence_id < 0:
        return {}
    name = task.name if task is not None else _handler_above(context.definition, frame)
    place = {"record": _record(context)}
    return place if name is None else {"handler": name, **place}


def _record(context: Context) -> str:
    return f"{context.sequence_id}:{max(context.message_index, 0)}"


def _owner() -> tuple[Context | None, Any]:
    """Return the Context of the code that runs, and the Task if that is an async handler; None for each missing one."""
    runs = running.get()
    task = None if runs is None or isinstance(runs, str | Context) else runs
    return (runs if isinstance(runs, Context) else None if task is None else task.tasks.context), task


def runs_again() -> bool:
    """Return True if the handler code that runs here has run before: in a replay, or to rebuild a waiting handler."""
    context, task = _owner()
    here = context is not None and threading.get_ident() == context.thread_id
    return context is not None and here and not is_first_time(context, task)


def is_first_time(context: Context, task: Any) -> bool:
    """Return True if the handler runs for the first time, as far as this process knows."""
    if context.tasks is None:  # a plain object
        return True
    if task is not None and task.is_silent:
        return False
    queries = context.tasks.queries
    if not queries.is_live:
        return bool(context.tasks.is_first_start)
    return (context.sequence_id, context.message_index) > queries.passed or context.sequence_id < 0


def _handler_above(definition: Definition, frame: FrameType | None) -> str | None:
    """Return the qualified name of the handler that called the code of ``frame``; None if no handler did."""
    functions = [inspect.unwrap(handler.function) for handler in definition.handlers.values()]
    codes = {function.__code__: str(function.__qualname__) for function in functions}
    begins = getattr(definition.cls, definition.initial or "", None)
    if isinstance(begins, FunctionType):
        codes[begins.__code__] = begins.__qualname__
    for _ in range(_FRAMES_MAX):
        if frame is None:
            return None
        if (name := codes.get(frame.f_code)) is not None:
            return name
        frame = frame.f_back
    return None


# Failures of user code: a line for each at its first occurrence, with its traceback.


FAILURES_AT_ONCE_MAX = 20  # lines of one kind; then one each second, with the number of omitted ones


class FailureReporter:
    """Writes a line for each failure of user code: the caller, the record, what to do. Any thread can use it.

    ``label`` replaces the instance's name if that is unknown.
    """

    def __init__(self, label: str, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._label = label
        self._clock_ns = clock_ns
        self._lock = threading.Lock()
        self._limit = RateLimit(burst=FAILURES_AT_ONCE_MAX, interval_ns=1_000_000_000)

    def failed(self, verdict: Verdict, arguments: str = "", instance: str = "") -> None:
        """Report that a message, or a step of an ``async def`` handler, has failed, and that the app continues."""
        name, record = instance or self._label, f"{verdict.sequence_id}:{verdict.message_index}"
        if verdict.kind is VerdictKind.REFUSED:
            level, text = "warning", f"a call is refused: {verdict.text}"
        else:
            state = "as it was before" if verdict.kind is VerdictKind.UNDONE else "as it is"
            level, text = "error", f"{verdict.method} raised {verdict.type_name}: {verdict.text}; the state is {state}"
        if verdict.is_dead_letter:
            remedy = f"mend it, then try it again: immortal dead-letters {name} retry {record}"
        else:
            remedy = f"mend it, and let it be called again: immortal log show {name} --from {verdict.sequence_id}"
        caller = "the handler that awaits it" if verdict.step else describe_caller(verdict.caller)
        trace = verdict.trace
        if verdict.type_name == "EffectFailed":  # the effect's own line has the rest
            trace = trace.partition("\n    in the effect:")[0]
        self._write(level, name, text, verdict.method, arguments, caller, record, remedy, trace)

    def declared(
        self, context: Context, handler: str, describe: Callable[[], str], caller: str | None, error: BaseException
    ) -> None:
        """Report that a handler raised an exception that it declares, unless this is a replay."""
        if _is_shown("info") and is_first_time(context, None):
            text, record = f"{handler} raised {_text(error)}, which it declares", _record(context)
            self._write("info", context.instance_name, text, handler, describe, describe_caller(caller), record)

    def effect_failed(self, instance: str, effect: Any, error: BaseException, attempts: int) -> None:
        """Report that an effect has failed for good. ``effect``: a waiting :class:`Effect`."""
        task, times = effect.task, "" if attempts == 1 else f" after {attempts} attempts"
        text = f"the effect {effect.function.name} has failed for good{times}: {_text(error)}"
        level, remedy, trace = "info", "", ""
        if not isinstance(error, tuple(effect.options.raises.values())):
            level, trace = "error", user_traceback(error)
            remedy = f"its handler has EffectFailed: mend what {effect.function.name} needs, and call that again"
        record, caller = "{}:{}".format(*task.started_by), describe_caller(task.caller)
        # only the handlers' thread counts handles
        arguments = "(...)" if task.tasks.codec(task.handler).may_hold_handles else task.arguments_text()
        self._write(level, instance, text, task.name, arguments, caller, record, remedy, trace)

    def _write(
        self,
        level: str,
        instance: str,
        text: str,
        handler: str,
        arguments: str | Callable[[], str],
        caller: str,
        record: str,
        remedy: str = "",
        trace: str = "",
    ) -> None:
        with self._lock:
            count = self._limit.admit((level, text.partition(":")[0]), self._clock_ns())
        if count is None or not _is_shown(level):
            return
        fields = {"handler": handler, "arguments": arguments if isinstance(arguments, str) else arguments()}
        fields |= {"caller": caller, "record": record, "remedy": remedy}
        if count:
            fields["more_of_this_kind"] = str(count)
        write_line(level, instance or self._label, text, {name: one for name, one in fields.items() if one}, trace)


def describe_caller(caller: str | None) -> str:
    """Return the caller of a verdict or of a handler as text."""
    if caller is None:
        return "nobody waits"
    return f"client {caller[1:]}" if caller.startswith("~") else caller or "itself"


# --- lines ------------------------------------------------------------------------------------------------------------


def _is_shown(level: str) -> bool:
    least = os.environ.get(LEVEL_VARIABLE, "info")
    return least not in LEVELS or LEVELS.index(level) >= LEVELS.index(least)


def write_line(level: str, instance: str, text: str, fields: Mapping[str, Any], trace: str = "") -> None:
    """Write one line to stderr, in the human format followed by ``trace``. Never raises, whatever the values are."""
    try:
        if trace and os.environ.get(FORMAT_VARIABLE) == "json":
            fields, trace = {**fields, "traceback": trace}, ""
        behind = "".join(f"\n{one}" for one in printable_lines(trace)) if trace else ""
        sys.stderr.write(f"{_line(level, instance, text, fields)}{behind}\n")
        sys.stderr.flush()
    except Exception:  # the reader is gone, or the values can't be shown
        return


def _line(level: str, instance: str, text: str, fields: Mapping[str, Any]) -> str:
    now_s = time.time()
    if os.environ.get(FORMAT_VARIABLE) == "json":
        at = datetime.fromtimestamp(now_s, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        front = {"time": at, "level": level, "instance": instance, "message": text}
        values = {name: _json_value(value) for name, value in fields.items()}
        return printable_json({**front, **values, **front})
    clock = f"{time.strftime('%H:%M:%S', time.localtime(now_s))}.{int(now_s % 1 * 1000):03d}"
    line = printable(f"{clock} {level:<7} {instance}> {text}")
    shown = " ".join(
        f"{printable(name)}={logfmt_value(value if isinstance(value, float) else _text(value))}"
        for name, value in fields.items()
    )
    return f"{line}  {shown}" if shown else line


def _text(value: object) -> str:
    try:
        text = str(value)
    except Exception:
        text = f"<{type(value).__qualname__} that can't be shown>"
    if not isinstance(value, BaseException):
        return text
    return f"{type(value).__name__}: {text}" if text else type(value).__name__


def _json_value(value: object) -> object:
    return value if value is None or isinstance(value, bool | int | str) else _text(value)
