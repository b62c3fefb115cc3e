"""Server that forks processes of ``python -m immortal...``: one that has imported all modules already, instead of each.

Thousands of processes start in a run of the tests, and most of the run's processor time was their imports. The
processes are real ones: each has its own arguments, environment, folder, descriptors, signals and process group, is a
child of whoever called :class:`subprocess.Popen`, and can be killed. Only what happens before ``main`` is not repeated.
The scripts of the examples and some other modules are forked too, for the processes that they start.

It is for Linux on x86-64. A start that it cannot repeat exactly, such as that of another Python, of ``-c`` or of a
function to call before the start, is an ordinary one. With IMMORTAL_TEST_EXEC=1 all of them are. A library to be loaded
before libc (LD_PRELOAD) gets a server of its own.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib
import io
import os
import pickle
import pkgutil
import platform
import resource
import runpy
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

EXEC_VARIABLE = "IMMORTAL_TEST_EXEC"

_PRELOADED = ("cli", "coordinator", "appsdk", "presenters", "protocol", "replay", "web")
# The last one imports pytest, which no process does that is not a test.
_NOT_PRELOADED = ("immortal.appsdk.integrations", "immortal.appsdk.embedded", "immortal.appsdk.testing")
_THREADED = ("numpy", "pandas", "pyarrow", "pyspark")  # their import starts threads, and what forks may have only one
# Python reads these before main, or our modules when they are imported.
_EARLY = ("PYTHON", "LC_", "LANG", "LD_", "MALLOC_", "IMMORTAL_PURE_PYTHON", "TZ")
_HANDLED = frozenset(
    {"PYTHONBREAKPOINT", "PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "PYTHONHASHSEED"}
)
_LIMITS = (
    resource.RLIMIT_NOFILE,
    resource.RLIMIT_CORE,
    resource.RLIMIT_FSIZE,
    resource.RLIMIT_AS,
    resource.RLIMIT_DATA,
)
_MODULES = ("immortal", "scripts.benchmarks", "tests.faults", "tests.soak", "uvicorn")
_PRELOAD = "LD_PRELOAD"
_EXAMPLES = Path(__file__).parents[2] / "examples"
_REQUEST_BYTES_MAX = 1 << 20
_DESCRIPTORS_MAX = 64
_COMMAND_BYTES_MAX, _ENVIRONMENT_BYTES_MAX = 4_000, 16_000
_OWN_DESCRIPTORS = 900  # and above
# By the locale, which is the same for a process that is forked.
_STREAMS = [(stream.encoding, stream.errors) for stream in (sys.__stdin__, sys.__stdout__, sys.__stderr__) if stream]

_CLONE = 56  # the system call's number on x86-64; so are the next two
_SET_ROBUST_LIST, _GET_ROBUST_LIST = 273, 274
_CLONE_PARENT, _CLONE_CHILD_CLEARTID, _CLONE_CHILD_SETTID = 0x8000, 0x200000, 0x1000000
_PR_SET_PDEATHSIG, _PR_GET_TID_ADDRESS = 1, 40

_LIBC = ctypes.PyDLL(None, use_errno=True)  # its calls keep the GIL: no other thread runs around a fork


class Request(NamedTuple):
    """What a new process has of its parent, and of the call of Popen."""

    argv: list[str]
    environment: dict[str, str]
    folder: str
    descriptors: list[int]  # numbers in the new process of those that come along
    ignored: list[int]
    blocked: list[int]
    limits: list[tuple[int, tuple[int, int]]]
    processors: set[int]
    umask: int
    new_session: bool
    process_group: int
    dies_with: int | None
    takes_terminal: bool


class Origin(NamedTuple):
    """Properties that a forked process has of the server, and that must be the parent's."""

    pid: int
    session: int
    process_group: int
    network: str
    user: int

    @classmethod
    def of_this_process(cls) -> Origin:
        network = os.readlink("/proc/thread-self/ns/net")
        return cls(os.getpid(), os.getsid(0), os.getpgid(0), network, os.geteuid())


# --- in the process that starts others --------------------------------------------------------------------------------


