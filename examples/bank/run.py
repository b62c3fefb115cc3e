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
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import bank
from rich.table import Table

sys.path.append(str(Path(__file__).resolve().parents[1]))
import supervised
from supervised import APP, COORDINATOR, REGISTRY_NAME, SUPERVISOR, Kill, console

TELLER = "teller"
APPS = dict.fromkeys(bank.BANKS, "bank:Bank") | {TELLER: "bank:Teller"}
FOLDER = Path(__file__).parent
ROLES = (APP, COORDINATOR, SUPERVISOR)


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
    kills = supervised.draw_kills(options.kills, options.transfers, APPS, ROLES, random.Random(seed))
    console.print(f"{options.transfers:,} transfers, {len(kills)} kills, seed {seed}")

    def work(folder: Path) -> tuple[list[str], str]:
        home = folder / REGISTRY_NAME
        environment = {**os.environ, "BANK_TRANSFERS": str(options.transfers), "BANK_SEED": str(seed)}
        for name in APPS:
            supervised.register(home, name, *supervised.KEEP_ALL)
        elapsed_s = supervised.run(
            APPS,
            lambda name: supervised.Instance(name, APPS[name], home, FOLDER, environment, "settled"),
            "settled",
            [TELLER],
            options.transfers,
            kills,
        )
        states = {name: supervised.final_state(home, name, FOLDER) for name in APPS}
        print_results(states, kills)
        rate = options.transfers / elapsed_s
        console.print(f"{rate:,.0f} transfers/s over {elapsed_s:.1f} s, {len(kills)} kills, seed {seed}")
        return problems_of(states, options.transfers, seed), "every transfer was done once, and all money is there"

    return supervised.conclude(work, options.keep, f"; seed {seed}")


if __name__ == "__main__":
    sys.exit(main())
