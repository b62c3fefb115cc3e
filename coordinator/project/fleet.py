"""Processes of a project's services, each under an `immortal run` of its own; unit files of systemd for them.

An `immortal run` restarts its coordinator and its app; one that a signal killed is itself started again here. The
output goes to an :class:`OutputSink`, line by line. A text that stays without an end of line for a while counts as a
question, such as a debugger's prompt, which the sink can answer. All services die with this process.

The unit files are a service for each instance, and a target for all of them. systemd restarts an `immortal run`, which
restarts its processes, and starts all of them after a reboot.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import getpass
import os
import re
import signal
import stat
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import IO, Any, Protocol

import msgspec

from immortal.coordinator.config import ConfigError, check_settings, split_tcp, write_atomically
from immortal.coordinator.config.settings_file import read_toml
from immortal.coordinator.core.notices import Level
from immortal.coordinator.instances import own_logs
from immortal.coordinator.instances.registry import Registry
from immortal.coordinator.operator import control
from immortal.coordinator.peers import keys
from immortal.coordinator.project.project import PEER_DEFAULT, Project, ServiceSpec
from immortal.coordinator.service.children import (
    PYTHON,
    RESTART_BACKOFF_S_MIN,
    STATUS_HANDLER_FAILED,
    ProcessExit,
    RestartBackoff,
    Role,
)
from immortal.coordinator.service.process import STATUS_FENCED, die_with_parent
from immortal.coordinator.service.supervisor import CLEAN_STOP_S, STOP_GRACE_S

LINE_SIZE_BYTES_MAX = 64 << 10  # longer lines are passed on in pieces
EFFECTS_VARIABLE, DEBUGPY_VARIABLE = "IMMORTAL_EFFECTS", "IMMORTAL_DEBUGPY"  # of the app: appsdk/running/options.py
QUESTION_AFTER_S = 0.15  # longer than any print() takes from its text to its end of line
_READ_SIZE_BYTES = 64 << 10
_LINE = re.compile(
    r"(?P<clock>\d\d:\d\d:\d\d\.\d{3}) (?P<level>debug|info|warning|error) +"
    r"(?P<name>[^\s>]+)(?P<sign>> |  )(?P<text>.*)"  # "> ": immortal.logger of its app
)


def command(project: Project, *arguments: str) -> list[str]:
    """Return the command line of an `immortal` command for the project's registry."""
    return [*PYTHON, "-m", "immortal", "--home", str(project.home), *arguments]


class State(enum.Enum):
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"  # one of its processes died, or its 'immortal run'
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"  # ended by itself, with an error


class OutputSink(Protocol):
    def write_line(self, name: str, text: str, level: Level | None = None, clock: str = "") -> None:
        """Accept one line of the service ``name``, of its coordinator (with ``level`` and ``clock``) or of its app."""

    def add_question(self, name: str, text: str, answer: Callable[[str], None]) -> None:
        """Accept the question ``text`` of the app of ``name``, which waits for a line; pass the line to ``answer``."""

    def on_ended(self, name: str, state: str) -> None:
        """Drop the questions of ``name``, whose `immortal run` has ended. ``state``: its state from now on."""

    def on_changed(self) -> None:
        """Show or publish the states, since one has changed."""


