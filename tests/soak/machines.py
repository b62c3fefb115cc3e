"""Machines for instances with a follower: a folder each, and where root allows it a network, a host name and process
IDs of their own, so that nobody sees by a process ID, or by a closed connection, what has become of another machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from immortal.coordinator.operator import control
from immortal.coordinator.service.process import die_with_parent
from tests.helpers import commands
from tests.soak.service import DEADLINE_S, SoakError, wait_for

REPOSITORY = Path(__file__).parents[2]
_LEFT_FOR = ("fenced by", "has no room", "has lost acknowledged input")
EXAMPLE = REPOSITORY / "examples" / "bank"


def has_rights() -> bool:
    """To have networks and mounts of one's own."""
    if os.geteuid() != 0:
        return False
    name = f"imm{os.getpid()}"
    for command in (["ip", "netns", "add", name], ["ip", "link", "add", name, "type", "bridge"]):
        try:
            if subprocess.run(command, capture_output=True, check=False).returncode:
                return False
        except FileNotFoundError:
            return False
        finally:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
            subprocess.run(["ip", "link", "delete", name], capture_output=True, check=False)
    return True


class Network:
    """One cable from each of ``names`` to a switch, which has an address on this machine. A context manager."""

    def __init__(self, names: list[str]) -> None:
        pid = os.getpid()
        self._net = f"10.{200 + (pid >> 8) % 50}.{pid % 256}"
        self._switch = f"imm{pid}"
        self._names = names
        self.address = f"{self._net}.1"
        self.hosts = [f"{self._net}.0/24"]

    def address_of(self, name: str) -> str:
        return f"{self._net}.{2 + self._names.index(name)}"

    def namespace(self, name: str) -> str:
        return f"{self._switch}-{name}"

    def _cable(self, name: str) -> str:
        return f"{self._switch}{name}"

    def __enter__(self) -> Network:
        try:
            _ip("link", "add", self._switch, "type", "bridge")
            _ip("address", "add", f"{self.address}/24", "dev", self._switch)
            _ip("link", "set", self._switch, "up")
            for name in self._names:
                inside, cable = self.namespace(name), self._cable(name)
                _ip("netns", "add", inside)
                _ip("link", "add", cable, "type", "veth", "peer", "name", "cable", "netns", inside)
                _ip("link", "set", cable, "master", self._switch, "up")
                _ip("-n", inside, "address", "add", f"{self.address_of(name)}/24", "dev", "cable")
                _ip("-n", inside, "link", "set", "cable", "up")
                _ip("-n", inside, "link", "set", "lo", "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in self._names:
            subprocess.run(["ip", "netns", "delete", self.namespace(name)], capture_output=True, check=False)
        subprocess.run(["ip", "link", "delete", self._switch], capture_output=True, check=False)

    def pull(self, name: str) -> None:
        _ip("link", "set", self._cable(name), "down")

    def plug(self, name: str) -> None:
        _ip("link", "set", self._cable(name), "up")


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SoakError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


class Machine:
    """``network``: it has a namespace there; None: it shares all but its folder with the others."""

    def __init__(self, name: str, folder: Path, home: str, network: Network | None, environment: Mapping[str, str]):
        self.name = name
        self.folder = folder / name
        self.folder.mkdir(mode=0o700)
        self.network = network
        self.address = network.address_of(name) if network else "127.0.0.1"
        self.environment = {
            **os.environ,
            "PYTHONPATH": f"{REPOSITORY}:{EXAMPLE}",
            "IMMORTAL_HOME": home,
            "IMMORTAL_LOCAL": str(self.folder),
            **environment,
        }
        self._inside: list[str] = []
        if network:
            named = ["sh", "-c", f'hostname {name}; exec "$@"', "sh"]
            spaces = ["unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
            self._inside = ["ip", "netns", "exec", network.namespace(name), *spaces, *named]

    def immortal(self, *arguments: str) -> str:
        done = commands.run(self.folder, *arguments, environment=self.environment)
        if done.returncode:
            raise SoakError(f"immortal {' '.join(arguments)}: status {done.returncode}: {done.stderr}")
        return done.stdout

    def run(self, arguments: list[str], output: Path) -> subprocess.Popen[bytes]:
        with output.open("ab") as file:
            return subprocess.Popen(
                [*self._inside, sys.executable, "-m", "immortal", *arguments],
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                process_group=0,
                preexec_fn=die_with_parent(os.getpid()),
            )


class Placed:
    """One instance on one machine: it has the log, or follows it."""

    def __init__(self, name: str, app: str, machine: Machine, peer: str) -> None:
        self.name, self.machine, self.peer = name, machine, peer
        self._command = ["run", name, app, "--peer", peer, "--restart", "--log-format", "json"]
        self.output = machine.folder / f"{name}.lines"
        self._process: subprocess.Popen[bytes] | None = None
        self._is_told_to_end = False
        self.ends: list[str] = []  # of `immortal run` itself, which a machine's supervisor would start again

    def start(self) -> None:
        self._is_told_to_end = False
        self._process = self.machine.run(self._command, self.output)

    def keep_up(self) -> None:
        """Start it again where it has ended by itself."""
        if self._process is not None and self._process.poll() is not None and not self._is_told_to_end:
            self.ends.append(f"{self.name} on {self.machine.name}: status {self._process.returncode}\n{self.tail(3)}")
            self.start()

    def knows_standbys(self) -> bool:
        """Return whether this holder of a log knows of a standby, to which it would hand over in place of a last
        checkpoint. It reads the list as it renews its lease."""
        return bool(control.query(self.machine.folder / self.name, "status", 5.0)["standbys"])

    def kill(self) -> None:
        """kill -9 of all its processes. None is left."""
        processes = self._processes()
        for pid in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self._process is not None:
            self._process.wait()
        self._process = None
        wait_for(lambda: not any(map(_lives, processes)), lambda: f"{self.name} has ended: {processes}")

    def signal(self, number: signal.Signals) -> None:
        """To all its processes."""
        for pid in self._processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def terminate(self) -> None:
        """SIGTERM to `immortal run`. Where a machine has process IDs of its own, it is not the first process."""
        self._is_told_to_end = True
        below = self._processes()[1:] if self.machine.network else self._processes()
        for pid in [pid for pid in below if b"-m\0immortal\0run\0" in _command_line(pid)][:1]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    def wait(self) -> None:
        """Until it has ended, cleanly. Raises SoakError."""
        if self._process is None:
            return
        where = f"{self.name} on {self.machine.name}"
        try:
            status = self._process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise SoakError(f"{where} did not stop within {DEADLINE_S:g} s\n{self.tail()}") from None
        self._process = None
        if status:
            raise SoakError(f"{where} ended with status {status}\n{self.tail()}")

    def end(self) -> None:
        with contextlib.suppress(SoakError):
            self.kill()

    def _processes(self) -> list[int]:
        """Its first one, and all below it, parents first."""
        return [] if self._process is None else _below(self._process.pid)

    def messages(self) -> list[str]:
        found = []
        for line in self.output.read_text(errors="replace").splitlines() if self.output.exists() else ():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                found.append(str(json.loads(line)["message"]))
        return found

    def lost_count(self) -> int:
        """How often it has said why it left its log: another has it, the database has no room, or has lost input."""
        return sum(any(reason in message for reason in _LEFT_FOR) for message in self.messages())

    def said_lost_count(self) -> int:
        """How often it has said that the database lacks what was acknowledged."""
        return sum(_LEFT_FOR[-1] in message for message in self.messages())

    def tail(self, count: int = 12) -> str:
        lines = self.output.read_text(errors="replace").splitlines() if self.output.exists() else []
        return "\n".join(f"    {line}" for line in lines[-count:])


def _below(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            parent = int((folder / "stat").read_bytes().rpartition(b")")[2].split()[1])
            children.setdefault(parent, []).append(int(folder.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found


def _lives(pid: int) -> bool:
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    return False


def _command_line(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""
