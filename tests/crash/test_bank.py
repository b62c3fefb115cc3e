"""The bank on a small scale: real processes, real kills, every coin counted; then what its logs can tell."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BANK = Path(__file__).parents[2] / "examples" / "bank"
TRANSFERS = 1500


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run that ended well."""
    folder = tmp_path_factory.mktemp("bank") / "kept"
    numbers = ["--transfers", str(TRANSFERS), "--kills", "8", "--seed", "3"]
    command = [sys.executable, str(BANK / "run.py"), *numbers, "--keep", str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "every transfer was done once, and all money is there" in result.stdout.splitlines()
    assert "8 kills" in result.stdout
    return folder / "registry"


def immortal(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "IMMORTAL_HOME": str(home)}
    command = [sys.executable, "-m", "immortal", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=BANK, env=environment)


def test_a_bank_that_takes_fees(home: Path) -> None:
    result = immortal(home, "what-if", "north", "--app", "fees:Bank")
    assert result.returncode == 3, result.stderr
    assert "was the answer " in result.stdout
    assert " of Bank.credit to call " in result.stdout
    table = next(line for line in result.stdout.splitlines() if "answers of Bank.credit" in line)
    assert table.startswith("teller")
    assert immortal(home, "what-if", "north", "--app", "bank:Bank").returncode == 0


@pytest.mark.parametrize("name", ["north", "south", "west", "teller"])
def test_each_replay_is_the_same(home: Path, name: str) -> None:
    result = immortal(home, "verify", name, "--all")
    assert result.returncode == 0, result.stdout + result.stderr


def state_at(home: Path, record: int) -> dict[str, Any]:
    """The teller's, behind that record."""
    shown = immortal(home, "replay", "teller", "--to", str(record), "--state", "--json").stdout
    return json.loads(shown)["state"]["state"]  # type: ignore[no-any-return]


def test_a_moment_of_the_past_and_who_waited_then(home: Path) -> None:
    last = json.loads(immortal(home, "replay", "teller", "--state", "--json").stdout)
    assert len(last["state"]["state"]["outcomes"]) == TRANSFERS
    assert "$waiting" not in last["state"]["state"]
    past = next(state for number in range(1, 9) if "$waiting" in (state := state_at(home, number)))
    assert len(past["outcomes"]) < TRANSFERS
    assert past["$waiting"]


@pytest.mark.cluster
@pytest.mark.timeout(320)
def test_the_notebook_answers_an_operators_questions(home: Path) -> None:
    cells = json.loads((BANK / "operator.ipynb").read_text())["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    environment = {**os.environ, "IMMORTAL_HOME": str(home), "MPLBACKEND": "agg"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-"],
        input=code,
        capture_output=True,
        text=True,
        timeout=300,
        cwd=BANK,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout
    assert f"|teller|teller  |transfer|{TRANSFERS} |" in said  # the calls of each method
    assert "|sequence_id|" in said  # pauses
    assert "|credit|AccountClosedError" in said
    assert "sound: every message was executed once, in order, after its cause" in said
    assert "|teller  |transfer|call " in said  # what waited in the middle


def test_the_books_are_looked_at_closely(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BANK))
    import run  # type: ignore[import-not-found]

    states = {name: run.supervised.final_state(home, name, run.FOLDER) for name in run.APPS}
    assert run.problems_of(states, TRANSFERS, 3) == []
    done = next(number for number, found in states["teller"]["outcomes"].items() if found == ["done"])
    payee = run.bank.order(int(done)).payee_bank
    payee_account = str(run.bank.order(int(done)).payee)
    amount = run.bank.order(int(done)).amount

    def problems(change: Any) -> str:
        changed = copy.deepcopy(states)
        change(changed)
        return "; ".join(run.problems_of(changed, TRANSFERS, 3))

    def done_twice(books: Any) -> None:
        books[payee]["entries"][done].append(amount)
        books[payee]["balances"][payee_account] += amount

    def lost(books: Any) -> None:
        del books[payee]["entries"][done]

    assert f"transfer {done} is done; {payee} has " in problems(done_twice)
    assert "of money, 300,000 expected" in problems(done_twice)
    assert f"{payee} has [] for it" in problems(lost)
    assert "has the outcomes ['done', 'done']" in problems(
        lambda books: books["teller"]["outcomes"][done].append("done")
    )
    assert "the outcomes [], one was expected" in problems(lambda books: books["teller"]["outcomes"].pop(done))
    assert "1 transfers wait still" in problems(lambda books: books["teller"].update({"$waiting": [{}]}))
    moved = problems(lambda books: books[payee]["balances"].update({"0": books[payee]["balances"]["0"] + 5, "1": 0}))
    assert f"the balances of {payee} are not what its transfers make" in moved