class Client:
    """Starts processes at a server that is a child of this process. ``environment``: of servers that it may start."""

    def __init__(self, server: socket.socket, early: dict[str, str], environment: dict[str, str] | None = None) -> None:
        self._early = early
        self._environment = environment
        self._servers = {early.get(_PRELOAD): server}
        self._origin = Origin.of_this_process()
        self._lock = threading.Lock()

    def install(self) -> None:
        """Let :class:`subprocess.Popen` start what the server can start."""
        execute = subprocess.Popen._execute_child  # type: ignore[attr-defined]

        def execute_child(process: Any, args: Any, executable: Any, preexec_fn: Any, *more: Any) -> None:
            close_fds, pass_fds, cwd, env, _, _, shell, *rest = more
            *pipes, _, gid, gids, uid, umask, new_session, process_group = rest
            first = _Preparation.of(preexec_fn)
            plain = not (executable or shell or gids) and close_fds and gid is uid is None and umask < 0
            environment = dict(os.environ if env is None else env)
            if plain and first is not None and (server := self._server_for(args, environment)):
                request = Request(
                    argv=list(map(os.fspath, args)),
                    environment=environment,
                    folder=os.path.abspath(cwd or "."),
                    descriptors=[0, 1, 2, *pass_fds],
                    ignored=[number for number in signal.valid_signals() if signal.getsignal(number) == signal.SIG_IGN],
                    blocked=[*signal.pthread_sigmask(signal.SIG_BLOCK, ()), *first.blocked],
                    limits=[(limit, resource.getrlimit(limit)) for limit in _LIMITS],
                    processors=os.sched_getaffinity(0),
                    umask=_umask(),
                    new_session=bool(new_session),
                    process_group=process_group,
                    dies_with=first.dies_with,
                    takes_terminal=first.takes_terminal,
                )
                reads, writes, errors = pipes[0], pipes[3], pipes[5]
                std = [own if own >= 0 else number for number, own in enumerate((reads, writes, errors))]
                pid = self._start(server, request, [*std, *pass_fds])
                if pid is not None:
                    process.pid, process._child_created = pid, True
                    process._close_pipe_fds(*pipes)
                    return
            execute(process, args, executable, preexec_fn, *more)

        execute_child.forks = True  # type: ignore[attr-defined]
        subprocess.Popen._execute_child = execute_child  # type: ignore[attr-defined]

    def _server_for(self, args: Any, environment: Mapping[str, str]) -> socket.socket | None:
        """Return the server that can start that command, if there is one."""
        if not isinstance(args, (list, tuple)) or not all(isinstance(word, str) for word in args):
            return None
        preloaded = environment.get(_PRELOAD)
        can_start = (
            _program_of(args) is not None
            and not environment.get(EXEC_VARIABLE)
            and len("\0".join(args).encode()) < _COMMAND_BYTES_MAX
            and environment.get("PYTHONHASHSEED", "0") == "0"
            and early_of({**environment, _PRELOAD: ""}) == early_of({**self._early, _PRELOAD: ""})
            and not any(Path(path, "sitecustomize.py").exists() for path in _paths_of(environment))
            and Origin.of_this_process() == self._origin
        )
        if not can_start:
            return None
        may_add = threading.current_thread() is threading.main_thread()  # a server dies with the thread that started it
        if preloaded and preloaded not in self._servers and self._environment is not None and may_add:
            self._servers[preloaded] = _server({**self._environment, _PRELOAD: preloaded})
        return self._servers.get(preloaded)

    def _start(self, server: socket.socket, request: Request, descriptors: list[int]) -> int | None:
        message = pickle.dumps(tuple(request))
        if len(message) > _REQUEST_BYTES_MAX or len(descriptors) > _DESCRIPTORS_MAX:
            return None
        with self._lock:
            try:
                socket.send_fds(server, [len(message).to_bytes(4, "little")], descriptors)
                server.sendall(message)
                answer = server.recv(4)
            except OSError:  # a closed standard stream, or a server that was killed
                return None
        return int.from_bytes(answer, "little") or None


def _program_of(args: Sequence[str]) -> str | None:
    """Return the module, or the example's script, that a command starts in this same Python; None if it is another."""
    words = list(args)
    if not words or words.pop(0) != sys.executable:
        return None
    if words[:1] == ["-P"]:
        words.pop(0)
    if words[:1] == ["-m"]:
        return words[1] if len(words) > 1 and words[1].startswith(_MODULES) else None
    return words[0] if words and Path(words[0]).is_relative_to(_EXAMPLES) else None


class _Preparation(NamedTuple):
    """What a ``preexec_fn`` does."""

    dies_with: int | None = None
    blocked: tuple[signal.Signals, ...] = ()
    takes_terminal: bool = False

    @classmethod
    def of(cls, preexec_fn: Any) -> _Preparation | None:
        """Return what the function does, or None if it is not a known one."""
        if preexec_fn is None:
            return cls()
        if preexec_fn is take_terminal:
            return cls(takes_terminal=True)
        named = dict(zip(preexec_fn.__code__.co_freevars, preexec_fn.__closure__ or (), strict=True))
        match preexec_fn.__qualname__:
            case "die_with_parent.<locals>.arrange":
                return cls(dies_with=named["parent_pid"].cell_contents)
            case "TerminalStdin.spawn_options.<locals>.arrange":
                inner = cls.of(named["with_parent"].cell_contents)
                return inner and inner._replace(blocked=(signal.SIGINT,))
        return None


