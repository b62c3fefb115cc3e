"""App process of a replay: its command, start, output and end; its code; and a reader of its state."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct, field
from msgspec.structs import asdict

from immortal.coordinator.app.secret import SECRET_FILE_VARIABLE
from immortal.coordinator.config import InstanceSettings
from immortal.coordinator.core.formatting import Methods
from immortal.coordinator.core.interfaces import LogSummary
from immortal.coordinator.service.process import die_with_parent
from immortal.protocol import decoding, kept_code, personal_keys, redaction
from immortal.protocol.limits import ARGUMENTS_SIZE_MIB_DEFAULT
from immortal.replay.plan import ReplayError, Route

HEAD_SIZE_BYTES = 64 << 10  # kept from the start of the output: the SDK's warnings are first
TAIL_SIZE_BYTES = 64 << 10  # kept from the end of the output: the reason of its death is last
LEAVE_S = 5.0  # time for an app to end after a goodbye
KILL_AFTER_S = 1.0  # between SIGTERM and SIGKILL: the app has nothing to lose

_READ_SIZE_BYTES = 64 << 10


class AppProcess:
    """Running app. ``descriptors`` are readable when it has written output (:meth:`read_output`) or has died."""

    def __init__(self, command: AppCommand, address: str, secret_file: Path, code_notes: Path) -> None:
        """Start the app. ``secret_file``: holds the secret that the app must prove at ``address``. ``code_notes``: file
        where the app notes its modules. Raises ReplayError."""
        files = {SECRET_FILE_VARIABLE: str(secret_file), NOTES_VARIABLE: str(code_notes)}
        files[personal_keys.NOTES_VARIABLE] = str(forgotten_file(code_notes))
        argv = [address if part == "{address}" else part for part in command.argv]
        behind = not command.foreground
        captured = behind and not command.shows_output
        try:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL if behind else None,
                stdout=subprocess.PIPE if captured else None,
                stderr=subprocess.STDOUT if captured else None,
                env={**os.environ, **command.environment, **files},
                process_group=0 if behind else None,  # Ctrl-C in a terminal reaches only the replaying process
                # Only two system calls, so that a lock of another thread does no harm. The thread that starts the app
                # lives as long as the replay: for the kernel the parent is a thread.
                preexec_fn=die_with_parent(os.getpid()),
            )
        except OSError as error:
            raise ReplayError(f"the app {command.name} can't be started: {argv[0]}: {error.strerror}") from None
        self._death = os.pidfd_open(self._process.pid)
        self._output: int | None = None  # None: the app is in the foreground, or its output has ended
        if self._process.stdout is not None:
            self._output = self._process.stdout.fileno()
            os.set_blocking(self._output, False)
        self._head = bytearray()
        self._tail: deque[bytes] = deque()
        self._tail_size_bytes = 0

    @property
    def descriptors(self) -> list[int]:
        return [self._death] if self._output is None else [self._death, self._output]

    @property
    def exit_status(self) -> int | None:
        """Exit status as subprocess gives it; None while the app runs."""
        return self._process.poll()

    @property
    def head(self) -> str:
        return bytes(self._head).decode("utf-8", "replace")

    @property
    def tail(self) -> str:
        """The end of the app's output; all of it if it is short."""
        said = b"".join(self._tail)
        if len(said) < TAIL_SIZE_BYTES:
            said = bytes(self._head[-(TAIL_SIZE_BYTES - len(said)) :]) + said
        return said[-TAIL_SIZE_BYTES:].decode("utf-8", "replace")

    def read_output(self) -> None:
        """Read the output that the app has written since the last call."""
        while self._output is not None:
            try:
                data = os.read(self._output, _READ_SIZE_BYTES)
            except BlockingIOError:
                return
            if not data:
                self._output = None
                return
            room = HEAD_SIZE_BYTES - len(self._head)
            self._head += data[:room]
            if data := data[room:]:
                self._tail.append(data)
                self._tail_size_bytes += len(data)
            while self._tail and self._tail_size_bytes - len(self._tail[0]) >= TAIL_SIZE_BYTES:
                self._tail_size_bytes -= len(self._tail.popleft())

    def send(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def wait(self, timeout_s: float) -> int | None:
        """Wait for the process to end; return its exit status, or None if it still runs after ``timeout_s``."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def close(self) -> None:
        """End the process; kill it if it does not end by itself."""
        if self.exit_status is None:
            self.send(signal.SIGTERM)
            if self.wait(KILL_AFTER_S) is None:
                self.send(signal.SIGKILL)
                self._process.wait()
        self.read_output()
        os.close(self._death)
        if self._process.stdout is not None:
            self._process.stdout.close()


def exit_text(exit_status: int) -> str:
    if exit_status >= 0:
        return f"status {exit_status}"
    try:
        return signal.Signals(-exit_status).name
    except ValueError:
        return f"signal {-exit_status}"


# Start of a replay's app: its command and its terminal.


NOTES_VARIABLE = "IMMORTAL_CODE_NOTES"
"""Variable with the file where the app notes its loaded modules: :mod:`immortal.appsdk.running.user_modules`."""

BY_HAND = "-"
"""App name for an app that the user starts; the replay tells the user the address."""


class AppCommand(Struct, frozen=True):
    """Command that starts the app: ``argv`` with ``{address}`` as a placeholder; empty if the user starts the app.

    ``environment`` is set in addition to the caller's. ``foreground``: the app has the caller's terminal. Otherwise its
    output is captured, and shown if it fails; with ``shows_output`` it is shown at once.
    """

    name: str
    argv: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    foreground: bool = False
    shows_output: bool = False
    rpc_limit_mib: int = ARGUMENTS_SIZE_MIB_DEFAULT  # of its arguments: a larger call is dropped, as in service
    settings: InstanceSettings | None = None  # an app started by hand connects and authenticates as these say
    code: Path | None = None  # a folder or a wheel whose modules come before those of the current folder
    ports: tuple[int, int | None] | None = None  # where an app started by hand connects; None: at free ones
    handler_limit_s: float = 0.0  # for a message, after which the app ends; 0: no limit

    @classmethod
    def of(
        cls,
        app: str,
        *,
        strict: bool = False,
        checks_queries: bool = False,
        lines: bool = False,
        break_at: tuple[int, int | None] | None = None,
        debugpy: int | None = None,
        settings: InstanceSettings | None = None,
        code: Path | None = None,
        ports: tuple[int, int | None] | None = None,
        handler_limit_s: float = 0.0,
    ) -> AppCommand:
        """Return the command of an SDK app, "module:Class", in trace mode; for BY_HAND a command that starts nothing.

        ``checks_queries``: compare the state before and after each query. ``lines``: write and show lines of
        immortal.logger as in service. ``settings``: how an app started by hand connects.
        ``code``: a folder or a wheel whose modules come before those of the current folder.
        ``break_at``: (record, message): pdb stops at the first line of that message's handler, in the caller's
        terminal; with ``debugpy``, a port, an attached debugger stops there. ``ports``: the app's port and its send
        port, for BY_HAND.
        """
        if app == BY_HAND:
            if code is not None:
                raise ReplayError(f"{code} is for an app that this command starts: leave it out, or name the class")
            limit_mib = ARGUMENTS_SIZE_MIB_DEFAULT if settings is None else settings.rpc_limit_mb
            return cls(BY_HAND, rpc_limit_mib=limit_mib, settings=settings, ports=ports)
        if ports is not None:
            raise ReplayError("a port is for an app started by hand: use it with --app -")
        argv = [sys.executable, "-P", "-m", "immortal.appsdk", app, "--address", "{address}", "--trace"]
        if strict:
            argv.append("--strict")
        if break_at is not None:
            sequence_id, message = break_at
            argv += ["--break", f"{sequence_id}" if message is None else f"{sequence_id}:{message}"]
        # The SDK needs a fixed hash seed, and would restart itself to get one.
        environment = {"PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0")}
        # These variables of the caller's environment are for an app in service.
        environment |= {"IMMORTAL_STRICT": "", "IMMORTAL_BREAK": "", "IMMORTAL_EXECUTIONS": ""}
        environment["IMMORTAL_DEBUGPY"] = str(debugpy or "")
        if break_at is None:
            environment["PYTHONBREAKPOINT"] = "0"
        environment["IMMORTAL_CHECK_QUERIES"] = "1" if checks_queries else ""
        environment["IMMORTAL_LOG_REPLAYED"] = "1" if lines else ""
        environment["IMMORTAL_HANDLER_LIMIT"] = f"{handler_limit_s:g}"
        environment |= code_environment(code)
        foreground = break_at is not None
        return cls(
            app,
            argv,
            environment,
            foreground=foreground,
            shows_output=lines,
            code=code,
            handler_limit_s=handler_limit_s,
        )

    @property
    def by_hand(self) -> bool:
        return not self.argv


def code_environment(code: Path | None) -> dict[str, str]:
    """Return the environment of a process with user code (:mod:`immortal.appsdk.running.user_modules`), ``code`` first.

    Raises ReplayError if ``code`` is neither a folder nor a wheel.
    """
    if code is not None and not (code.is_dir() or (code.is_file() and code.suffix in (".whl", ".zip"))):
        raise ReplayError(f"{code} is neither a folder nor a wheel: one with the module of the class was expected")
    place = "" if code is None else str(code.absolute())
    notes = dict.fromkeys((NOTES_VARIABLE, personal_keys.NOTES_VARIABLE), os.devnull)
    return {**personal_keys.environment(), **redaction.environment(), **notes, "IMMORTAL_CODE": place}


# The app that replays a part of a log if the user names none.


def default_app(name: str, registered: str | None, summary: LogSummary, version: int) -> str:
    """Return the app ("module:Class") of a replay that ends in ``version``.

    That is the instance's own, ``registered``, if its version is ``version`` now; otherwise the app that the log
    names for the version. Raises ReplayError if nothing is known.
    """
    newest = summary.versions[-1].version if summary.versions else version
    named = [start.app for start in summary.versions if start.version == version]
    named = [app for app in named if app and not app.startswith("__main__:")]  # a script's own class has no module
    if version == newest and registered is not None:
        return registered
    if named:
        return named[-1]
    if registered is not None:
        return registered
    raise ReplayError(
        f"the app of {name!r} is not known: give it with --app MODULE:CLASS (or --app - and start it by hand)"
    )


class OwnCode(Struct, frozen=True):
    """App that handled a record. ``archive``: its kept code, if other code is on disk now; else None.

    ``first``: the first record that this code handled; 0 if unknown. ``note``: for people.
    """

    app: str
    archive: Path | None = None
    note: str = ""
    first: int = 0


def code_of_record(settings: InstanceSettings, summary: LogSummary, version: int, sequence_id: int) -> OwnCode:
    """Return the code that handled a record, if it is kept; else the app of ``version``. Raises ReplayError."""
    folder = settings.folder / kept_code.FOLDER_NAME
    kept = kept_code.code_at(folder, sequence_id)
    if kept is None or kept.is_on_disk():
        first = 0 if kept is None else kept.first
        return OwnCode(default_app(settings.name, settings.app, summary, version), first=first)
    digest = kept.digest[:DIGEST_SHOWN_SIZE]
    note = f"the code that made it, kept with the log (digest {digest}); the code on disk differs"
    return OwnCode(kept.app, kept.archive(folder), note, kept.first)


def code_at_end(settings: InstanceSettings, summary: LogSummary, route: Route) -> OwnCode:
    """Return the code that handled the last record of a route, like :func:`code_of_record`."""
    last = summary.last_sequence_id if route.last_sequence_id is None else route.last_sequence_id
    return code_of_record(settings, summary, route.last_version, last)


# The code that an app has run: the user's modules that it has loaded, and their digest.


DIGEST_SHOWN_SIZE = 16  # characters


class Code(Struct, frozen=True):
    """Code of an app. ``digest``: SHA-256 of names and contents, wherever the files are. ``file``: of the class."""

    digest: str
    modules: int
    file: str

    def __str__(self) -> str:
        count = "1 module" if self.modules == 1 else f"{self.modules} modules"
        return f"{self.file}, {count} with digest {self.digest[:DIGEST_SHOWN_SIZE]}"


def read_code(app: str, notes: Path) -> Code | None:
    """Return the code that ``app`` ("module:Class") noted in the file ``notes``; None if nothing is noted yet."""
    try:
        lines = notes.read_text().splitlines()
    except FileNotFoundError:
        return None
    rows = {row["module"]: row for row in map(decoding.load_json, lines)}
    main = rows.get(app.partition(":")[0])
    if main is None:
        return None
    contents = "".join(f"{name} {row['sha256']}\n" for name, row in sorted(rows.items()))
    return Code(hashlib.sha256(contents.encode()).hexdigest(), len(rows), main["file"])


def forgotten_file(code_notes: Path) -> Path:
    """Return the file beside ``code_notes`` where an app notes whose data it asked for and did not get."""
    return code_notes.with_name("forgotten")


def forgotten_notes(subjects: Iterable[str]) -> list[str]:
    """Return what is said of each person whose data an app asked for and did not get."""
    made = []
    for subject in subjects:
        person = personal_keys.find(subject)
        since = person.forgotten if person is not None else "an earlier day"
        made.append(
            f"{subject!r} was forgotten on {since}: handlers get None in place of the data, and can behave differently"
        )
    return made


def code_values(code: Code | None) -> dict[str, Any] | None:
    return None if code is None else asdict(code)


# Contents of a state: the SDK reads them in a separate process, since this needs the user's class.


DIFFERENCES_MAX = 20


def show_state(app: str, blob: Path, code: Path | None = None) -> dict[str, Any]:
    """Return the state in the file ``blob`` as the class ``app`` ("module:Class") reads it: plain JSON values.

    ``code``: folder or wheel with its modules, see :class:`AppCommand`. Raises ReplayError.
    """
    return dict(_inspect("show", app, str(blob), code=code))


def diff_states(
    old_app: str,
    old: Path,
    new_app: str,
    new: Path,
    *,
    limit: int = DIFFERENCES_MAX,
    old_code: Path | None = None,
    new_code: Path | None = None,
) -> list[dict[str, Any]]:
    """Return at most ``limit`` differences of two states: [{"path", "old", "new"}]; a side that lacks the path has no
    key.

    ``old_code``, ``new_code``: a side's folder or wheel of modules, see :class:`AppCommand`. One process can't load two
    classes of one name, so each side then prints its own state, with attributes of inner objects as keys.

    Raises ReplayError.
    """
    if old_code is not None or new_code is not None:
        shown = []
        for app, blob, code in ((old_app, old, old_code), (new_app, new, new_code)):
            shown.append(blob.with_name(f"{blob.name}.json"))
            shown[-1].write_text(json.dumps(_inspect("show", app, str(blob), code=code, rules=os.devnull)))
        return list(_inspect("diff-shown", *map(str, shown), "--limit", str(limit)))
    return list(_inspect("diff", old_app, str(old), new_app, str(new), "--limit", str(limit)))


def write_rows(app: str, blob: Path, out: Path, code: Path | None = None) -> None:
    """Write the state as table rows: a JSON list [table, row] on each line of the file ``out``. Raises ReplayError."""
    _inspect("rows", app, str(blob), str(out), code=code)


def method_names(app: str) -> dict[tuple[str, int], str]:
    """Return the method names of the class ``app``: (destination, method ID) to a name. Raises ReplayError."""
    found: list[tuple[str, int, str, list[str]]] = _inspect("methods", app, subject="the class")
    for _, _, name, parameters in found:
        redaction.note_parameters(name, parameters)
    return {(destination, method_id): name for destination, method_id, name, _ in found}


def class_paths(app: str) -> list[tuple[list[str], list[str]]]:
    """Return of the class ``app`` and of its nodes' classes the names, and what rules of redaction can name in it:
    "pay.card", "pay.return", "items". Raises ReplayError.
    """
    return [tuple(one) for one in _inspect("paths", app, subject="the class")]


def unanswered(app: str, blob: Path, code: Path | None = None) -> list[dict[str, Any]]:
    """Return answers that handlers wait for at the end of a what-if and that the log lacks: [{"handler",
    "arguments", "waits_for"}]. Raises ReplayError.
    """
    return list(_inspect("unanswered", app, str(blob), code=code))


def _inspect(*arguments: str, subject: str = "the state", code: Path | None = None, rules: str = "") -> Any:
    """``rules``: a file with rules of redaction, in place of the usual one."""
    environment = {**os.environ, "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0"), **code_environment(code)}
    environment |= {redaction.FILE_VARIABLE: rules} if rules else {}
    command = [sys.executable, "-P", "-m", "immortal.appsdk.running.inspection", *arguments]
    done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip()
        raise ReplayError(f"{subject} can't be inspected: {said or f'status {done.returncode}'}")
    try:
        return decoding.load_json(done.stdout)
    except ValueError as error:
        raise ReplayError(f"{subject} can't be inspected: the answer is not JSON: {error}") from None


def methods_of(registered: str | None, given: str | None) -> Methods | None:
    """Return the class's method names; None if no class is known. Raises ReplayError if a given class can't be
    found.
    """

    from immortal.protocol.command_line import echo  # loads click

    app = given or registered
    if app is None:
        return None
    try:
        return method_names(app)
    except ReplayError as error:
        if given is not None:
            raise
        reason = str(error).rstrip("\n").split("\n")[-1]
        echo(f"note: methods are shown by their numbers: {reason}", err=True)
        echo("note: give the class with --app MODULE:CLASS, where it can be imported", err=True)
        return None
