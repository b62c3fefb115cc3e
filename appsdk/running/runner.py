"""Run of one app process, from ``module:Class`` to its exit status."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from operator import attrgetter
from types import FrameType
from typing import Any, NoReturn, TextIO

import msgspec

from immortal.appsdk.calls.user_code import mark_interrupts, user_traceback
from immortal.appsdk.determinism.check import DeterminismError, check
from immortal.appsdk.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_NOT_RUNNABLE,
    EXIT_RECOVER,
    EXIT_TERMINATED,
    AppError,
    ConnectError,
    DefinitionError,
    Disconnected,
    HandlerError,
    LoadError,
    RecoveryNeeded,
)
from immortal.appsdk.handlers.definition import Definition, definition_of
from immortal.appsdk.running import tracing
from immortal.appsdk.running.life import AppLife, print_message, print_text
from immortal.appsdk.running.options import (
    BREAK_VARIABLE,
    REWOUND_VARIABLE,
    STRICT_VARIABLE,
    TRACE_VARIABLE,
    RunOptions,
    run_options,
)
from immortal.appsdk.running.transport import CONNECT_TIMEOUT_S, Transport, Waker, authenticate, connect, read_secret
from immortal.appsdk.running.user_modules import HiddenModules, UserCode, add_to_path, explain, load_module
from immortal.protocol import distribution
from immortal.protocol.errors import ImmortalError
from immortal.protocol.process import retain_freed_memory

ADDRESS_VARIABLE = "IMMORTAL_APP_ADDRESS"
SECRET_FILE_VARIABLE = "IMMORTAL_APP_SECRET_FILE"  # noqa: S105 (a name)
SWITCH_INTERVAL_S = 0.0005  # a hook that computes must not delay the handlers for 5 ms at a time


class _EndAtOnce:
    """Signal handler of SIGTERM that ends the process at once, in the middle of any code, with ``status``.

    It raises nothing: an exception could appear anywhere, in a ``finally``, in a ``__del__``, or when Python ends, and
    show as a traceback or be swallowed. Nothing must be saved: the log has all input.
    """

    def __init__(self) -> None:
        self.status = EXIT_TERMINATED

    def __call__(self, number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(Exception):  # it can come in the middle of a print
            sys.stdout.flush()
        os._exit(self.status)


class _Output(io.FileIO):
    """Output that never fails: what a handler prints must not make its call fail, on a full disk or a closed pipe."""

    def write(self, data: Any) -> int:
        with contextlib.suppress(OSError):
            while (written := super().write(data)) is None:  # another process has made the terminal non-blocking
                select.select([], [self], [])
            return written
        return len(data)

    @classmethod
    def for_lines(cls, stream: TextIO) -> TextIO:
        """Return a stream that writes each line at once to the file of ``stream``, even if it is not a terminal."""
        if not isinstance(stream, io.TextIOWrapper):
            return stream
        file = io.BufferedWriter(cls(stream.fileno(), "wb", closefd=False))
        return io.TextIOWrapper(file, stream.encoding, stream.errors, line_buffering=True)


def load(target: str) -> type:
    """Load the class ``module:Class``, or ``path/of/file.py:Class``.

    Raises LoadError, and what the module raises when it is imported.
    """
    module_name, colon, class_name = target.rpartition(":")
    if not colon or not module_name or not class_name:
        raise LoadError(f"{target!r}: the app is given as module:Class, such as wordcount:Counter")
    try:
        module = load_module(module_name)
    except ModuleNotFoundError as error:
        if module_name.endswith(".py") and not os.path.isfile(module_name):
            raise LoadError(f"{target!r}: there is no file {module_name!r} in {os.getcwd()}") from None
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # a module that the user's module imports
        raise LoadError(
            f"{target!r}: there is no module {error.name!r} in {os.getcwd()} or on sys.path: run it from the "
            f"folder of the "
            f"module, or set PYTHONPATH"
        ) from None
    try:
        found = attrgetter(class_name)(module)
    except AttributeError:
        apps = [name for name, value in vars(module).items() if _is_app(value)]
        raise LoadError(
            f"{target!r}: module {module_name!r} has no {class_name!r} (its apps: {', '.join(apps) or 'none'})"
        ) from None
    if not _is_app(found):
        raise LoadError(f"{target!r}: {class_name} is not a class below immortal.Immortal")
    cls: type = found
    return cls


def load_or_report(target: str) -> type | None:
    """Load a class like :func:`load`, also from the current folder. On failure tell the user and return None."""
    folder = os.getcwd()
    hidden = HiddenModules(folder)
    add_to_path(folder)
    is_file = os.path.isfile(target.rpartition(":")[0])
    try:
        code = UserCode.from_environment(target)
        if not is_file and (problem := hidden.problem(target.partition(".")[0].partition(":")[0])) is not None:
            raise LoadError(f"{target!r}: {problem}")
        cls = load(target)
        if code is not None:
            code.check()
        for problem in hidden.problems():
            print_message(target, f"warning: {problem}")
        return cls
    except ImmortalError as error:
        print_message(target, explain(error))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the user's module: with its own traceback
        print_message(target, f"importing {target.rpartition(':')[0]!r} failed:")
        print_text(user_traceback(error))
        for problem in hidden.problems_of(error):
            print_message(target, problem)
    return None


def _is_app(value: object) -> bool:
    try:
        definition_of(value)
    except DefinitionError:
        return False
    return True


def run_connection(
    definition: Definition,
    address: str,
    connect_timeout_s: float = CONNECT_TIMEOUT_S,
    options: RunOptions = RunOptions(),  # noqa: B008 (it is frozen)
    *,
    secret_file: str | None = None,
) -> str:
    """Connect and run the app until the coordinator says Goodbye; return its reason. Raises ImmortalError.

    ``secret_file``: file with the coordinator's secret. Both sides first prove that they know it. None: the coordinator
    asks for no proof, and gives none.
    """
    for one in definition.chain:
        one.resolve(names_may_be_missing=False)  # errors in the class need no coordinator to be reported
    connection = connect(address, connect_timeout_s)
    try:
        if secret_file:
            authenticate(connection, read_secret(secret_file), address)
        return _run_connected(definition, connection, address, options)
    finally:
        connection.close()


def _run_connected(definition: Definition, connection: socket.socket, address: str, options: RunOptions) -> str:
    waker = Waker()
    life = AppLife(
        definition,
        options,
        waker.wake,
        send_from_other_thread=lambda message: transport.send_from_other_thread(message),
        is_disconnected=lambda: transport.is_disconnected(),
        coordinator=f" at {address}",
    )
    dispatcher = life.dispatcher
    transport = Transport(connection, life.loop, waker, address)
    life.start()
    reason = f"the connection with the coordinator at {address} has ended"
    try:
        return transport.run()
    except (HandlerError, RecoveryNeeded) as error:
        if isinstance(dispatcher, tracing.TracingDispatcher) and isinstance(error, HandlerError):
            tracing.report_failure(error, dispatcher, transport)
        else:
            dispatcher.announce_leaving(str(error).partition("\n")[0])
            transport.send_last_output()
        raise
    except Disconnected as error:
        reason = str(error)
        raise
    finally:
        life.close(reason)
        waker.close()


def run_to_status(
    cls: type,
    address: str | None,
    options: RunOptions | None = None,
    secret_file: str | None = None,
) -> int:
    """Run the app in this process's main thread; return its exit status. Messages for the user go to stderr.

    ``address``, ``options`` and ``secret_file`` are by default those of the environment.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    retain_freed_memory()
    end = _EndAtOnce()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, end)
    with mark_interrupts():
        end.status = _run_to_status(cls, address, options, secret_file)
    return end.status  # it stays the status, whatever happens while Python ends