class ServiceProcess:
    """Service of a project, with its `immortal run`.

    ``simulates_effects``: functions of the project run in place of its effects. ``debugpy``: the port at which its app
    listens for clients of debugpy.
    """

    def __init__(
        self,
        project: Project,
        service: ServiceSpec,
        sink: OutputSink,
        *,
        interactive: bool,
        simulates_effects: bool = False,
        debugpy: int | None = None,
    ) -> None:
        self.service = service
        self.state = State.STOPPED
        self.exit_status: int | None = None
        self.since_s = time.time()  # in this state
        self._project = project
        self._sink = sink
        self._interactive = interactive
        self._simulates_effects = simulates_effects
        self._debugpy = debugpy
        self._process: subprocess.Popen[bytes] | None = None
        self._exited: asyncio.Future[int] | None = None
        self._stop_requested = False
        self._pause = RestartBackoff()
        self._restart: asyncio.TimerHandle | None = None  # set while its `immortal run` is dead, until the next start
        self._death = ""
        self._started_s = 0.0
        self._was_ready = False

    @property
    def name(self) -> str:
        return self.service.name

    @property
    def state_text(self) -> str:
        if self._restart is not None:
            return f"{self.state.value}: {self._death}"
        return f"failed: status {self.exit_status}" if self.state is State.FAILED else self.state.value

    @property
    def pid(self) -> int | None:
        """Process ID of its `immortal run`; None if it does not run."""
        return None if self._process is None else self._process.pid

    @property
    def runs(self) -> bool:
        """True if its `immortal run` lives, or is about to be started again."""
        return self._process is not None or self._restart is not None

    def start(self, *, with_class: bool = True) -> None:
        """Start `immortal run` for the service. ``with_class``: with the project's class, not that of the last run.
        Raises OSError."""
        argv = command(self._project, "run", self.name, *((self.service.app,) if with_class else ()))
        argv += ["--restart", "--interactive" if self._interactive else "--no-interactive"]
        environment = {**self._project.environment(self.service.environment), "PYTHONUNBUFFERED": "1"}
        if self._simulates_effects and self.service.effects:
            environment[EFFECTS_VARIABLE] = msgspec.json.encode(self.service.effects).decode()
        if self._debugpy is not None:
            environment[DEBUGPY_VARIABLE] = str(self._debugpy)
        self._stop_requested, self.exit_status = False, None
        self._started_s, self._was_ready = time.monotonic(), False
        self._exited = asyncio.get_running_loop().create_future()
        # preexec_fn makes only system calls, so that a lock held by another thread does no harm.
        process = self._process = subprocess.Popen(
            argv,
            cwd=self._project.folder,
            env=environment,
            stdin=subprocess.PIPE if self._interactive else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,  # Ctrl-C in a terminal reaches us alone
            preexec_fn=die_with_parent(os.getpid()),
        )
        assert process.stdout is not None
        assert process.stderr is not None
        readers = [
            _LineReader(process.stdout, partial(self._sink.write_line, self.name), self._on_app_question),
            _LineReader(process.stderr, self._emit_coordinator_line, None),
        ]
        loop = asyncio.get_running_loop()
        death = os.pidfd_open(process.pid)

        def collect() -> None:
            loop.remove_reader(death)
            os.close(death)
            status = process.wait()
            for reader in readers:
                reader.end()
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()
            self._on_exit(status)

        loop.add_reader(death, collect)
        self._set_state(State.STARTING)

    def stop(self) -> None:
        """Request a clean stop; a second call ends the service at once. :meth:`wait` waits for the end."""
        if self._process is not None:
            self._stop_requested = True
            self._process.send_signal(signal.SIGTERM)
            self._set_state(State.STOPPING)
        elif self._restart is not None:
            self._restart.cancel()
            self._restart = None
            self._set_state(State.STOPPED)

    async def wait(self) -> int | None:
        """Wait for the end of `immortal run`; return its exit status, None if it was never started."""
        return None if self._exited is None else await asyncio.shield(self._exited)

    def _on_exit(self, status: int) -> None:
        self._process = None
        self.exit_status = status
        if status < 0 and not self._stop_requested:
            pause_s = self._pause.next_pause_s(time.monotonic() - self._started_s, recovered=self._was_ready)
            self._death = f"'immortal run' died: {ProcessExit(Role.COORDINATOR, 0, status)}"
            self._sink.write_line(self.name, f"{self._death}; restarting it  pause_s={pause_s:g}", "error")
            self._restart = asyncio.get_running_loop().call_later(pause_s, self._start_again)
            self._set_state(State.RESTARTING)
        else:
            self._set_state(State.STOPPED if status == 0 or self._stop_requested else State.FAILED)
        self._sink.on_ended(self.name, self.state_text)
        if self._exited is not None:
            self._exited.set_result(status)

    def _start_again(self) -> None:
        try:
            control.refuse_running(self._project.home / self.name)  # its child processes may still be dying
            self._restart = None
            self.start(with_class=False)  # an upgrade may have changed it
        except (OSError, control.RunningError):
            self._restart = asyncio.get_running_loop().call_later(RESTART_BACKOFF_S_MIN, self._start_again)

    def _set_state(self, state: State) -> None:
        if state is not self.state:
            self.state, self.since_s = state, time.time()
            self._sink.on_changed()

    def _on_app_question(self, text: str) -> None:
        self._sink.add_question(self.name, text, self._answer)

    def _answer(self, text: str) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):  # it has just ended
                os.write(self._process.stdin.fileno(), f"{text}\n".encode())

    def _emit_coordinator_line(self, text: str) -> None:
        parsed = _LINE.fullmatch(text)
        if parsed is None or parsed["name"] != self.name:
            self._sink.write_line(self.name, text)
            return
        level: Level = parsed["level"]  # type: ignore[assignment]  # one of them, by the pattern
        self._sink.write_line(self.name, (parsed["sign"] + parsed["text"]).lstrip(" "), level, parsed["clock"])
        if parsed["sign"] == "> ":
            return
        said = parsed["text"]
        if self.state is State.STOPPING:
            return
        if said == "ready":
            self._was_ready = True
            self._set_state(State.READY)
        elif said.startswith(("the app died", "the app left", "the coordinator died", "restarting")):
            self._set_state(State.RESTARTING)
            if self._interactive:
                self._sink.on_ended(self.name, self.state_text)  # nobody answers what a dead app has asked


