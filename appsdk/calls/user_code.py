"""Runs of user code: their context variables, which exceptions are the user's, and reports of failures.

``sys.exit()``, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError and each BaseException of a user's own count
like a ValueError: the run that raised it has failed, and the process continues. Only a signal that asks for it ends the
process. docs/reference/errors.md has the table.
"""

from __future__ import annotations

import contextvars
import functools
import gc
import os
import re
import reprlib
import signal
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice, zip_longest
from types import CodeType, FrameType
from typing import Any, TypeVar

from immortal.appsdk.errors import AppError, HandlerError
from immortal.protocol import decoding, redaction


class ControlFlowSignal(BaseException):
    """Raised by the SDK to leave user code without a failure. No code on the way must catch it."""


def is_user_failure(error: BaseException) -> bool:
    """Return True if ``error`` is a failure of the user's code; otherwise it must be raised again."""
    if isinstance(error, Exception):
        return True
    return not isinstance(error, ControlFlowSignal) and not _comes_from_signal_handler(error)


def _comes_from_signal_handler(error: BaseException) -> bool:
    if threading.current_thread() is not threading.main_thread():
        return False
    codes = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in codes:
            return True
        trace = trace.tb_next
    return False


def _code_of(handler: Any) -> CodeType | None:
    code = getattr(handler, "__code__", None)
    if code is None and callable(handler):
        code = getattr(handler.__call__, "__code__", None)
    return code if isinstance(code, CodeType) else None


def interrupt(number: int, frame: FrameType | None) -> None:
    """Handle Ctrl-C like Python's default, but in Python code, so that the origin of the KeyboardInterrupt is known."""
    raise KeyboardInterrupt


@contextmanager
def mark_interrupts() -> Iterator[None]:
    """Distinguish Ctrl-C from a KeyboardInterrupt of user code inside this context, if SIGINT has its default.

    Do nothing in other threads than the main one.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is interrupt:
            signal.signal(signal.SIGINT, signal.default_int_handler)


# Context variables: each run of user code has its own copy, which no other run sees and which ends with it.
#
# They hold decimal's precision and numpy's errstate, for libraries the context of a log line or a span, for users their
# tenant. Without a copy one handler would change what all others compute. A recovery, which does not run the code that
# changed it, would compute something else. decisions/0073.


T = TypeVar("T")

running: contextvars.ContextVar[Any] = contextvars.ContextVar("who runs", default=None)
"""Owner of the code that runs: a :class:`~immortal.appsdk.calls.context.Context`, the
:class:`~immortal.appsdk.waiting.task.Task` of an ``async def`` handler, the name of the instance (in the function of an
effect), or None."""

UNCHANGED_LENGTH = 1  # a context that user code left unchanged holds only ``running``
_SETTINGS = ("prec", "rounding", "Emin", "Emax", "capitals", "clamp", "traps")  # of a decimal context
_decimal_variable: contextvars.ContextVar[Any] | None = None


class RunContexts:
    """Factory of the contexts of one instance: copies of this thread's context when the app's modules are imported.

    ``owner``: the owner of the code that runs in these contexts, see :data:`running`.
    """

    __slots__ = ("_base", "_is_empty")

    def __init__(self, owner: Any = None) -> None:
        self._base = _without_default_decimal(contextvars.copy_context())
        self._base.run(running.set, owner)
        self._is_empty = len(self._base) == UNCHANGED_LENGTH

    def new(self) -> contextvars.Context:
        """Return a new context for a run that inherits from no other run."""
        made = self._base.copy()
        return made if self._is_empty else _separated(made)

    def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call ``function`` in a new context, also from within another run."""
        return self.new().run(function, *arguments)


def inherited_context() -> contextvars.Context:
    """Return a copy of the current context for a branch, a step or an effect that the current code starts."""
    return _separated(contextvars.copy_context())


def context_of_owner(owner: Any) -> contextvars.Context:
    """Return a copy of the current context in which ``owner`` runs, see :data:`running`."""
    variables = inherited_context()
    variables.run(running.set, owner)
    return variables


