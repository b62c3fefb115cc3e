"""A forked process sees what one that starts anew sees, is a child like it, and can be killed like it."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from immortal.coordinator.service.process import die_with_parent
from tests.faults.shims import library
from tests.helpers.fork_server import EXEC_VARIABLE

# A user's module that a command imports: it tells all that its process has of its parent.
SURROUNDINGS = """
import ctypes, json, os, resource, signal, sys, threading
from pathlib import Path

def target(number):
    name = os.readlink(f"/proc/self/fd/{number}")
    return name.partition(":")[0] if ":" in name else name

death_signal = ctypes.c_int()
ctypes.CDLL(None).prctl(2, ctypes.byref(death_signal))  # PR_GET_PDEATHSIG
told = {
    "is_fork": "immortal.cli" in sys.modules,  # no other process of this command imports it
    "death_signal": death_signal.value,
    "argv": sys.argv[1:],
    "orig_argv": sys.orig_argv,
    "cmdline": Path("/proc/self/cmdline").read_bytes().rstrip(b"\\0").decode().split("\\0"),
    "shown": sorted(Path("/proc/self/environ").read_bytes().rstrip(b"\\0").decode().split("\\0")),
    "name": sys.modules["__main__"].__spec__.name,
    "path": sys.path,
    "environment": dict(os.environ),
    "folder": os.getcwd(),
    "parent": os.getppid(),
    "leads_session": os.getsid(0) == os.getpid(),
    "leads_group": os.getpgid(0) == os.getpid(),
    "session": os.getsid(0),
    "files": {number: target(number) for number in (0, 1, 2)},
    "passed": {number: target(number) for number in json.loads(os.environ["PASSED"])},
    "umask": os.umask(0),
    "limit": resource.getrlimit(resource.RLIMIT_NOFILE),
    "ignored": sorted(number for number in signal.valid_signals() if signal.getsignal(number) == signal.SIG_IGN),
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    "interrupts": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    "terminates": signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
    "processors": sorted(os.sched_getaffinity(0)),
    "threads": threading.active_count(),
    "main_thread": threading.current_thread() is threading.main_thread(),
    "writes_bytecode": not sys.dont_write_bytecode,
    "line_buffered": [stream.line_buffering for stream in (sys.stdin, sys.stdout, sys.stderr)],
    "write_through": [stream.write_through for stream in (sys.stdout, sys.stderr)],
    "errors": [stream.errors for stream in (sys.stdin, sys.stdout, sys.stderr)],
    "encoding": [stream.encoding for stream in (sys.stdin, sys.stdout, sys.stderr)],
}
Path(os.environ["TOLD"]).write_text(json.dumps(told))
if os.environ.get("WAITS"):
    signal.pause()
