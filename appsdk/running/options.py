"""Options of an app's run, from the command line or the environment, and ``--break``."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from immortal.appsdk.calls.context import Context
from immortal.appsdk.calls.user_code import ControlFlowSignal, describe_arguments
from immortal.appsdk.dispatch.delivery import Delivery, Entry
from immortal.appsdk.errors import EXIT_NOT_RUNNABLE, AppError
from immortal.appsdk.handlers.definition import Definition
from immortal.protocol import decoding
from immortal.protocol.safe_output import printable

STRICT_VARIABLE = "IMMORTAL_STRICT"
TRACE_VARIABLE = "IMMORTAL_TRACE"
CHECK_QUERIES_VARIABLE = "IMMORTAL_CHECK_QUERIES"
BREAK_VARIABLE = "IMMORTAL_BREAK"
EFFECTS_VARIABLE = "IMMORTAL_EFFECTS"
REWOUND_VARIABLE = "IMMORTAL_REWOUND"
TIMINGS_VARIABLE = "IMMORTAL_TIMINGS"
EXECUTIONS_VARIABLE = "IMMORTAL_EXECUTIONS"


class OptionError(AppError):
    """An option, or a variable of the environment, has a value that means nothing."""

    exit_status = EXIT_NOT_RUNNABLE


@dataclass(frozen=True, slots=True)
class RunOptions:
    """``strict``: no start with findings of :mod:`appsdk.determinism.check`. ``trace``: say what made each call.
    ``checks_queries``: with ``trace``, the state is compared around each query. ``stop``: where to start the debugger.
    ``rewound``: a call has failed in the life before, and may again: the state is kept in memory once more, however
    large it is. ``effects``: in place of which functions others run, both as "module:function". ``timings``: where to
    note when handlers ran, and how many bytes of that are kept; None: nowhere. ``executions``: the file to list them
    in, and for how many days (0: no limit); None: nowhere."""

    strict: bool = False
    trace: bool = False
    checks_queries: bool = False
    stop: Breakpoint | None = None
    rewound: bool = False
    effects: Mapping[str, str] = field(default_factory=dict)
    timings: tuple[Path, int] | None = None
    executions: tuple[Path, int] | None = None


def run_options(
    *, strict: bool = False, trace: bool = False, stop: str = "", environment: Mapping[str, str] = os.environ
) -> RunOptions:
    """Return the given options, completed from the environment. Raises OptionError."""
    where = "--break" if stop else BREAK_VARIABLE
    stop = stop or environment.get(BREAK_VARIABLE, "")
    return RunOptions(
        strict=strict or _flag(environment, STRICT_VARIABLE),
        trace=trace or _flag(environment, TRACE_VARIABLE),
        checks_queries=_flag(environment, CHECK_QUERIES_VARIABLE),
        stop=_breakpoint(where, stop) if stop else None,
        rewound=_flag(environment, REWOUND_VARIABLE),
        effects=_effects(environment),
        timings=_place(environment, TIMINGS_VARIABLE, "BYTES:FOLDER"),
        executions=_place(environment, EXECUTIONS_VARIABLE, "DAYS:FILE"),
    )


def _effects(environment: Mapping[str, str]) -> Mapping[str, str]:
    text = environment.get(EFFECTS_VARIABLE, "")
    if not text:
        return {}
    try:
        return decoding.decode_json(text, type=dict[str, str])
    except decoding.DecodeError as error:
        raise OptionError(
            f"{EFFECTS_VARIABLE}={text!r}: a JSON object was expected, such as"
            f' {{"shop:charge": "fakes:charge"}}: {error}'
        ) from None


def _place(environment: Mapping[str, str], name: str, form: str) -> tuple[Path, int] | None:
    text = environment.get(name, "")
    if not text:
        return None
    limit, _, path = text.partition(":")
    if not (limit.isdecimal() and path):
        raise OptionError(f"{name}={text!r}: {form} was expected, as 'immortal run' sets it")
    return Path(path), int(limit)


def _flag(environment: Mapping[str, str], name: str) -> bool:
    value = environment.get(name, "")
    if value not in ("", "0", "1"):
        raise OptionError(f"{name}={value!r}: 1 (on) or 0 (off) were expected")
    return value == "1"


def _breakpoint(where: str, text: str) -> Breakpoint:
    sequence_id, colon, message_index = text.partition(":")
    if not (sequence_id.isdecimal() and (message_index.isdecimal() if colon else True)):
        raise OptionError(f"{where} {text!r}: a record and a message of it were expected, such as 12 or 12:3")
    return Breakpoint(int(sequence_id), int(message_index or 0))


# ``--break``: the debugger at one logged message, before the first line of its handler.


class _Left(KeyboardInterrupt, ControlFlowSignal):
    """Somebody has left the debugger: the app ends as at Ctrl-C."""


class Breakpoint:
    """The message to stop at: ``message_index`` (from 0) of the record ``sequence_id``."""

    def __init__(self, sequence_id: int, message_index: int = 0) -> None:
        self.sequence_id = sequence_id
        self.message_index = message_index
        self.reached = False

    def __str__(self) -> str:
        return f"record {self.sequence_id}, message {self.message_index}"

    def make_delivery(self, definition: Definition, context: Context) -> Delivery:
        return _BreakingDelivery(definition, context, self)

    def debugged(self, function: Callable[..., Any], name: str) -> Callable[..., None]:
        """``function``, in the debugger: it stops at the first line. Leaving the debugger ends the app like Ctrl-C."""

        import pdb  # here: it loads much that no ordinary run needs

        class Debugger(pdb.Pdb):
            left = False

            def set_quit(self) -> None:
                self.left = True
                super().set_quit()

        def run(instance: object, *arguments: Any) -> None:
            self.reached = True
            print(printable(f"{self}: {name}{describe_arguments(arguments)}"), flush=True)  # noqa: T201
            debugger = Debugger(nosigint=True, skip=["immortal.*"])  # an async handler is called by the SDK
            debugger.runcall(function, instance, *arguments)
            if debugger.left:
                raise _Left

        return run


class _BreakingDelivery(Delivery):
    """Hands the one message to the debugger. In its record each message is looked up by itself, elsewhere as ever."""

    def __init__(self, definition: Definition, context: Context, stop: Breakpoint) -> None:
        super().__init__(definition, context)
        self._stop = stop

    def deliver(self, instance: Any, content: bytes, offset: int, end: int, slice_end: int) -> int:
        if self._context.sequence_id == self._stop.sequence_id:
            slice_end = offset + 1
            self._known.clear()
        return super().deliver(instance, content, offset, end, slice_end)

    def _look_up(self, content: bytes, offset: int, end: int, index: int) -> tuple[Entry, int, int]:
        entry, start, stride = super()._look_up(content, offset, end, index)
        if (self._context.sequence_id, index) == (self._stop.sequence_id, self._stop.message_index):
            decode, function, name = entry
            entry = (decode, self._stop.debugged(function, name), name)
        return entry, start, stride