def copy_of_context(context: contextvars.Context) -> contextvars.Context:
    """Return a copy of ``context`` for one of several runs that begin with its values."""
    return _separated(context.copy())


def _separated(context: contextvars.Context) -> contextvars.Context:
    """Give ``context`` its own decimal context and return it: code changes a decimal context in place."""
    variable = _variable_of_decimal()
    if variable is not None and variable in context:
        context.run(variable.set, context[variable].copy())
    return context


def _without_default_decimal(context: contextvars.Context) -> contextvars.Context:
    """Return ``context`` without a decimal context that has default settings.

    Decimal adds one as soon as a module computes a number at its import."""
    variable = _variable_of_decimal()
    if variable is None or variable not in context:
        return context
    usual = contextvars.Context().run(sys.modules["decimal"].getcontext)
    if any(getattr(context[variable], name) != getattr(usual, name) for name in _SETTINGS):
        return _separated(context)
    made = contextvars.Context()
    for other, value in context.items():
        if other is not variable:
            made.run(other.set, value)
    return made


def _variable_of_decimal() -> contextvars.ContextVar[Any] | None:
    """Return the context variable that decimal uses; None if nobody has imported decimal."""
    global _decimal_variable
    if _decimal_variable is None and hasattr(decimal := sys.modules.get("decimal"), "getcontext"):
        probe = contextvars.Context()
        probe.run(decimal.getcontext)  # type: ignore[union-attr]
        _decimal_variable = next(iter(probe), None)
    return _decimal_variable


# Python's garbage collector closes abandoned coroutines at any time, in the thread and the context that run then.


_collecting: int | None = None  # thread whose garbage is being collected


def _note_collection(phase: str, info: dict[str, int]) -> None:
    global _collecting
    _collecting = threading.get_ident() if phase == "start" else None


gc.callbacks.append(_note_collection)


def is_collecting() -> bool:
    """Return True if Python's garbage collector called the current code, in this thread."""
    return _collecting is not None and _collecting == threading.get_ident()


# Code that a debugger runs: its time does not count as the handler's, and no replay repeats what a person typed.


_DEBUGGERS = frozenset({"bdb", "pdb", "pydevd", "_pydevd_bundle"})  # ipdb, pudb and pdb++ are built on the first two
_HANDLER_CALLERS = frozenset({"immortal.appsdk.running.app_loop", "immortal.appsdk.waiting.task"})


def in_debugger(frame: FrameType | None) -> bool:
    """Return True if ``frame`` belongs to a debugger, or to code that it calls for its prompt or to show a value."""
    if not any(name in sys.modules for name in _DEBUGGERS):
        return False
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name in _HANDLER_CALLERS:
            return False  # a debugger that started the whole program is below
        if name.partition(".")[0] in _DEBUGGERS:
            return frame.f_code.co_name not in ("runcall", "run")  # these two run the debugged code
        frame = frame.f_back
    return False


# Reports of failures of the app's own code: the place, the arguments, the traceback, and what to do.


Result = TypeVar("Result")

ARGUMENT_CHARACTERS_MAX = 200
ARGUMENT_ITEMS_MAX = 8
BYTES_SHOWN = 32
DESCRIBED_SIZE_BYTES_MAX = 64 << 10  # of encoded arguments: larger ones are not decoded to be shown

# The second folder is in the file names of compiled modules.
_OWN_FOLDERS = (os.path.join(os.path.dirname(os.path.dirname(__file__)), ""), os.path.join("immortal", "appsdk", ""))

_INSTALLED = frozenset({"site-packages", "dist-packages"})  # only the app's package there is the user's

SECRET = re.compile(
    r"passw|passphrase|passcode|secret|token|credential|authori[sz]ation|cookie|(api|private|access)_?key|card_?number"
    r"|^(pin|cvv|cvc|iban|pwd)$",
    re.IGNORECASE,
)
"""Names of parameters, attributes and keys whose values are not shown."""
HIDDEN = "***"

