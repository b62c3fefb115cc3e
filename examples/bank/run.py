"""Many transfers between three banks, while their processes are killed one after another; then every coin is counted.

    python examples/bank/run.py [--transfers N] [--kills N] [--seed S] [--keep FOLDER]

Twelve processes: three banks and a teller, each an app and its coordinator under `immortal run --restart`. Any of them
is killed, the supervisors too; those are started again by this program. Kills are drawn by seed over the number of
transfers that are settled.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import bank
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

POLL_S = 0.02
STALLED_S = 60.0  # nothing has moved for so long: give up
STOP_S = 60.0
TELLER = "teller"
APPS = dict.fromkeys(bank.BANKS, "bank:Bank") | {TELLER: "bank:Teller"}
APP, COORDINATOR, SUPERVISOR = "app", "coordinator", "supervisor"
ROLES = (APP, COORDINATOR, SUPERVISOR)
REGISTRY_NAME = "registry"
console = Console()


class RunError(Exception):
    """The run cannot go on; the text says why."""


# --- one instance under its supervisor -------------------------------------------------------------------------------


@dataclass
class Instance:
    """A supervisor with its two processes. What they print goes to a file; what is needed of it is remembered."""

    name: str
    home: Path
    environment: Mapping[str, str]
    settled: int = 0
    error: str | None = None
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=12))
    _pids: dict[str, int] = field(default_factory=dict)
    _started: threading.Event = field(default_factory=threading.Event)  # this life of the supervisor
    _readers: list[threading.Thread] = field(default_factory=list)

    def start(self) -> None:
        self._pids = {}
        self._started = threading.Event()
        self.supervisor = subprocess.Popen(
            [*immortal(self.home), "run", self.name, APPS[self.name], "--restart", "--log-format", "json"],
            cwd=Path(__file__).parent,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            process_group=0,
        )
        for work in (self._read_output, self._read_log):
            reader = threading.Thread(target=self._note_errors, args=(work, self.supervisor), daemon=True)
            reader.start()
            self._readers.append(reader)

    def _note_errors(self, work: Callable[[subprocess.Popen[str]], None], supervisor: subprocess.Popen[str]) -> None:
        try:
            work(supervisor)
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"

    def _read_output(self, supervisor: subprocess.Popen[str]) -> None:
        """Read what the teller prints: how many transfers are settled."""
        assert supervisor.stdout is not None
        for line in supervisor.stdout:
            if settled := re.fullmatch(r"settled: (\d+)\n", line):
                self.settled = max(self.settled, int(settled[1]))

    def _read_log(self, supervisor: subprocess.Popen[str]) -> None:
        """Keep the log, and know from it which processes run."""
        assert supervisor.stderr is not None
        with self.log_file.open("a") as log:
            for line in supervisor.stderr:
                log.write(line)
                log.flush()
                self.last_lines.append(line.rstrip())
                started = re.search(r'"message": "started", "coordinator_pid": (\d+), "app_pid": (\d+)', line)
                if started and supervisor is self.supervisor:
                    self._pids = {COORDINATOR: int(started[1]), APP: int(started[2])}
                    self._started.set()

    @property
    def log_file(self) -> Path:
        return self.home.parent / f"{self.name}.log"

    def kill(self, role: str) -> bool:
        """False if there is none of that role just now: it is being started again."""
        if role == SUPERVISOR:
            self.supervisor.kill()
            self.supervisor.wait()
            self.start()
            return True
        pid = self._pids.pop(role, None)
        if pid is None:
            return False
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:  # it left by itself, after the other one of the two
            return False
        return True

    def stop(self) -> None:
        """Cleanly: with a last checkpoint. Raises RunError."""
        if not self._started.wait(STOP_S):  # one that still imports its modules would end at the signal, as any program
            raise self.failed(f"its supervisor did not start within {STOP_S:.0f} s")
        self.supervisor.terminate()
        try:
            status = self.supervisor.wait(STOP_S)
        except subprocess.TimeoutExpired:
            raise self.failed(f"it did not stop within {STOP_S:.0f} s") from None
        if status != 0:
            raise self.failed(f"its supervisor ended with status {status}")

    def failed(self, why: str) -> RunError:
        last = "\n".join(f"    {line}" for line in self.last_lines)
        return RunError(f"{self.name}: {why}\nthe last lines of its log ({self.log_file}):\n{last}")

    def end(self) -> None:
        """Whatever state it is in: nothing of it runs afterwards."""
        if self.supervisor.poll() is None:
            self.supervisor.kill()  # its two processes die with it
            self.supervisor.wait()
        for reader in self._readers:
            reader.join()


def immortal(home: Path) -> list[str]:
    return [sys.executable, "-m", "immortal", "--home", str(home)]


# --- the run ---------------------------------------------------------------------------------------------------------


@dataclass
class Kill:
    """One kill -9: due when so many transfers are settled."""

    settled: int
    name: str
    role: str


def draw_kills(count: int, transfers: int, source: random.Random) -> list[Kill]:
    """``count`` kills at random moments: of each role of each instance, before any is hit a second time."""
    kinds = [(name, role) for name in APPS for role in ROLES]
    drawn: list[tuple[str, str]] = []
    while len(drawn) < count:
        drawn += source.sample(kinds, min(len(kinds), count - len(drawn)))
    moments = sorted(int(transfers * source.uniform(0.02, 0.95)) for _ in drawn)
    return [Kill(moment, name, role) for moment, (name, role) in zip(moments, drawn, strict=True)]


def run(folder: Path, transfers: int, seed: int, kills: Sequence[Kill]) -> float:
    """Run until all transfers are settled and all instances stopped; return the seconds until they were settled."""
    home = folder / REGISTRY_NAME
    environment = {**os.environ, "BANK_TRANSFERS": str(transfers), "BANK_SEED": str(seed)}
    for name in APPS:
        # Every checkpoint is kept, and so the whole log: it is looked at afterwards.
        register = ["register", name, "--peer", "tcp://127.0.0.1:*", "--keep-checkpoints", "all"]
        subprocess.run([*immortal(home), *register], check=True, stdout=subprocess.DEVNULL)
    instances = {name: Instance(name, home, environment) for name in APPS}
    started: list[Instance] = []
    try:
        began_s = time.monotonic()
        for instance in instances.values():
            instance.start()
            started.append(instance)
        wait_until_settled(instances, transfers, deque(kills))
        elapsed_s = time.monotonic() - began_s
        for instance in instances.values():
            instance.stop()
        return elapsed_s
    finally:
        for instance in started:
            instance.end()


def wait_until_settled(instances: Mapping[str, Instance], transfers: int, kills: deque[Kill]) -> None:
    columns = (TextColumn("{task.description:<9}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    teller = instances[TELLER]
    with Progress(*columns, console=console) as progress:
        settled_bar = progress.add_task("transfers", total=transfers)
        kills_bar = progress.add_task("kills", total=len(kills))
        moved_s, before = time.monotonic(), -1
        while teller.settled < transfers or kills:
            if kills and teller.settled >= kills[0].settled and instances[kills[0].name].kill(kills[0].role):
                kills.popleft()
                progress.advance(kills_bar)
            progress.update(settled_bar, completed=teller.settled)
            for instance in instances.values():
                if instance.error is not None:
                    raise instance.failed(instance.error)
                if instance.supervisor.poll() is not None:
                    raise instance.failed(f"its supervisor ended with status {instance.supervisor.returncode}")
            if teller.settled > before:
                before, moved_s = teller.settled, time.monotonic()
            elif time.monotonic() - moved_s > STALLED_S:
                raise teller.failed(f"nothing has moved for {STALLED_S:.0f} s")
            time.sleep(POLL_S)
        progress.update(settled_bar, completed=transfers)


# --- every coin is counted -------------------------------------------------------------------------------------------


def final_state(home: Path, name: str) -> Any:
    """The attributes at the end of the log, as `immortal replay` shows them. Raises RunError."""
    command = [*immortal(home), "replay", name, "--state", "--json"]
    result = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RunError(f"{name} can't be replayed: {result.stderr.strip()}")
    return json.loads(result.stdout)["state"]["state"]


def problems_of(states: Mapping[str, Any], transfers: int, seed: int) -> list[str]:
    """List errors in the books; none if each transfer was done exactly once.

    ``states``: by instance, as JSON shows them (keys are text).
    """
    found = []
    bank.SEED = seed
    teller = states[TELLER]
    if teller["ordered"] != transfers:
        found.append(f"{teller['ordered']:,} transfers were ordered, {transfers:,} expected")
    if teller.get("$waiting"):
        found.append(f"{len(teller['$waiting'])} transfers wait still")
    entries = {name: states[name]["entries"] for name in bank.BANKS}
    balances = {name: dict.fromkeys(map(str, range(bank.ACCOUNTS)), bank.OPENING_BALANCE) for name in bank.BANKS}
    for number in range(1, transfers + 1):
        order = bank.order(number)
        outcomes = teller["outcomes"].get(str(number), [])
        if len(outcomes) != 1:
            found.append(f"transfer {number} has the outcomes {outcomes}, one was expected")
            continue
        expected: dict[str, list[int]] = {name: [] for name in bank.BANKS}
        if outcomes[0] != "refused":
            expected[order.payer_bank].append(-order.amount)
            expected[order.payer_bank if outcomes[0] == "returned" else order.payee_bank].append(order.amount)
        if outcomes[0] == "done":
            balances[order.payer_bank][str(order.payer)] -= order.amount
            balances[order.payee_bank][str(order.payee)] += order.amount
        for name in bank.BANKS:
            made = entries[name].get(str(number), [])
            if made != expected[name]:
                found.append(f"transfer {number} is {outcomes[0]}; {name} has {made} for it, {expected[name]} expected")
    for name in bank.BANKS:
        if states[name]["balances"] != balances[name]:
            found.append(f"the balances of {name} are not what its transfers make")
    money = sum(sum(states[name]["balances"].values()) for name in bank.BANKS)
    opening = len(bank.BANKS) * bank.ACCOUNTS * bank.OPENING_BALANCE
    if money != opening:
        found.append(f"there is {money:,} of money, {opening:,} expected")
    return found


def print_results(states: Mapping[str, Any], kills: Sequence[Kill]) -> None:
    killed = Counter((kill.name, kill.role) for kill in kills)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("kill -9")
    for role in ROLES:
        table.add_column(role, justify="right")
    for name in APPS:
        table.add_row(name, *(str(killed[name, role]) for role in ROLES))
    console.print(table)
    outcomes = Counter(outcome for each in states[TELLER]["outcomes"].values() for outcome in each)
    money = sum(sum(states[name]["balances"].values()) for name in bank.BANKS)
    console.print(", ".join(f"{outcomes[outcome]:,} {outcome}" for outcome in ("done", "refused", "returned")))
    console.print(f"{money:,} of money in {len(bank.BANKS)} banks")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--transfers", type=int, default=10_000, metavar="N", help="how many (default 10,000)")
    parser.add_argument("--kills", type=int, default=12, metavar="N", help="how many (default 12)")
    parser.add_argument("--seed", type=int, help="of transfers and kills; drawn and printed without it")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="a new one, where the logs stay")
    options = parser.parse_args()
    if options.transfers < 1 or options.kills < 0:
        parser.error("--transfers is 1 or more, --kills 0 or more")
    if options.keep is not None and options.keep.exists():
        parser.error(f"{options.keep} is there already; a new folder is expected")
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1_000_000)
    kills = draw_kills(options.kills, options.transfers, random.Random(seed))
    if options.keep is None:
        folder = Path(tempfile.mkdtemp(prefix="immortal-bank-"))
    else:
        options.keep.mkdir(parents=True)
        folder = options.keep.absolute()
    console.print(f"{options.transfers:,} transfers, {len(kills)} kills, seed {seed}")
    try:
        elapsed_s = run(folder, options.transfers, seed, kills)
        states = {name: final_state(folder / REGISTRY_NAME, name) for name in APPS}
    except RunError as error:
        console.print(f"FAILED: {error}", style="bold red", markup=False, highlight=False)
        console.print(f"logs and registry are kept in {folder}; seed {seed}", highlight=False)
        return 1
    except KeyboardInterrupt:
        if options.keep is None:
            shutil.rmtree(folder)
        return 130
    print_results(states, kills)
    console.print(
        f"{options.transfers / elapsed_s:,.0f} transfers/s over {elapsed_s:.1f} s, {len(kills)} kills, seed {seed}"
    )
    problems = problems_of(states, options.transfers, seed)
    if problems:
        for problem in problems[:10]:
            console.print(f"WRONG: {problem}", style="bold red", markup=False, highlight=False)
        console.print(f"{len(problems)} problems; logs and registry are kept in {folder}", highlight=False)
        return 1
    console.print("every transfer was done once, and all money is there", style="bold green")
    if options.keep is None:
        shutil.rmtree(folder)
    else:
        console.print(f"the registry's home is {folder / REGISTRY_NAME}", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