def take_terminal() -> None:
    """Make the terminal at stdin the controlling one of this process, which has a new session."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def early_of(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what Python and our modules read before ``main``."""
    return {name: environment[name] for name in environment if name.startswith(_EARLY) and name not in _HANDLED}


def _paths_of(environment: Mapping[str, str]) -> list[str]:
    return [os.path.abspath(path) for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]


def _umask() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1], 8) for line in lines if line.startswith("Umask:"))


def start() -> None:
    """Start the server of this process, and let Popen use it, where the machine permits that."""
    if os.environ.get(EXEC_VARIABLE) or sys.platform != "linux" or platform.machine() != "x86_64" or _TID is None:
        return
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    environment.pop("PYTHONPATH", None)
    Client(_server(environment), early_of(os.environ), environment).install()


def _server(environment: dict[str, str]) -> socket.socket:
    """Start a server; return the way to it."""
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-P", __file__, str(theirs.fileno()), " " * _COMMAND_BYTES_MAX]
        room = {"ROOM": " " * _ENVIRONMENT_BYTES_MAX}
        subprocess.Popen(command, pass_fds=[theirs.fileno()], env={**environment, **room})
    return ours


# --- in the server ----------------------------------------------------------------------------------------------------


def _tid_address() -> int | None:
    """Return where libc keeps its thread's ID, which a fork has to set."""
    address = ctypes.c_void_p()
    if sys.platform != "linux" or _LIBC.prctl(_PR_GET_TID_ADDRESS, ctypes.byref(address), 0, 0, 0) or not address.value:
        return None
    return address.value


_TID = _tid_address()


def fork_sibling() -> int:
    """Fork as :func:`os.fork` does, but as a child of this process's parent. For a process with one thread.

    libc has no such call. Like libc's fork, it lets the kernel set the thread's ID, and registers the list of robust
    mutexes, which LMDB's lock is one of.
    """
    head, size = ctypes.c_void_p(), ctypes.c_size_t()
    _LIBC.syscall(_GET_ROBUST_LIST, 0, ctypes.byref(head), ctypes.byref(size))
    flags = _CLONE_PARENT | _CLONE_CHILD_SETTID | _CLONE_CHILD_CLEARTID | signal.SIGCHLD
    ctypes.pythonapi.PyOS_BeforeFork()
    pid = int(_LIBC.syscall(ctypes.c_long(_CLONE), ctypes.c_long(flags), None, None, ctypes.c_void_p(_TID), None))
    if pid == 0:
        _LIBC.syscall(_SET_ROBUST_LIST, head, size)
        ctypes.pythonapi.PyOS_AfterFork_Child()
    else:
        ctypes.pythonapi.PyOS_AfterFork_Parent()
    return pid


def _preload() -> None:
    sys.modules.update(dict.fromkeys(_THREADED))  # type: ignore[arg-type]  # what imports them is not preloaded
    for room in _PRELOADED:
        package = importlib.import_module(f"immortal.{room}")
        for module in pkgutil.walk_packages(package.__path__, f"immortal.{room}."):
            if not module.name.endswith("__main__") and not module.name.startswith(_NOT_PRELOADED):
                try:
                    importlib.import_module(module.name)
                except ImportError:  # also of an extra that is not installed
                    continue
    for name in _THREADED:
        del sys.modules[name]
    assert len(os.listdir("/proc/self/task")) == 1
    gc.collect()
    gc.freeze()  # a collection would touch, and so copy, the memory that all share