_SEARCHED_CHARACTERS_MAX = 10_000
_named_value = re.compile(
    r"""(?<!\w)(?P<name>\w++)(?P<sign>['"]?\s*[=:]\s*)(?P<value>b?'(?:[^'\\]|\\.)*'|b?"(?:[^"\\]|\\.)*"|[^,)}\]]+)"""
)


_search = functools.cache(SECRET.search)


def is_secret(name: str) -> bool:
    """Return True if the value of a parameter, attribute or key of this name must not be shown."""
    return _search(name) is not None or redaction.is_named_anywhere(name)


def hide_secrets(text: str) -> str:
    """Return ``text`` with the values after names of secrets replaced, as in ``password='...'``."""
    shown, at = [], 0
    while found := _named_value.search(text, at):
        begin = found.start("value")
        shown.append(text[at:begin])
        at = begin  # the value of another name can contain a secret
        if is_secret(found["name"]):
            shown.append(HIDDEN)
            at = found.end()
    return "".join(shown) + text[at:]


class _Text(str):
    """Text that is its own ``repr``."""

    __slots__ = ()
    __repr__ = str.__str__


class _Shortener(reprlib.Repr):
    """Shortener of values as text that hides the values of secrets before it cuts anything."""

    def repr_instance(self, value: Any, level: int) -> str:
        try:
            value = _Text(hide_secrets(repr(value)[:_SEARCHED_CHARACTERS_MAX]))
        except Exception:  # a __repr__ of the user's: it is called again and reported
            return super().repr_instance(value, level)
        return super().repr_instance(value, level)

    def repr_bytes(self, value: bytes, level: int) -> str:
        return repr(value) if len(value) <= BYTES_SHOWN else f"{value[:BYTES_SHOWN]!r}..."

    def repr_dict(self, value: dict[Any, Any], level: int) -> str:
        shown = {key: _Text(HIDDEN) if is_secret(str(key)) else one for key, one in value.items()}
        return super().repr_dict(shown, level)


_SHORT_INTEGER = 10**18
_PLAIN = (bool, float, type(None))
_shortener = _Shortener()
_shortener.maxstring = _shortener.maxother = _shortener.maxlong = ARGUMENT_CHARACTERS_MAX
_shortener.maxlist = _shortener.maxtuple = _shortener.maxdict = _shortener.maxset = ARGUMENT_ITEMS_MAX


def describe_arguments(arguments: Sequence[Any], names: Iterable[str] = (), handler: str = "") -> str:
    """Return arguments as short text. ``names``: the parameters' names. A value is hidden if its name matches
    :data:`SECRET`, or if a rule of redaction names it for the ``handler``.
    """
    shown = zip_longest(arguments, islice(names, len(arguments)), fillvalue="")
    try:
        return f"({', '.join(_shown(one, name, handler) for one, name in shown)})"
    except BaseException as error:  # a __repr__ of the user's
        if not is_user_failure(error):
            raise
        return f"(... their repr raises {error!r})"


def describe_result(result: Any, handler: str) -> str:
    """Return what a handler or an effect returned as short text, like :func:`describe_arguments`."""
    return describe_arguments((result,), (redaction.RESULT,), handler)[1:-1]


def _shown(value: Any, name: str, handler: str) -> str:
    if handler and redaction.is_hidden(handler, name or None):
        return redaction.REDACTED
    return HIDDEN if is_secret(name) else _short(value)


def describe_encoded(encoded: bytes, names: Iterable[str], handler: str, *, named: bool = True) -> str:
    """Return encoded arguments as the text ``(name=value, ...)``, with values decoded to plain types."""
    if len(encoded) > DESCRIBED_SIZE_BYTES_MAX:
        return f"(... {len(encoded):,} bytes)"
    try:
        values = decoding.decode_shown(encoded, type=list)
    except decoding.DecodeError:
        return "(...)"
    parts = []
    left = iter(names)
    for one in values:
        name = next(left, "")
        value = _shown(one, name, handler)
        parts.append(f"{name}={value}" if named and name else value)
    return f"({', '.join(parts)})"


