"""Waiting async handlers as text: for what each waits, who called it, how a wait ended."""

from __future__ import annotations

from typing import Any

from immortal.protocol.safe_output import printable

Values = dict[str, Any]


def retry_problem(name: str, answer: Values) -> str:
    """Why no effect was tried; "" where one was."""
    if "retried" not in answer:
        return f"the app of {name!r} has an SDK that tries no effect at once: restart it with this one"
    return "" if answer["retried"] else str(answer["text"])


def with_times(value: Any) -> Any:
    """Each time, ns since the Unix epoch, also as text."""
    from immortal.presenters.records import time_text

    if isinstance(value, list):
        return [with_times(one) for one in value]
    if not isinstance(value, dict):
        return value
    times = {key[:-3]: time_text(one) for key, one in value.items() if key.endswith("_ns") and one is not None}
    return {key: with_times(one) for key, one in value.items()} | times


def format_waits(one: Values) -> str:
    """Format one wait of an ordered multicast, with times."""
    return printable(f"since {_second(one['since'])} it waits for {one['for']}: {one['what']} ({one['count']} wait)")


def format_next_run(schedule: Values) -> str:
    """With times."""
    return "not begun" if schedule["due_ns"] is None else _second(schedule["due"])


def format_caller(one: Values) -> str:
    caller = one["caller"]
    if caller is None:
        return "nobody waits"
    if caller == "":
        return "itself"
    return f"client {caller[1:]}" if caller.startswith("~") else str(caller)


def format_wait(wait: Values) -> str:
    kind, since = wait["kind"], _second(wait["since"])
    if kind == "timer":
        return f"until {_second(wait['due'])}, since {since}"
    if kind == "effect":
        tries = f", attempt {wait['attempt']}" if wait["attempt"] > 1 else ""
        failed = f"; the attempt before failed: {wait['failure']}" if wait["failure"] else ""
        return f"{wait['for']}{tries}, since {since}{failed}"
    return f"{wait['for']}, since {since}"


def place_in_words(frame: Values) -> str:
    return f"{frame['file']}:{frame['line']}  {frame['text']}"


def format_step(step: Values) -> str:
    if not step["step"]:
        return f"{step['time']}  cancelled"
    return f"{step['time']}  {step['what']} {step_end(step)}"


def step_end(step: Values) -> str:
    """Return how a step has ended, such as "gave 5"."""
    if not step["step"]:
        return f"by an operator: {step['reason']}"
    if step["raised"]:
        return f"raised {step['value']}"
    return "is over" if step["what"].startswith("timer for ") else f"gave {step['value']}"


def describe_wait_end(name: str, number: int, wait: Values) -> str:
    kind = wait["kind"]
    if kind == "call":
        to = wait["to"]
        if not to:
            return "ends with the answer of a handler of its own: it is in this list, called by itself"
        return f"ends with the answer of {to}: 'immortal handlers {to}', 'immortal peers show {name}'"
    if kind == "timer":
        return f"ends at {wait['due']}"
    if kind == "event":
        command = f"'immortal handlers {name} signal {number} EVENT VALUE'"
        return f"ends with immortal.signal({wait['event']!r}, ...), or {command}"
    if kind == "effect":
        if not wait["failure"]:
            return "ends with its result, or when no attempt is left"
        now = f"'immortal handlers {name} retry-effect {number}' makes the next attempt now"
        return f"ends with its result, or when no attempt is left; {now}"
    return "-"


def _second(time: str) -> str:
    return f"{time[:19]}Z"