def _run_to_status(cls: type, address: str | None, options: RunOptions | None, secret_file: str | None) -> int:
    label = getattr(cls, "__qualname__", repr(cls))
    try:
        definition = definition_of(cls)
        options = options or run_options()
        check_determinism(definition, label, strict=options.strict)
        if definition.objects is not None:
            definition = msgspec.structs.replace(definition, shard=options.shard)
        address = address or os.environ.get(ADDRESS_VARIABLE)
        if not address:
            raise ConnectError(
                f"no address of a coordinator: set {ADDRESS_VARIABLE} (unix:PATH or HOST:PORT), give --address, or "
                f"start both with 'immortal run NAME module:Class'"
            )
        secret_file = secret_file or os.environ.get(SECRET_FILE_VARIABLE)
        run_connection(definition, address, options=options, secret_file=secret_file)
        if options.stop is not None and not options.stop.reached:
            print_message(label, f"{options.stop} did not come: there was nothing to stop at")
        return EXIT_DONE
    except ImmortalError as error:
        print_message(
            label, str(error) if isinstance(error, DeterminismError) else explain(error, cls)
        )  # a DeterminismError names the lines
        return error.exit_status if isinstance(error, AppError) else EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def restart_if_needed(status: int) -> int:
    """Return ``status``, or restart the program in this same process if the app must be recovered.

    So no supervisor has to restart it; the threads of its hooks end with the old program.
    """
    if status == EXIT_RECOVER:
        sys.stdout.flush()
        environment = {**os.environ, REWOUND_VARIABLE: "1"}
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
    return status