class _LineReader:
    """Reader of a pipe: calls ``on_line`` with each line, and ``on_question`` with a text that stays without an end of
    line."""

    def __init__(
        self, pipe: IO[bytes], on_line: Callable[[str], None], on_question: Callable[[str], None] | None
    ) -> None:
        self._pipe = pipe
        self._on_line = on_line
        self._on_question = on_question
        self._rest = b""
        self._question_timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        os.set_blocking(pipe.fileno(), False)
        self._loop.add_reader(pipe.fileno(), self._read)

    def _read(self) -> bool:
        """Read once; return True if there may be more data."""
        if self._question_timer is not None:
            self._question_timer.cancel()
            self._question_timer = None
        try:
            data = os.read(self._pipe.fileno(), _READ_SIZE_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._loop.remove_reader(self._pipe.fileno())
            return False
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._on_line(_text(line))
        if len(self._rest) > LINE_SIZE_BYTES_MAX:
            self._on_line(_text(self._rest))
            self._rest = b""
        if self._rest and self._on_question is not None:
            self._question_timer = self._loop.call_later(QUESTION_AFTER_S, self._emit_question)
        return True

    def _emit_question(self) -> None:
        self._question_timer = None
        text, self._rest = _text(self._rest), b""
        assert self._on_question is not None
        self._on_question(text)

    def end(self) -> None:
        """Pass on the rest of the pipe of an ended process, and close the pipe."""
        while self._read():
            pass
        self._loop.remove_reader(self._pipe.fileno())
        self._pipe.close()
        if self._question_timer is not None:
            self._question_timer.cancel()
        if self._rest:
            self._on_line(_text(self._rest))


def _text(line: bytes) -> str:
    return line.decode("utf-8", "replace").rstrip("\r")


async def stop_all(members: Iterable[ServiceProcess]) -> None:
    """Stop services cleanly, all at the same time. A second stop() of one of them ends it at once."""
    running = [member for member in members if member.runs]
    for member in running:
        member.stop()
    for member in running:
        await member.wait()


def register(registry: Registry, service: ServiceSpec) -> str:
    """Register ``service``, or update its registered settings by the project; return a text about the change, or "".

    Settings that the project does not mention stay as they are. Raises ConfigError, RegistryError.
    """
    given = dict(service.settings)
    peer = given.pop("peer", PEER_DEFAULT)
    if service.name not in registry.names():
        settings = registry.register(service.name, peer, with_log_key=True, app=service.app, **given)
        keys.create(settings.folder)
        own_logs.OwnLogs(settings.folder).create()
        return f"registered, peers at {settings.peer}"
    address = split_tcp(peer)
    if address is None or address[1] or (split_tcp(registry.load(service.name).peer) or ("",))[0] != address[0]:
        given["peer"] = peer
    changed = _update(registry, service.name, given)
    return f"its settings have changed: {', '.join(changed)}" if changed else ""


def _update(registry: Registry, name: str, given: Mapping[str, Any]) -> list[str]:
    """Change the settings of ``given`` that differ in the settings file; return their names."""
    import tomlkit  # here: few commands write settings

    path = registry.path(name)
    with registry.locked():
        values, _ = read_toml(path)
        changed = {key: value for key, value in given.items() if values.get(key) != value}
        if not changed:
            return []
        if str(changed.get("peer", "")).endswith(":*"):
            raise ConfigError(
                f"{name!r} is registered at {values.get('peer')}, but the project sets {changed['peer']}: give its"
                f" port, or 'immortal unregister {name}' first"
            )
        document = tomlkit.parse(path.read_text("utf-8"))
        for key, value in changed.items():
            document[key] = value
        text = tomlkit.dumps(document)
        check_settings(values | changed, name, path, text)
        write_atomically(path, text.encode(), mode=stat.S_IMODE(path.stat().st_mode))
    return sorted(changed)


_STOP_TIMEOUT_S = round(CLEAN_STOP_S + 2 * STOP_GRACE_S + 5)  # longer than a supervisor's longest stop
_FOR_GOOD = (STATUS_FENCED, STATUS_HANDLER_FAILED)  # a start would end in the same


def units(project: Project, services: Sequence[ServiceSpec], *, for_user: bool = False) -> dict[str, str]:
    """Return the texts of the unit files by name. ``for_user``: for a user's own systemd. Raises ConfigError."""
    name = project.name()
    target = f"immortal-{name}.target"
    wanted_by = "default.target" if for_user else "multi-user.target"
    texts = {target: f"[Unit]\nDescription=All services of {_plain(name)}\n\n[Install]\nWantedBy={wanted_by}\n"}
    for service in services:
        texts[f"immortal-{name}-{service.name}.service"] = _service(project, service, target, for_user=for_user)
    return texts


def _service(project: Project, service: ServiceSpec, target: str, *, for_user: bool) -> str:
    argv = command(project, "run", service.name, "--restart")  # the class is the registered one: an upgrade changes it
    environment = {"PYTHONUNBUFFERED": "1", **service.environment}
    lines = [
        "[Unit]",
        f"Description={_plain(service.name)} of {_plain(project.name())}, kept by Immortal",
        f"PartOf={target}",
        *(() if for_user else ("After=network-online.target", "Wants=network-online.target")),
        "",
        "[Service]",
        "Type=exec",
        *(() if for_user else (f"User={getpass.getuser()}",)),
        f"WorkingDirectory={_plain(str(project.folder))}",
        *(f"Environment={_quoted(f'{key}={text}')}" for key, text in environment.items()),
        f"ExecStart={' '.join(map(_quoted_argument, argv))}",
        "# Takes a checkpoint, then restarts with the current code.",
        "ExecReload=/bin/kill -USR1 $MAINPID",
        "# Only the supervisor gets the signal: it stops its coordinator, which takes a checkpoint and stops the app.",
        "KillMode=mixed",
        f"TimeoutStopSec={_STOP_TIMEOUT_S}",
        "Restart=on-failure",
        "RestartSec=1",
        f"RestartPreventExitStatus={' '.join(map(str, _FOR_GOOD))}",
        "",
        "[Install]",
        f"WantedBy={target}",
    ]
    return "\n".join(lines) + "\n"


def _plain(text: str) -> str:
    return text.replace("%", "%%").replace("\n", " ")


def _quoted(text: str) -> str:
    """Quote ``text`` as one word of a line of a unit file."""
    escaped = _plain(text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n"))
    return f'"{escaped}"'


def _quoted_argument(text: str) -> str:
    """Quote ``text`` as an argument of a command, in which $ stands for variables."""
    quoted = _quoted(text).replace("$", "$$")
    is_plain = quoted[1:-1] == text and text.replace("/", "").replace("-", "").replace(".", "").isalnum()
    return text if is_plain else quoted
