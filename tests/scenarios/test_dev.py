"""`immortal dev`: a project at a terminal and without one, and what becomes of code that is saved meanwhile."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from immortal.coordinator.instances.registry import Registry
from immortal.coordinator.project.code_change import CodeChange
from immortal.coordinator.project.project import find_project
from tests.helpers.at_terminal import CTRL_C, AtTerminal
from tests.helpers.projects import SHOP, Development, command, immortal, make_project

DISCOUNT = SHOP.replace("100 * count", "90 * count")  # other calls
RENAMED = SHOP.replace("return self.orders", "return int(self.orders)")  # the same ones
SECOND = (
    SHOP.replace("class Till(Immortal", "class Till1(Immortal, formerly=('Till',)")
    .replace(
        "class Shop(",
        """@upgrades(Till1)
class Till(Immortal):
    cents: int
    sales: int

    def __init__(self) -> None:
        self.cents = self.sales = 0

    @classmethod
    def upgrade(cls, old: Till1) -> "Till":
        new = cls()
        new.cents = old.cents
        return new

    @rpc
    def sold(self, cents: int) -> None:
        self.cents += cents
        self.sales += 1
        print("till has", self.cents, "of", self.sales)


class Shop(""",
    )
    .replace("import Immortal, peer, rpc", "import Immortal, peer, rpc, upgrades")
)

Start = Callable[..., Development]
StartAtTerminal = Callable[..., AtTerminal]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    begun: list[Development] = []

    def begin(*arguments: str) -> Development:
        begun.append(Development(tmp_path, *arguments))
        begun[-1].ready("till", "shop")
        return begun[-1]

    make_project(tmp_path)
    yield begin
    for one in begun:
        one.close()


@pytest.fixture
def at_terminal(tmp_path: Path) -> Iterator[StartAtTerminal]:
    begun: list[AtTerminal] = []

    def begin(*arguments: str, **environment: str) -> AtTerminal:
        begun.append(AtTerminal(command("dev", *arguments), tmp_path, environment))
        return begun[-1]

    make_project(tmp_path)
    yield begin
    for one in begun:
        one.close()


def order(folder: Path, count: int) -> str:
    return immortal(folder, "call", "shop", "order", str(count))


def status(folder: Path) -> dict[str, Any]:
    return {row["name"]: row for row in json.loads(immortal(folder, "status", "--json"))}


def save(folder: Path, source: str) -> None:
    (folder / "shop.py").write_text(source)


def test_a_project_is_registered_and_runs_until_ctrl_c(tmp_path: Path, start: Start) -> None:
    dev = start()
    dev.see("immortal", "till: registered")
    dev.see("immortal", "shop: registered")
    assert 'keep_checkpoints = "all"' in (tmp_path / ".immortal" / "shop.toml").read_text()
    order(tmp_path, 2)
    assert dev.see("till has") == "till     | till has 200"
    assert dev.stop() == 0
    assert "\x1b" not in "\n".join(dev.lines)
    rows = status(tmp_path)
    assert {row["phase"] for row in rows.values()} == {"stopped"}
    assert all(row["checkpoint"]["sequence_id"] == row["sequence_id"] for row in rows.values())


def test_one_file_is_a_project(tmp_path: Path, start: Start) -> None:
    (tmp_path / "immortal.toml").unlink()
    dev = start("shop.py")
    order(tmp_path, 1)
    dev.see("till     | till has 100")
    assert dev.stop() == 0


def test_a_second_start_goes_on_and_registers_nothing(tmp_path: Path, start: Start) -> None:
    dev = start()
    order(tmp_path, 1)
    dev.see("till has 100")
    assert dev.stop() == 0
    dev = start()
    order(tmp_path, 1)
    dev.see("till has 200")
    assert not any("registered" in line for line in dev.lines)


def test_it_runs_once(tmp_path: Path, start: Start) -> None:
    dev = start()
    said = immortal(tmp_path, "dev", status=1)
    assert said == (
        f"error: the project runs already, by 'immortal dev', process {dev.process.pid}: Ctrl-C there stops it\n"
    )


def test_code_that_makes_the_same_calls_takes_over(tmp_path: Path, start: Start) -> None:
    dev = start()
    order(tmp_path, 1)
    dev.see("till has 100")
    save(tmp_path, RENAMED)
    dev.see("shop restarts with the current code: its replay is the same")
    dev.see("shop", "ready")
    assert order(tmp_path, 1) == "2\n"
    dev.see("till has 200")


def test_without_a_terminal_code_that_makes_other_calls_waits(tmp_path: Path, start: Start) -> None:
    dev = start()
    order(tmp_path, 1)
    dev.see("till has 100")
    save(tmp_path, DISCOUNT)
    dev.see("immortal", "the new code of shop makes other calls")
    dev.see("shop ", "DIVERGED")
    dev.see("shop ", "then: Till.sold(100)")
    dev.see("shop ", "now:  Till.sold(90)  <- record 1, message 0: Shop.order(1)")
    dev.see("immortal", "shop keeps its code")
    order(tmp_path, 1)
    dev.see("till has 200")  # not 190
    save(tmp_path, SHOP)
    dev.see("shop restarts with the current code")


def test_only_services_that_use_the_file_start_again(tmp_path: Path, start: Start) -> None:
    till, shop = SHOP.split("class Shop")
    (tmp_path / "tills.py").write_text(till)
    (tmp_path / "prices.py").write_text("PRICE = 100\n")
    save(
        tmp_path,
        f"from immortal import Immortal, peer, rpc\nimport prices\nfrom tills import Till\n\n\nclass Shop{shop}",
    )
    project = (tmp_path / "immortal.toml").read_text()
    (tmp_path / "immortal.toml").write_text(project.replace("shop:Till", "tills:Till"))
    dev = start()
    (tmp_path / "prices.py").write_text("PRICE = 101\n")
    dev.see("shop restarts")
    dev.see("shop ", "ready")
    assert not any("till restarts" in line for line in dev.lines)


def test_what_cant_be_imported_changes_nothing_until_it_can(tmp_path: Path, start: Start) -> None:
    dev = start()
    order(tmp_path, 1)
    save(tmp_path, SHOP + "\nclass Broken(:\n")
    dev.see("the saved code can't be run, the services continue with their old code")
    dev.see("class Broken(:")
    order(tmp_path, 1)
    dev.see("till has 200")
    save(tmp_path, RENAMED)
    dev.see("till restarts")
    dev.see("shop restarts")


def test_what_changed_while_something_was_broken_is_not_forgotten(tmp_path: Path, start: Start) -> None:
    till, shop = SHOP.split("class Shop")
    (tmp_path / "tills.py").write_text(till)
    save(tmp_path, f"from immortal import Immortal, peer, rpc\nfrom tills import Till\n\n\nclass Shop{shop}")
    project = (tmp_path / "immortal.toml").read_text()
    (tmp_path / "immortal.toml").write_text(project.replace("shop:Till", "tills:Till"))
    mended = (tmp_path / "shop.py").read_text()
    dev = start()
    (tmp_path / "tills.py").write_text(till.replace("till has", "the till has"))
    save(tmp_path, f"{mended}\n1 / 0\n")
    dev.see("the saved code can't be run")
    save(tmp_path, mended)
    dev.see("till restarts")


def test_settings_and_services_change_with_the_project(tmp_path: Path, start: Start) -> None:
    dev = start()
    project = (tmp_path / "immortal.toml").read_text()
    project = (
        project.replace('keep_checkpoints = "all"', "keep_checkpoints = 5") + '\n[services.stall]\napp = "shop:Shop"\n'
    )
    (tmp_path / "immortal.toml").write_text(project)
    dev.see("shop: its settings have changed: keep_checkpoints")
    dev.see("stall: registered")
    dev.see("stall ", "ready")
    assert "keep_checkpoints = 5" in (tmp_path / ".immortal" / "shop.toml").read_text()
    assert not any("till restarts" in line for line in dev.lines)
    (tmp_path / "immortal.toml").write_text(project.partition("\n[services.stall]")[0])
    dev.see("stall is no longer a service of the project")
    dev.see("stall ", "both stopped")


def test_a_wrong_project_file_is_one_line(tmp_path: Path, start: Start) -> None:
    (tmp_path / "immortal.toml").write_text('[services.shop]\napp = "shop:Shop"\nkeep_chekpoints = 3\n')
    said = immortal(tmp_path, "dev", status=1)
    assert said == (
        f"error: {tmp_path}/immortal.toml, line 3, field 'services.shop.keep_chekpoints': unknown field: did you mean"
        " 'keep_checkpoints'?\n"
    )


def begun(dev: AtTerminal, folder: Path) -> None:
    """Both are ready, and one order is through."""
    dev.see("till ready · shop ready")
    order(folder, 1)
    dev.see("till has 100")


def test_a_terminal_is_asked_and_the_old_code_kept(tmp_path: Path, at_terminal: StartAtTerminal) -> None:
    dev = at_terminal(NO_COLOR="1")
    begun(dev, tmp_path)
    save(tmp_path, DISCOUNT)
    dev.see("DIVERGED")
    dev.see("[k]eep the old code, [u]pgrade here, [r]eset the log? ")
    dev.type("x\n")
    dev.see("[r]eset the log? ")
    dev.type("k\n")
    dev.see("shop keeps the code that it runs")
    order(tmp_path, 1)
    dev.see("till has 200")
    dev.type(CTRL_C)
    dev.see("stopping")
    assert dev.ended() == 0


def test_upgraded_here_the_new_code_goes_on_from_the_state(tmp_path: Path, at_terminal: StartAtTerminal) -> None:
    dev = at_terminal(NO_COLOR="1")
    begun(dev, tmp_path)
    save(tmp_path, DISCOUNT)
    dev.see("[u]pgrade here")
    dev.type("u\n")
    dev.see("shop continues from here with the new code")
    dev.see("shop ready")
    assert order(tmp_path, 1) == "2\n"
    dev.see("till has 190")
    assert "replays them" not in dev.screen


def test_reset_all_of_one_begins_anew_and_its_peers_with_it(tmp_path: Path, at_terminal: StartAtTerminal) -> None:
    dev = at_terminal(NO_COLOR="1")
    begun(dev, tmp_path)
    save(tmp_path, DISCOUNT)
    dev.see("[r]eset the log? ")
    dev.type("r\n")
    dev.see("starts from scratch: its log is deleted")
    dev.see("shop ready")
    assert order(tmp_path, 1) == "1\n"
    dev.see("till has 190")


def test_a_class_of_another_version_upgrades(tmp_path: Path, at_terminal: StartAtTerminal) -> None:
    dev = at_terminal(NO_COLOR="1")
    begun(dev, tmp_path)
    save(tmp_path, SECOND)
    dev.see("the new code of till has version 2, its log has version 1")
    dev.see("[u]pgrade here")
    dev.type("u\n")
    dev.see("till is upgraded to version 2")
    dev.see("till ready")
    order(tmp_path, 1)
    dev.see("till has 200 of 1")
    assert status(tmp_path)["till"]["version"] == 2


def test_a_start_with_another_version_asks(tmp_path: Path, start: Start, at_terminal: StartAtTerminal) -> None:
    begun = start()
    assert begun.stop() == 0
    save(tmp_path, SECOND)
    dev = at_terminal(NO_COLOR="1")
    dev.see("till stays at version 1, but shop:Till has version 2")
    dev.see("[u]pgrade here")
    dev.type("u\n")
    dev.see("till is upgraded to version 2")
    dev.see("till ready")
    assert status(tmp_path)["till"]["version"] == 2


def test_state_that_the_new_code_cant_take_over_is_kept(tmp_path: Path, at_terminal: StartAtTerminal) -> None:
    dev = at_terminal(NO_COLOR="1")
    begun(dev, tmp_path)
    save(tmp_path, SHOP.replace("orders: int", "orders: list[int]").replace("self.orders = 0", "self.orders = []"))
    dev.see("the new code of shop can't replay its log")
    dev.see("[u]pgrade here")
    dev.type("u\n")
    dev.see("the new code can't continue from the current state")
    dev.see("[u]pgrade here")
    dev.type("k\n")
    dev.see("shop keeps the code that it runs")
    assert order(tmp_path, 1) == "2\n"


def test_what_is_saved_while_it_asks_is_looked_at_anew(tmp_path: Path, at_terminal: StartAtTerminal) -> None:
    dev = at_terminal(NO_COLOR="1")
    begun(dev, tmp_path)
    save(tmp_path, DISCOUNT)
    dev.see("[u]pgrade here")
    save(tmp_path, RENAMED)
    dev.see("shop restarts with the current code: its replay is the same")


def test_a_breakpoint_is_answered_through_it(tmp_path: Path, at_terminal: StartAtTerminal) -> None:
    save(tmp_path, SHOP.replace('        print("till has"', '        breakpoint()\n        print("till has"'))
    dev = at_terminal()
    dev.see("till ready · shop ready")
    order(tmp_path, 1)
    dev.see("(Pdb) ")
    dev.type("p 'cents', cents * 2\n")
    dev.see("('cents', 200)")
    dev.see("(Pdb) ")
    dev.type("c\n")
    dev.see("till has 100")
    assert "\x1b[3" in dev.screen  # in color


def test_ctrl_c_twice_ends_a_handler_that_stands_in_the_debugger(tmp_path: Path, at_terminal: StartAtTerminal) -> None:
    save(tmp_path, SHOP.replace('        print("till has"', '        breakpoint()\n        print("till has"'))
    dev = at_terminal()
    dev.see("till ready · shop ready")
    order(tmp_path, 1)
    dev.see("(Pdb) ")
    dev.type(CTRL_C)
    dev.see("stopping; Ctrl-C again ends all processes at once")
    assert dev.insist(CTRL_C) == 1
    assert {row["phase"] for row in status(tmp_path).values()} == {"stopped"}


def test_a_log_that_the_code_cant_replay_is_asked_about(tmp_path: Path, at_terminal: StartAtTerminal) -> None:
    dev = at_terminal(NO_COLOR="1")
    begun(dev, tmp_path)
    order(tmp_path, 1)  # its record has the mark of the first one's call
    dev.see("till has 200")
    dev.process.kill()  # and all that it runs: no checkpoint
    dev.process.wait()
    save(tmp_path, DISCOUNT)
    again = at_terminal(NO_COLOR="1")
    again.see("shop has ended with status 1")
    again.see("[w]ait for that, [r]eset the log? ")
    again.type("w\n")
    save(tmp_path, SHOP)
    again.see("shop starts with the current code")
    again.see("shop ready")
    assert order(tmp_path, 1) == "3\n"


def test_it_loses_nothing_when_it_is_killed(tmp_path: Path, start: Start) -> None:
    dev = start()
    order(tmp_path, 1)
    dev.see("till has 100")
    dev.close()
    dev = start()
    assert order(tmp_path, 1) == "2\n"
    dev.see("till has 200")


def test_without_a_checkpoint_of_all_it_is_not_upgraded_here(tmp_path: Path) -> None:
    make_project(tmp_path)
    project = find_project(tmp_path)
    registry = Registry(project.home)
    _, shop = project.services()
    dev = Development(tmp_path)
    try:
        dev.ready("till", "shop")
        order(tmp_path, 1)
        dev.see("till has 100")
        assert CodeChange(project, registry, shop).records_behind() > 0
        assert dev.stop() == 0
        assert CodeChange(project, registry, shop).records_behind() == 0
    finally:
        dev.close()


PAYING = """
import immortal
from immortal import EffectFailed, Immortal, Retry, rpc


def charge(cents: int) -> str:
    raise OSError("the bank is far away")


class Shop(Immortal):
    @rpc
    async def pay(self, cents: int) -> str:
        try:
            return await immortal.effect.options(retry=Retry(attempts=1))(charge, cents)
        except EffectFailed as failed:
            return failed.message
"""
STANDING_IN = """
[services.shop]
app = "shop:Shop"
effects = { "shop:charge" = "fakes:charge" }
"""


def test_effects_have_others_in_their_place_here_alone(tmp_path: Path) -> None:
    make_project(tmp_path, PAYING, STANDING_IN)
    fakes = tmp_path / "fakes.py"
    fakes.write_text('def charge(cents: int) -> str:\n    return f"{cents} paid"\n')
    dev = Development(tmp_path)
    try:
        dev.see("shop", "in place of the effect shop:charge runs fakes:charge")
        dev.ready("shop")
        assert immortal(tmp_path, "call", "shop", "pay", "5") == '"5 paid"\n'
        fakes.write_text('def charge(cents: int) -> str:\n    return f"{cents} paid, it seems"\n')
        dev.see("shop restarts with the current code")
        dev.ready("shop")
        assert immortal(tmp_path, "call", "shop", "pay", "5") == '"5 paid, it seems"\n'
        fakes.write_text("")
        dev.see("shop", "IMMORTAL_EFFECTS: what is to run in place of effects can't be loaded: 'fakes:charge'")
        dev.stop()
    finally:
        dev.close()
    try:
        immortal(tmp_path, "up")
        assert immortal(tmp_path, "call", "shop", "pay", "5") == '"the bank is far away"\n'
    finally:
        immortal(tmp_path, "down")
