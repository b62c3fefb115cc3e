"""Many transfers between three banks, while their processes are killed one after another; then every coin is counted.

    python examples/bank/run.py [--transfers N] [--kills N] [--seed S] [--keep FOLDER]

Twelve processes run: three banks and a teller, each an app and its coordinator under `immortal run --restart`. Any of
them is killed, the supervisors too; this program restarts supervisors. A seed draws the kills over the number of
settled transfers.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import sys
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bank
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

sys.path.append(str(Path(__file__).resolve().parents[1]))
import supervised
from supervised import APP, COORDINATOR, REGISTRY_NAME, SUPERVISOR, console

POLL_S = 0.02
STALLED_S = 60.0  # without progress for so long, the run fails
TELLER = "teller"
APPS = dict.fromkeys(bank.BANKS, "bank:Bank") | {TELLER: "bank:Teller"}
FOLDER = Path(__file__).parent
ROLES = (APP, COORDINATOR, SUPERVISOR)


class Instance(supervised.Instance):
    """Instance of the bank. ``settled``: number of transfers that the teller has printed."""

    def __init__(self, name: str, home: Path, environment: Mapping[str, str]) -> None:
        self.settled = 0
        super().__init__(name, APPS[name], home, FOLDER, environment, self._note)

    def _note(self, line: str) -> None:
        if settled := re.fullmatch(r"settled: (\d+)\n", line):
            self.settled = max(self.settled, int(settled[1]))


# --- the run ---------------------------------------------------------------------------------------------------------


@dataclass
class Kill:
    """One kill -9, due when ``settled`` transfers are settled."""

    settled: int
    name: str
    role: str


def draw_kills(count: int, transfers: int, source: random.Random) -> list[Kill]:
    """Draw ``count`` kills at random moments: each role of each instance once, before any is hit a second time."""
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
        supervised.register(home, name, *supervised.KEEP_ALL)
    instances: dict[str, Instance] = {}
    try:
        began_s = time.monotonic()
        for name in APPS:
            instances[name] = Instance(name, home, environment)
        wait_until_settled(instances, transfers, deque(kills))
        elapsed_s = time.monotonic() - began_s
        for instance in instances.values():
            instance.stop()
        return elapsed_s
    finally:
        for instance in instances.values():
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
                instance.check()
            if teller.settled > before:
                before, moved_s = teller.settled, time.monotonic()
            elif time.monotonic() - moved_s > STALLED_S:
                raise teller.failed(f"nothing has moved for {STALLED_S:.0f} s")
            time.sleep(POLL_S)
        progress.update(settled_bar, completed=transfers)


# --- every coin is counted -------------------------------------------------------------------------------------------


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
    console.print(f"{options.transfers:,} transfers, {len(kills)} kills, seed {seed}")

    def work(folder: Path) -> tuple[list[str], str]:
        elapsed_s = run(folder, options.transfers, seed, kills)
        states = {name: supervised.final_state(folder / REGISTRY_NAME, name, FOLDER) for name in APPS}
        print_results(states, kills)
        rate = options.transfers / elapsed_s
        console.print(f"{rate:,.0f} transfers/s over {elapsed_s:.1f} s, {len(kills)} kills, seed {seed}")
        return problems_of(states, options.transfers, seed), "every transfer was done once, and all money is there"

    return supervised.conclude(work, options.keep, f"; seed {seed}")


if __name__ == "__main__":
    sys.exit(main())
