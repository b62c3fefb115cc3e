"""asyncio in an ``async def`` handler: no loop of its runs there, and its errors say so in words of its own.

They are told by where they come from, and said with the name of what was used and what is used in its place.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import CodeType, FrameType

from immortal.appsdk.errors import UsageError

_SEVERAL = "await self.gather(...) or self.race(...) for several at once, and .fork(...) for what nobody waits for"
_EVENT = "wait with await self.event(...), which self.signal(...) in a 'def' handler ends"
_TIME = "await self.race(..., self.sleep(...)), or give the whole handler @rpc(timeout=...)"
_ALONE = (
    "nothing comes between two awaits: put what must not be disturbed into one 'def' handler (@rpc), or let one run at "
    "once with @rpc(limit=1)"
)
_ROWS = (
    ("sleep", "await self.sleep(...) or self.at(...)"),
    ("wait_for timeout timeout_at Timeout", _TIME),
    ("gather wait as_completed shield ensure_future create_task Task TaskGroup _GatheringFuture", _SEVERAL),
    ("Queue PriorityQueue LifoQueue", f"keep the items in the state, changed by 'def' handlers (@rpc), and {_EVENT}"),
    ("Event Condition Barrier create_future", _EVENT),
    ("Future wrap_future", f"{_EVENT}; what is done outside is an effect: await self.effect(<function>, ...)"),
    ("Lock Semaphore BoundedSemaphore", _ALONE),
)
_INSTEAD = {name: instead for names, instead in _ROWS for name in names.split()}
_EFFECT = "do it in an effect: await self.effect(<function>, ...)"
CAN_AWAIT = (
    "it can await calls (await self.<peer>.<method>(...)), its own handlers, self.effect, self.sleep, self.at, "
    "self.event, self.gather and self.race"
)
_TELLING = (  # in what asyncio raises where no loop runs
    "event loop",
    "'NoneType' object has no attribute",
    "inside a task",
    "parent task",
    "Passing coroutines is forbidden",
)


def refused(error: BaseException) -> UsageError | None:
    """What is said in place of ``error``, which a handler has raised; None: it is none of asyncio's for want of a
    loop."""
    if not isinstance(error, RuntimeError | AttributeError | TypeError) or not any(
        text in str(error) for text in _TELLING
    ):
        return None
    frames = list(_frames_of(error))
    used = _name_of(frames)
    if used is None and str(error) != "no running event loop":  # which functions in C raise as well
        return None
    return _refusal(used or "get_running_loop").with_traceback(error.__traceback__)


def awaited(what: object, frames: Iterator[FrameType]) -> UsageError | None:
    """The same, of what one awaits in ``frames``, the innermost last; None: it is none of asyncio's, or a bare
    'yield'."""
    if what is None:
        return None
    used = _name_of(list(frames))
    if used is None and type(what).__module__.partition(".")[0] in ("asyncio", "_asyncio"):
        used = type(what).__name__
    return None if used is None else _refusal(used)


def _refusal(used: str) -> UsageError:
    instead = _INSTEAD.get(used.partition(".")[0]) or (_EFFECT if _is_outside(used) else CAN_AWAIT)
    name = "gather" if used == "_GatheringFuture" else used
    return UsageError(
        f"asyncio.{name} in an async handler: asyncio does not run async handlers, and no log would wake one from it: "
        f"{instead}"
    )


def _is_outside(used: str) -> bool:
    return any(part in used for part in ("thread", "executor", "connection", "server", "subprocess", "Stream"))


def _frames_of(error: BaseException) -> Iterator[FrameType]:
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


def _name_of(frames: list[FrameType]) -> str | None:
    """Of what of asyncio was called, where that is the innermost: by the first of its frames behind the user's last."""
    found: str | None = None
    for frame in reversed(frames):
        if not _is_asyncios(frame):
            break
        found = _called(frame)
    return found


def _is_asyncios(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] == "asyncio"


def _called(frame: FrameType) -> str:
    """Such as ``Queue.get``, ``Lock`` (of ``async with``), ``sleep``, ``run_in_executor``."""
    code: CodeType = frame.f_code
    of = frame.f_locals.get("self")
    if of is None or "<locals>" in code.co_qualname:
        return code.co_qualname.partition(".")[0]
    name = type(of).__name__
    if name.endswith("EventLoop"):
        return code.co_name
    return name if code.co_name.startswith("__") else f"{name}.{code.co_name}"