def _serve(server: socket.socket) -> tuple[Request, list[int]]:
    """Fork a process for each request, until the client is gone. Return in each new process, with its request."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nowhere, number)
    os.closerange(3, server.fileno())
    os.closerange(server.fileno() + 1, 1 << 12)
    while True:
        length, descriptors, _, _ = socket.recv_fds(server, 4, _DESCRIPTORS_MAX)
        if not length:
            os._exit(0)
        size, message = int.from_bytes(length, "little"), b""
        while len(message) < size:
            message += server.recv(size - len(message))
        pid = fork_sibling()
        if pid == 0:
            server.close()
            return Request(*pickle.loads(message)), descriptors
        server.sendall(max(pid, 0).to_bytes(4, "little"))
        for descriptor in descriptors:
            os.close(descriptor)


def _become(request: Request, descriptors: list[int]) -> None:
    """Take over all that a started process has of its parent, but for the process group."""
    above = 1 + max(*request.descriptors, *descriptors)
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, above) for descriptor in descriptors]
    for own, number in zip(moved, request.descriptors, strict=True):
        os.dup2(own, number)
    for descriptor in {*moved, *descriptors} - set(request.descriptors):
        os.close(descriptor)
    os.chdir(request.folder)
    os.umask(request.umask)
    os.environ.clear()
    os.environ.update(request.environment)
    if plan := os.environ.get("IMMORTAL_FAULT_POINTS"):
        _plant_faults(Path(plan))
    time.tzset()
    for limit, (soft, hard) in request.limits:
        resource.setrlimit(limit, (soft, hard))
    os.sched_setaffinity(0, request.processors)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for number in request.ignored:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, request.blocked)
    argv = request.argv
    _show(argv, request.environment)
    sys.orig_argv[:] = argv
    program = _program_of(argv)
    assert program is not None
    is_module = "-m" in argv[:3]
    sys.argv[:] = ["-m"] * is_module + argv[argv.index(program) + is_module :]  # runpy puts the file in the place of -m
    own = request.folder if is_module else os.path.dirname(program)
    sys.path[:0] = [*([] if "-P" in argv[:2] else [own]), *_paths_of(request.environment)]
    sys.dont_write_bytecode = bool(request.environment.get("PYTHONDONTWRITEBYTECODE"))
    unbuffered = bool(request.environment.get("PYTHONUNBUFFERED"))
    sys.stdin = sys.__stdin__ = _opened(0, unbuffered)  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = _opened(1, unbuffered)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _opened(2, unbuffered)  # type: ignore[misc]


def _plant_faults(plan: Path) -> None:
    """Arm the fault points, as their module and those that have its names do at their import."""
    points = sys.modules["immortal.coordinator.fault_points"]
    before, planned = points.reach, points._Plan(plan).reach
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})
        if names.get("reach") is before:
            names["reach"] = planned
            if "armed" in names:
                names["armed"] = True


def _opened(number: int, unbuffered: bool) -> Any:
    """Return a standard stream as Python opens it."""
    writes = number > 0
    binary = open(number, "wb" if writes else "rb", buffering=0 if unbuffered and writes else -1, closefd=False)  # noqa: SIM115
    encoding, errors = _STREAMS[number]
    return io.TextIOWrapper(
        binary,
        encoding,
        errors,
        newline="\n" if writes else None,
        line_buffering=not unbuffered and (number == 2 or binary.isatty()),
        write_through=unbuffered,
    )


def _show(argv: Sequence[str], environment: Mapping[str, str]) -> None:
    """Show arguments and environment in /proc, where a person or a test looks for a process."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    for place, words in ((45, argv), (47, [f"{name}={value}" for name, value in environment.items()])):
        begin, end = map(int, fields[place : place + 2])
        shown = b"\0".join(map(os.fsencode, words))
        ctypes.memset(begin, 0, end - begin)
        ctypes.memmove(begin, shown, min(len(shown), end - begin - 1))


def _socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return connected sockets whose descriptors nobody asks for by number."""
    pair = socket.socketpair()
    with pair[0], pair[1]:
        high = [socket.socket(fileno=fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, _OWN_DESCRIPTORS)) for one in pair]
    return high[0], high[1]


def main() -> None:
    server = socket.socket(fileno=int(sys.argv[1]))
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL.value, 0, 0, 0)
    _preload()
    early = early_of(os.environ)
    while True:
        request, descriptors = _serve(server)
        if request.new_session:
            os.setsid()
            if request.takes_terminal:
                fcntl.ioctl(descriptors[0], termios.TIOCSCTTY, 0)
        elif request.process_group >= 0:
            os.setpgid(0, request.process_group)
        if request.dies_with is not None:
            _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL.value, 0, 0, 0)
            if os.getppid() != request.dies_with:
                os._exit(1)
        program = _program_of(request.argv)
        if program == "immortal.appsdk" or "coordinator" in request.argv:
            ours = None  # apps and coordinators start nothing, as a rule
            break
        parent = os.getpid()
        ours, theirs = _socket_pair()
        if os.fork() == 0:  # the server of the new process
            _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL.value, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(0)
            ours.close()
            server = theirs
            continue
        theirs.close()
        break
    _become(request, descriptors)
    if ours is not None:
        adds = program == "tests.soak"  # its instances have disks that fail and clocks that jump
        Client(ours, early, {**os.environ, "PYTHONHASHSEED": "0"} if adds else None).install()
    assert program is not None
    if not hasattr(sys.modules.get(program), "__path__"):
        sys.modules.pop(program, None)  # it is to be __main__
    status: object = None
    try:
        if "-m" in request.argv[:3]:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(program, run_name="__main__")
    except SystemExit as end:
        status = end.code
    _exit(status)


def _exit(status: object) -> NoReturn:
    """End as Python does, but do not take all modules apart: that would copy the memory that all share."""
    if status is not None and not isinstance(status, int):
        print(status, file=sys.stderr)
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        status = 120
    sys.stderr.flush()
    os._exit((status or 0) & 0xFF)


if __name__ == "__main__":
    here = sys.modules["__main__"]  # kept, so that its globals stay
    main()
