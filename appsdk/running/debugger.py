"""Debuggers in an app: ``--break``, debugpy at a port, and ``breakpoint()``, which replays skip."""

from __future__ import annotations

import os
import socket
import sys
import sysconfig
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from immortal.appsdk.calls.context import Context
from immortal.appsdk.calls.user_code import ControlFlowSignal, describe_arguments
from immortal.appsdk.dispatch.delivery import Delivery, Entry, method_and_front
from immortal.appsdk.errors import EXIT_NOT_RUNNABLE, AppError
from immortal.appsdk.handlers.definition import Definition
from immortal.appsdk.handlers.log import runs_again
from immortal.protocol.distribution import add_extra
from immortal.protocol.safe_output import printable

HOST = "127.0.0.1"  # a client of the port can run any code
_LIBRARIES = tuple(
    {os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)
_settrace = sys.settrace  # pydevd replaces it by one that warns


class DebuggerError(AppError):
    """Raised if debugpy can't listen at the port."""

    exit_status = EXIT_NOT_RUNNABLE


# breakpoint()


class _Hook:
    """``sys.breakpointhook`` for code that runs for the first time; a replay skips it."""

    own: Any  # the hook before
    client: Any = None  # debugpy's, while a client is attached
    is_attached: Callable[[], bool] = staticmethod(lambda: False)
    always = False  # a message is inspected: its replay stops as well

    def __init__(self, own: Any) -> None:
        self.own = own

    @property  # as a method it would be a frame between breakpoint() and pdb, which would stop there
    def __call__(self) -> Any:
        if not _Hook.always and runs_again():
            return lambda *arguments, **keywords: None
        return _Hook.client if _Hook.is_attached() else self.own


def skip_in_replays() -> None:
    """Let ``breakpoint()`` do nothing from here on in code that a replay, or a rebuild, runs again."""
    if not isinstance(sys.breakpointhook, _Hook):
        sys.breakpointhook = _Hook(sys.breakpointhook)


# debugpy


def listen(port: int) -> bool:
    """Let clients of debugpy, such as VS Code, attach at ``port`` of this machine; return False if they already can.

    Raises DebuggerError.
    """
    if _Hook.client is not None:
        return False
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")  # Python's own frozen modules are not debugged
    own = sys.breakpointhook
    try:
        import debugpy
    except ImportError as error:
        raise DebuggerError(f"--debugpy needs debugpy ({error}): {add_extra('debug')}") from None
    try:
        with socket.socket() as probe:  # if it is taken, debugpy would wait for ever
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((HOST, port))
        debugpy.listen((HOST, port), in_process_debug_adapter=True)  # another process would keep the port
    except (OSError, RuntimeError) as error:
        raise DebuggerError(f"--debugpy: {HOST}:{port} can't be listened at: {error}") from None
    sys.breakpointhook = own  # without a client: as before
    _Hook.client, _Hook.is_attached = staticmethod(debugpy.breakpoint), debugpy.is_client_connected
    return True


def _suspend(frame: FrameType) -> None:
    """Give ``frame`` to debugpy's client, and return when the client lets it continue."""
    import debugpy
    from _pydevd_bundle.pydevd_comm_constants import CMD_SET_BREAK
    from _pydevd_bundle.pydevd_constants import get_global_debugger

    debugpy.debug_this_thread()  # also the frames that already run
    debugger, thread = get_global_debugger(), threading.current_thread()
    debugger.set_suspend(thread, CMD_SET_BREAK)
    debugger.do_wait_suspend(thread, frame, "line", None)


# --break: the debugger at one logged message, at the first line of user code that it runs.


class _Left(KeyboardInterrupt, ControlFlowSignal):
    """Raised after a person has left the debugger: the app ends as at Ctrl-C."""


class _Finder:
    """Trace function that calls ``stop`` with the first frame of user code that runs.

    It stops at the frame's first line or, if a coroutine continues, at the innermost await."""

    def __init__(self, stop: Callable[[FrameType], None], package: str) -> None:
        self._stop = stop
        self._package = package
        self._found: FrameType | None = None  # entered, and possibly only on the way to the place where it continues
        self.has_stopped = False

    def __call__(self, frame: FrameType, event: str, argument: object) -> _Finder | None:
        if event == "call" and is_of_user(frame, self._package):
            self._found = frame
            return self
        if self._found is not None:
            found, self._found = self._found, None
            self.has_stopped = True
            _settrace(None)
            self._stop(found)
        return None


def is_of_user(frame: FrameType, package: str) -> bool:
    """Tell whether a frame is neither the SDK's nor a library's, and is in a file. ``package``: of the app's class,
    wherever that is installed.
    """
    name = str(frame.f_globals.get("__name__")).partition(".")[0]
    return name == package or not (name == "immortal" or frame.f_code.co_filename.startswith((*_LIBRARIES, "<")))


class Breakpoint:
    """Breakpoint at the message ``message_index`` (from 0) of the record ``sequence_id``.

    ``is_remote``: wait there for a client of debugpy, instead of pdb.
    """

    def __init__(self, sequence_id: int, message_index: int = 0, *, is_remote: bool = False) -> None:
        self.sequence_id = sequence_id
        self.message_index = message_index
        self.is_remote = is_remote
        self.reached = False
        self._package = ""  # of the app's class, wherever it is installed

    def __str__(self) -> str:
        return f"record {self.sequence_id}, message {self.message_index}"

    def make_delivery(self, definition: Definition, context: Context) -> Delivery:
        self._package = definition.cls.__module__.partition(".")[0]
        return _BreakingDelivery(definition, context, self)

    def debugged(self, function: Callable[..., Any], name: str, first: int | None = 0) -> Callable[..., None]:
        """Wrap ``function``, so that it runs in the debugger from its first line. To leave that ends the app.

        ``first``: index of the first argument of the user's own; None: there is none, as in an answer.
        """

        import pdb  # here: it loads much that no ordinary run needs

        package = self._package

        class Debugger(pdb.Pdb):
            def stop_here(self, frame: FrameType) -> bool:  # a step from the user's code to the user's code
                return is_of_user(frame, package) and super().stop_here(frame)

            def interaction(self, *arguments: Any) -> None:
                super().interaction(*arguments)
                if self.quitting:
                    raise _Left  # a BdbQuit would be a failure of the handler

            def stop_at(self, frame: FrameType) -> None:
                self.reset()
                self.set_trace(frame)
                self.interaction(frame, None)

        def run(instance: object, *arguments: Any) -> None:
            self.reached = _Hook.always = True
            shown = "" if first is None else describe_arguments(arguments[first:])
            print(printable(f"{self}: {name}{shown}"), flush=True)  # noqa: T201
            if self.is_remote:
                import debugpy

                debugpy.wait_for_client()
            debugger, before = Debugger(nosigint=True), sys.gettrace()
            finder = _Finder(_suspend if self.is_remote else debugger.stop_at, package)
            _settrace(finder)
            try:
                function(instance, *arguments)
            finally:
                if not self.is_remote or sys.gettrace() is finder:
                    _settrace(before)
            if not finder.has_stopped:
                print("no line of yours runs there: there was nothing to stop at", flush=True)  # noqa: T201

        return run


class _BreakingDelivery(Delivery):
    """Gives one message to the debugger. In its record each message is looked up by itself, elsewhere as usual."""

    def __init__(self, definition: Definition, context: Context, stop: Breakpoint) -> None:
        super().__init__(definition, context)
        self._stop = stop

    def deliver(self, instance: Any, content: bytes, offset: int, end: int, slice_end: int) -> int:
        if self._context.sequence_id == self._stop.sequence_id:
            slice_end = offset + 1
            self._cached.clear()
        return super().deliver(instance, content, offset, end, slice_end)

    def _look_up(self, content: bytes, offset: int, end: int, index: int) -> tuple[Entry, int, int]:
        entry, start, stride = super()._look_up(content, offset, end, index)
        if (self._context.sequence_id, index) == (self._stop.sequence_id, self._stop.message_index):
            decode, function, name = entry
            codecs = map(self._definition.codec, self._definition.by_method_id.values())
            is_of_user = any(codec.name == name for codec in codecs)
            first = method_and_front(content, offset)[1] if is_of_user else None
            entry = (decode, self._stop.debugged(function, name, first), name)
        return entry, start, stride