"""
STARTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "in a new session": {"start_new_session": True},
    "in a group of its own": {"process_group": 0},
    "with its parent": {"preexec_fn": die_with_parent(os.getpid())},
    "without input": {"stdin": subprocess.DEVNULL},
    "with pipes": {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT},
}


@pytest.fixture(autouse=True)
def forks() -> None:
    if not hasattr(subprocess.Popen._execute_child, "forks"):  # type: ignore[attr-defined]
        pytest.skip("this machine, or IMMORTAL_TEST_EXEC, has each process start anew")


def start(folder: Path, *, anew: bool, environment: dict[str, str], **options: Any) -> subprocess.Popen[bytes]:
    (folder / "surroundings.py").write_text(SURROUNDINGS)
    command = [sys.executable, "-P", "-m", "immortal.appsdk.running.listing", "surroundings"]
    told = {"TOLD": str(folder / ("anew" if anew else "forked")), "PASSED": "[]", "PYTHONPATH": str(folder)}
    given = {**os.environ, "PYTHONHASHSEED": "0", **told, **environment, **({EXEC_VARIABLE: "1"} if anew else {})}
    return subprocess.Popen(command, cwd=folder, env=given, **options)


def surroundings(folder: Path, *, anew: bool, expects_anew: bool = False, **options: Any) -> dict[str, Any]:
    environment = options.pop("environment", {})
    process = start(folder, anew=anew, environment=environment, **options)
    process.communicate(timeout=60)
    assert process.returncode == 0
    found: dict[str, Any] = json.loads((folder / ("anew" if anew else "forked")).read_text())
    is_fork = found.pop("is_fork")
    assert is_fork != (anew or expects_anew), "it is started in the other way"
    found["shown"] = [one for one in found["shown"] if not one.startswith(("TOLD=", EXEC_VARIABLE))]
    for name in ("TOLD", EXEC_VARIABLE, "LC_CTYPE"):
        found["environment"].pop(name, None)
    return found


@pytest.fixture
def unusual() -> Iterator[None]:
    """A parent with a limit, a mask, an ignored and a blocked signal, and one processor."""
    limit, mask, before = resource.getrlimit(resource.RLIMIT_NOFILE), os.umask(0o027), os.sched_getaffinity(0)
    ignored = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit[0] - 1, limit[1]))
    os.sched_setaffinity(0, {min(before)})
    yield
    os.sched_setaffinity(0, before)
    resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    signal.signal(signal.SIGUSR2, ignored)
    os.umask(mask)


@pytest.mark.parametrize("options", STARTS.values(), ids=STARTS.keys())
def test_it_sees_what_one_that_starts_anew_sees(tmp_path: Path, options: dict[str, Any]) -> None:
    forked = surroundings(tmp_path, anew=False, **options)
    anew = surroundings(tmp_path, anew=True, **options)
    assert forked["parent"] == os.getpid()
    for found in (forked, anew):
        if found["leads_session"]:
            del found["session"]
    assert forked == anew


@pytest.mark.usefixtures("unusual")
def test_it_has_what_its_parent_has(tmp_path: Path) -> None:
    assert surroundings(tmp_path, anew=False) == surroundings(tmp_path, anew=True)


@pytest.mark.parametrize("variable", ["PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE"])
@pytest.mark.parametrize("value", ["", "1"])
def test_variables_that_python_reads_at_the_start(tmp_path: Path, variable: str, value: str) -> None:
    environment = {variable: value}
    forked = surroundings(tmp_path, anew=False, environment=environment)
    assert forked == surroundings(tmp_path, anew=True, environment=environment)


def test_a_library_before_libc(tmp_path: Path) -> None:
    environment = {"LD_PRELOAD": library("clock_shim")}
    forked = surroundings(tmp_path, anew=False, environment=environment)
    assert forked == surroundings(tmp_path, anew=True, environment=environment)


def test_descriptors_are_passed_under_their_numbers(tmp_path: Path) -> None:
    read, write = os.pipe()
    environment = {"PASSED": json.dumps([read, write])}
    try:
        given: dict[str, Any] = {"environment": environment, "pass_fds": (read, write)}
        assert surroundings(tmp_path, anew=False, **given) == surroundings(tmp_path, anew=True, **given)
    finally:
        os.close(read)
        os.close(write)


def test_it_is_killed_and_collected(tmp_path: Path) -> None:
    process = start(tmp_path, anew=False, environment={"WAITS": "1"})
    process.kill()
    assert process.wait(60) == -signal.SIGKILL


@pytest.mark.parametrize("environment", [{"PYTHONHASHSEED": "7"}, {"PYTHONWARNINGS": "error"}, {"TZ": "Asia/Tokyo"}])
def test_variables_that_a_fork_cannot_follow(tmp_path: Path, environment: dict[str, str]) -> None:
    found = surroundings(tmp_path, anew=False, expects_anew=True, environment=environment)
    assert environment.items() <= found["environment"].items()


def test_a_function_to_call_before_the_start(tmp_path: Path) -> None:
    found = surroundings(tmp_path, anew=False, expects_anew=True, preexec_fn=lambda: os.nice(0))
    assert found["parent"] == os.getpid()


def test_a_sitecustomize(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os\nos.environ['SEEN'] = 'yes'\n")
    assert surroundings(tmp_path, anew=False, expects_anew=True)["environment"]["SEEN"] == "yes"