def _short(value: Any) -> str:
    """Return a value as text, like the shortener, but fast for short values, which are frequent."""
    if type(value) is bytes:
        return _shortener.repr_bytes(value, 0)
    if type(value) in _PLAIN or (type(value) is str and len(value) <= BYTES_SHOWN):
        return repr(value)
    if type(value) is int and -_SHORT_INTEGER < value < _SHORT_INTEGER:
        return repr(value)
    return _shortener.repr(value)


def place_of(frame: FrameType) -> str:
    """Return "file, line N" of a frame; the path is relative if the file is below the current directory."""
    file = frame.f_code.co_filename
    if file.startswith(os.getcwd() + os.sep):
        file = os.path.relpath(file)
    return f"{file}, line {frame.f_lineno}"


def is_sdk_file(file: str) -> bool:
    """Return True if a frame's ``file`` belongs to the SDK or to Python's import system."""
    return file.startswith(_OWN_FOLDERS) or "importlib" in file


@functools.cache
def is_in_users_file(file: str) -> bool:
    """Return True if the file of a module or function is not Python's, an installed library's or the SDK's."""
    if not os.path.isabs(file) or _INSTALLED & set(file.split(os.sep)):
        return False
    folders = (sysconfig.get_path("stdlib"), os.path.dirname(os.path.dirname(os.path.dirname(__file__))))
    return not file.startswith(tuple(os.path.join(folder, "") for folder in folders))


def is_users_module(app_package: str, module: str, file: str) -> bool:
    """Return True if ``module`` from ``file`` is the user's. ``app_package``: the top package of the app's class."""
    return module.partition(".")[0] == app_package or is_in_users_file(file)


def user_traceback(error: BaseException) -> str:
    """Return the traceback without the SDK's own frames, indented; if the exception's class fails there, say so."""
    try:
        return _user_traceback(error)
    except BaseException as problem:
        if not is_user_failure(problem):
            raise
        return f"    {type(error).__name__}: its traceback can't be shown: it raises {type(problem).__name__}"


def _user_traceback(error: BaseException) -> str:
    whole = traceback.TracebackException.from_exception(error)
    pending: list[traceback.TracebackException | None] = [whole]
    while pending:
        if (one := pending.pop()) is not None:
            users = [frame for frame in one.stack if not is_sdk_file(frame.filename)]
            is_of_import = one.exc_type is not None and issubclass(one.exc_type, SyntaxError | ImportError)
            one.stack = traceback.StackSummary.from_list(users if users or is_of_import else one.stack)
            pending += [one.__cause__, one.__context__]
    lines = list(whole.format())
    return "".join(f"    {line}\n" for part in lines for line in part.rstrip("\n").split("\n")).rstrip()


def handler_failed(
    method: str,
    arguments: tuple[Any, ...],
    error: BaseException,
    sequence_id: int,
    message_index: int,
    names: Iterable[str] = (),
) -> HandlerError:
    """Make the error of a handler that raised an exception. ``names``: the parameters' names, if they are known."""
    described = describe_arguments(arguments, names, method)
    made = HandlerError(
        f"{method} raised {type(error).__name__} at record {sequence_id}, message {message_index}; the app stops\n"
        f"  arguments: {described}\n"
        f"{user_traceback(error)}\n"
        f"  The call is in the log: nothing is lost, and nothing after it has been handled. Fix the handler and "
        f"start the\n"
        f"  app again: it recovers and handles this call with the new code. Starting it without a change repeats "
        f"the error.",
        sequence_id,
        message_index,
    )
    made.arguments = described
    return made


def run_user_code(subject: str, function: Callable[[], Result], error_type: type[AppError]) -> Result:
    """Call a user's function; if it raises an exception, raise an ``error_type`` with the traceback."""
    try:
        return function()
    except AppError:
        raise
    except BaseException as error:
        if not is_user_failure(error):
            raise
        raise error_type(f"{subject} raised {type(error).__name__}; the app stops\n{user_traceback(error)}") from error