def check_determinism(definition: Definition, label: str, *, strict: bool) -> None:
    """Warn of code that a replay would not repeat; with ``strict`` raise DeterminismError."""
    try:
        findings = check(definition)
    except Exception as error:  # the check is only a help: its failure must not keep the app from running
        problem = f"the search for what a replay would not repeat failed: {error!r}"
        if strict:
            raise DefinitionError(f"{problem} (--strict: without it the app starts all the same)") from error
        print_message(label, f"warning: {problem}")
        return
    if findings and strict:
        raise DeterminismError(findings)
    for finding in findings:
        print_message(label, f"warning: {finding}")


def run(cls: type, address: str | None = None) -> NoReturn:
    """Run ``cls`` as this process's app, with the coordinator at ``address``; never return.

    ``address`` is "host:port" or "unix:path", by default that of IMMORTAL_APP_ADDRESS. IMMORTAL_APP_SECRET_FILE names
    the file with the coordinator's secret. The exit status is 0 after a clean stop, 1 if the coordinator is gone or
    refuses, EXIT_NOT_RUNNABLE for a class that can't be run, EXIT_HANDLER_FAILED if a handler, a hook or the state
    fails, EXIT_UPGRADE_FAILED if an upgrade fails.
    """
    sys.exit(restart_if_needed(run_to_status(cls, address)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command ``python -m immortal.appsdk module:Class [--address A] [--secret-file PATH] [--strict] ...``."""
    parser = argparse.ArgumentParser(prog="python -m immortal.appsdk", description="Run an app beside its coordinator.")
    parser.add_argument("target", metavar="module:Class", help="the class below immortal.Immortal")
    parser.add_argument(
        "--address", metavar="ADDRESS", help=f"the coordinator's, unix:PATH or HOST:PORT; default: ${ADDRESS_VARIABLE}"
    )
    parser.add_argument(
        "--secret-file",
        metavar="PATH",
        help=f"where the coordinator's secret is, HOME/NAME/app_secret; default: ${SECRET_FILE_VARIABLE}",
    )
    parser.add_argument(
        "--strict",
        action="store_true",
        help=f"do not start while handlers do what a replay would not repeat; default: ${STRICT_VARIABLE}=1",
    )
    parser.add_argument(
        "--trace",
        action="store_true",
        help=f"in a replay: tell which message made each call; default: ${TRACE_VARIABLE}=1",
    )
    parser.add_argument(
        "--break",
        dest="stop",
        metavar="SEQ[:MESSAGE]",
        default="",
        help=f"start the debugger at the handler of this record's message; default: ${BREAK_VARIABLE}",
    )
    options = parser.parse_args(arguments)
    sys.stdout, sys.stderr = _Output.for_lines(sys.stdout), _Output.for_lines(sys.stderr)
    try:
        distribution.refuse_another()
        how = run_options(strict=options.strict, trace=options.trace, stop=options.stop)
    except ImmortalError as error:
        print_message(options.target, str(error))
        return EXIT_NOT_RUNNABLE
    try:
        cls = load_or_report(options.target)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    if cls is None:
        return EXIT_NOT_RUNNABLE
    return restart_if_needed(run_to_status(cls, options.address, options=how, secret_file=options.secret_file))
