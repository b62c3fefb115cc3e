"""Options of an app's run, from the command line or the environment."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from immortal.appsdk.errors import EXIT_NOT_RUNNABLE, AppError
from immortal.appsdk.handlers.definition import RANGES
from immortal.appsdk.running.debugger import Breakpoint
from immortal.protocol import decoding

STRICT_VARIABLE = "IMMORTAL_STRICT"
TRACE_VARIABLE = "IMMORTAL_TRACE"
CHECK_QUERIES_VARIABLE = "IMMORTAL_CHECK_QUERIES"
BREAK_VARIABLE = "IMMORTAL_BREAK"
DEBUGPY_VARIABLE = "IMMORTAL_DEBUGPY"
EFFECTS_VARIABLE = "IMMORTAL_EFFECTS"
REWOUND_VARIABLE = "IMMORTAL_REWOUND"
TIMINGS_VARIABLE = "IMMORTAL_TIMINGS"
EXECUTIONS_VARIABLE = "IMMORTAL_EXECUTIONS"
SHARD_VARIABLE = "IMMORTAL_SHARD"
HANDLER_LIMIT_VARIABLE = "IMMORTAL_HANDLER_LIMIT"


class OptionError(AppError):
    """Raised for an option, or an environment variable, with an invalid value."""

    exit_status = EXIT_NOT_RUNNABLE


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of a run. ``strict``: findings of :mod:`appsdk.determinism.check` stop it. ``trace``: report the origin
    of each call.

    ``checks_queries``: with ``trace``, compare the state around each query. ``stop``: where to start the debugger.
    ``rewound``: a call failed in the previous life, and can fail again: keep a copy of the state in memory even if it
    is large. ``effects``: functions to replace and their replacements, as "module:function". ``timings``: folder for
    the times of handlers, and a limit in bytes; None: no times. ``debugpy``: port at which its clients attach.
    ``executions``: file for their list, and its days (0: no limit); None: no list. ``shard``: of a keyed class, which
    one it is, of how many, from 1, and how many there were before; None: as in its state. ``handler_limit_s``: in place
    of the class's own limit."""

    strict: bool = False
    trace: bool = False
    checks_queries: bool = False
    stop: Breakpoint | None = None
    rewound: bool = False
    effects: Mapping[str, str] = field(default_factory=dict)
    timings: tuple[Path, int] | None = None
    debugpy: int | None = None
    executions: tuple[Path, int] | None = None
    shard: tuple[int, ...] | None = None
    handler_limit_s: float | None = None


def run_options(
    *, strict: bool = False, trace: bool = False, stop: str = "", environment: Mapping[str, str] = os.environ
) -> RunOptions:
    """Return the given options, completed from the environment. Raises OptionError."""
    where = "--break" if stop else BREAK_VARIABLE
    stop = stop or environment.get(BREAK_VARIABLE, "")
    debugpy = _port(environment)
    return RunOptions(
        strict=strict or _flag(environment, STRICT_VARIABLE),
        trace=trace or _flag(environment, TRACE_VARIABLE),
        checks_queries=_flag(environment, CHECK_QUERIES_VARIABLE),
        stop=_breakpoint(where, stop, is_remote=debugpy is not None) if stop else None,
        rewound=_flag(environment, REWOUND_VARIABLE),
        effects=_effects(environment),
        timings=_place(environment, TIMINGS_VARIABLE, "BYTES:FOLDER"),
        executions=_place(environment, EXECUTIONS_VARIABLE, "DAYS:FILE"),
        debugpy=debugpy,
        shard=_shard(environment),
        handler_limit_s=float(environment.get(HANDLER_LIMIT_VARIABLE) or 0) or None,
    )


def _shard(environment: Mapping[str, str]) -> tuple[int, ...] | None:
    text = environment.get(SHARD_VARIABLE, "")
    found = re.fullmatch(r"(\d{1,4})/(\d{1,4})(?:/(\d{1,4}))?", text, re.ASCII)
    numbers = tuple(int(one) for one in found.groups() if one is not None) if found else (0, 0)
    number, count, *before = numbers
    lowest = 0 if before and count == 1 else 1
    is_new = not before or (before[0] >= 1 and before[0] != count)
    if text and not (lowest <= number <= count <= RANGES and is_new):
        raise OptionError(
            f"{SHARD_VARIABLE}={text!r}: which shard of how many was expected, such as 2/3; or 4/5/3: a new one, while "
            f"3 shards have the keys"
        )
    return numbers if text else None


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


def _port(environment: Mapping[str, str]) -> int | None:
    text = environment.get(DEBUGPY_VARIABLE, "")
    if text and not (text.isdecimal() and 0 < int(text) < 1 << 16):
        raise OptionError(f"{DEBUGPY_VARIABLE}={text!r}: a port was expected, such as 5678")
    return int(text) if text else None


def _breakpoint(where: str, text: str, *, is_remote: bool) -> Breakpoint:
    sequence_id, colon, message_index = text.partition(":")
    if not (sequence_id.isdecimal() and (message_index.isdecimal() if colon else True)):
        raise OptionError(f"{where} {text!r}: a record and a message of it were expected, such as 12 or 12:3")
    return Breakpoint(int(sequence_id), int(message_index or 0), is_remote=is_remote)
