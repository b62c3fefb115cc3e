"""immortal.testing: each test is replayed at its end, and recorded logs are replayed as tests."""

from __future__ import annotations

import itertools
import random
import re
import sys
from datetime import timedelta
from pathlib import Path

import pytest

import immortal
from immortal import Immortal, peer, rpc
from immortal.coordinator.core.errors import LogFormatError
from immortal.testing import Environment, ReplayDiffers, assert_replays
from tests.helpers.bank_apps import Bank, RichBank, Teller
from tests.helpers.recorded import Instances, load_module, write_module

numbers = itertools.count(1)


class Sink(Immortal):
    values: list[float]

    def __init__(self) -> None:
        self.values = []

    @rpc
    def put(self, value: float) -> None:
        self.values.append(value)


class Dice(Immortal):
    sink = peer(Sink, "sink")
    thrown: list[float]

    def __init__(self) -> None:
        self.thrown = []

    @rpc
    def fair(self, sides: int) -> None:
        self.sink.put.fork(immortal.random.random() * sides)

    @rpc
    def send(self, sides: int) -> None:
        self.sink.put.fork(random.random() * sides)

    @rpc
    def keep(self, sides: int) -> None:
        self.thrown.append(random.random() * sides)

    @rpc
    def once(self) -> None:
        if next(numbers) > 1:
            raise ValueError("not the first")

    @rpc
    def more(self) -> None:
        for _ in range(next(numbers)):
            self.sink.put.fork(1)


@pytest.fixture(autouse=True)
def first_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "numbers", itertools.count(1))


def _message(log_of: str, *calls: tuple[object, ...]) -> str:
    env = Environment()
    sink, dice = env.start(Sink, "sink"), env.start(Dice, "dice")
    dice.call(Dice.fair, 6)
    for handler, *arguments in calls:
        dice.call(handler, *arguments)  # type: ignore[arg-type]
    assert len(sink.state.values) >= 1
    with pytest.raises(ReplayDiffers) as caught:
        env.close()
    assert isinstance(caught.value, AssertionError)
    assert f"\n{log_of}: checkpoint 1 (before record 0) to checkpoint 2" in str(caught.value)
    return str(caught.value)


def test_another_call_is_found_with_its_handler_and_with_what_was_sent_then() -> None:
    said = _message("dice", (Dice.send, 6))
    assert re.search(r"the calls to 'sink' had reached number 2", said)
    assert re.search(
        r"then: Sink\.put\([\d.]+\)\n +now:  Sink\.put\([\d.]+\)  <- record 2, message 0: Dice\.send", said
    )


def test_another_state_is_found_with_its_handler() -> None:
    said = _message("dice", (Dice.fair, 4), (Dice.keep, 4), (Dice.keep, 6))
    assert re.search(r"thrown\[0\]: then [\d.]+, now [\d.]+\n", said)
    assert "two replays have two states: record 3: Dice.keep(4) as call 3 of test" in said


def test_a_handler_that_raises_in_the_replay_only_is_found() -> None:
    said = _message("dice", (Dice.once,))
    assert (
        "  DIVERGED: Dice.once at record 2, message 0 did not fail when it was handled, and fails now: "
        "ValueError: not the first\n      Traceback" in said
    )


def test_a_call_too_many_is_found() -> None:
    assert "makes more calls than before" in _message("dice", (Dice.more,))


def test_a_crash_finds_it_at_once() -> None:
    env = Environment()
    sink, dice = env.start(Sink, "sink"), env.start(Dice, "dice")
    dice.call(Dice.send, 6)
    dice.call(Dice.fair, 6)  # its record has the mark of the call before
    dice.crash()
    with pytest.raises(Exception, match="'dice' does not do again what it did before"):
        dice.recover()
    assert len(sink.state.values) == 2


def test_what_is_deterministic_passes_at_any_moment() -> None:
    with Environment() as env:
        env.start(Sink, "sink")
        dice = env.start(Dice, "dice")
        for sides in range(20):
            dice.call(Dice.fair, sides)
            if sides % 7 == 0:
                env.check_replays()


# --- recorded logs ----------------------------------------------------------------------------------------------------


class CarelessBank(Bank, formerly=("Bank",)):
    @rpc
    def debit(self, account: str, amount: int = 1) -> int:
        self.accounts[account] -= 2 * amount
        return self.accounts[account]


class ForgetfulTeller(Teller, formerly=("Teller",)):
    @rpc
    def count(self, amount: int) -> int:
        return self.moved

    @rpc
    def feeds(self, account: str, amount: int) -> None:
        self.bank.credit.fork(account, amount + 1)


class LavishTeller(Teller, formerly=("Teller",)):
    @rpc
    def feeds(self, account: str, amount: int) -> None:
        self.bank.credit.fork(account, amount + 2)


class Generous(Bank, formerly=("Bank",)):
    @rpc
    def credit(self, account: str, amount: int) -> int:
        self.accounts[account] += 2 * amount
        return self.accounts[account]


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    with Environment() as env:
        bank, teller = env.start(Bank, "bank"), env.start(Teller, "teller")
        assert teller.call(Teller.transfer, "ann", "bob", 10)
        teller.send(Teller.feeds, "bob", 5)
        env.run()
        teller.crash()
        teller.recover()
        assert teller.call(Teller.count, 3) == 13
        bank.export_log(tmp_path / "bank.log")
        teller.export_log(tmp_path / "teller.log")
    return tmp_path


def test_a_recorded_log_replays_through_the_same_class(golden: Path) -> None:
    assert_replays(golden / "bank.log", Bank)
    assert_replays(str(golden / "teller.log"), Teller)
    assert (golden / "teller.log").stat().st_size < 4000


def test_another_class_is_told_where_it_differs(golden: Path) -> None:
    with pytest.raises(ReplayDiffers) as caught:
        assert_replays(golden / "bank.log", CarelessBank)
    said = str(caught.value)
    assert said.startswith(f"CarelessBank does not do again what {golden / 'bank.log'} has\n")
    assert "DIVERGED: 'bank' does not do again what it did before" in said
    assert "<- record 1, message 0: CarelessBank.debit('ann', 10) as call 2 of teller" in said
    with pytest.raises(
        ReplayDiffers, match=r"Bank\.credit\('bob', 6\)  <- record \d+, message 0: ForgetfulTeller.feeds"
    ):
        assert_replays(golden / "teller.log", ForgetfulTeller)


def test_where_calls_differ_it_is_said_whether_the_state_does(golden: Path) -> None:
    with pytest.raises(ReplayDiffers) as caught:
        assert_replays(golden / "teller.log", LavishTeller)
    assert "Bank.credit('bob', 7)" in str(caught.value)
    assert "\n  state: the same" in str(caught.value)
    with pytest.raises(ReplayDiffers) as caught:
        assert_replays(golden / "bank.log", CarelessBank)
    assert "state: the same" not in str(caught.value)


def test_the_receivers_log_shows_what_was_sent_then(golden: Path) -> None:
    with pytest.raises(ReplayDiffers) as caught:
        assert_replays(golden / "teller.log", ForgetfulTeller, receivers=[golden / "bank.log"])
    assert "the first that differs is number 3:\n      then: Bank.credit('bob', 5)\n" in str(caught.value)


def test_a_class_that_can_not_read_the_log_says_so(golden: Path) -> None:
    with pytest.raises(ReplayDiffers, match="the checkpoint is of an app 'Bank', this is 'Teller'"):
        assert_replays(golden / "bank.log", Teller)


def test_the_old_class_of_an_upgrade_replays_what_it_did(golden: Path) -> None:
    assert_replays(golden / "bank.log", RichBank)


def test_the_log_of_an_upgrade_replays(tmp_path: Path) -> None:
    with Environment() as env:
        bank = env.start(Bank, "bank")
        bank.call(Bank.debit, "ann", 5)
        rich = bank.upgrade(RichBank)
        rich.call(RichBank.debit, "ann", 5)
        rich.export_log(tmp_path / "rich.log")
    assert_replays(tmp_path / "rich.log", RichBank)


def test_a_file_that_is_no_log_or_a_damaged_one_is_refused(golden: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("something else")
    with pytest.raises(LogFormatError, match="is not a recorded log"):
        assert_replays(tmp_path / "text", Bank)
    whole = (golden / "bank.log").read_bytes()
    for offset in range(8, len(whole), 37):
        damaged = bytearray(whole)
        damaged[offset] ^= 4
        (tmp_path / "damaged").write_bytes(damaged)
        with pytest.raises(LogFormatError, match="is damaged"):
            assert_replays(tmp_path / "damaged", Bank)
    with Environment() as env:
        bank = env.start(Bank, "bank")
        with pytest.raises(FileExistsError):
            bank.export_log(tmp_path / "text")


def test_a_copy_of_a_log_folder_replays(tmp_path: Path) -> None:
    instances = Instances(tmp_path)
    bank = instances.start("bank", Bank)
    for _ in range(3):
        bank.impulse("credit", "ann", 5)
    bank.checkpoint()
    bank.close()
    assert_replays(tmp_path / "bank" / "log", Bank)
    with pytest.raises(ReplayDiffers, match=r"accounts\['ann'\]: then 115, now 130"):
        assert_replays(tmp_path / "bank" / "log", Generous)


DRAWS = """
import immortal
from immortal import Immortal, peer, rpc
from tests.unit.test_testing_replays import Sink


class Draws(Immortal):
    sink = peer(Sink, "sink")

    @rpc
    def draw(self, sides: int) -> None:
        BODY
"""
WRITTEN = "for _ in range(3): self.sink.put.fork(immortal.random.random() * sides + immortal.random.choice([1, 2, 3]))"
FORMATTED = """for _ in range(3):  # as a formatter has it
            self.sink.put.fork(
                immortal.random.random() * sides
                + immortal.random.choice(
                    [1, 2, 3],
                )
            )"""


def test_a_log_is_replayed_by_code_that_was_formatted_since(tmp_path: Path) -> None:
    classes = []
    for number, body in enumerate((WRITTEN, FORMATTED)):
        folder = tmp_path / str(number)
        folder.mkdir()
        classes.append(load_module(folder, write_module(folder, DRAWS.replace("BODY", body))).Draws)
    written, formatted = classes
    with Environment() as env:
        sink, draws = env.start(Sink, "sink"), env.start(written, "draws")
        draws.call(written.draw, 6)
        assert len(set(sink.state.values)) == 3
        draws.export_log(tmp_path / "draws.log")
        sink.export_log(tmp_path / "sink.log")
    assert_replays(tmp_path / "draws.log", formatted, receivers=[tmp_path / "sink.log"])


class Stopping(Immortal):
    @rpc
    def add(self, number: int) -> int:
        breakpoint()
        return number + 1

    @rpc
    async def wait(self) -> int:
        breakpoint()
        await immortal.sleep(timedelta(minutes=1))
        breakpoint()
        return 1


def test_a_breakpoint_stops_calls_and_no_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    stops: list[str] = []
    monkeypatch.setattr(sys, "breakpointhook", lambda: stops.append(sys._getframe(1).f_code.co_name))
    with Environment() as env:
        one = env.start(Stopping, "one")
        assert one.call(Stopping.add, 1) == 2
        waiting = one.begin(Stopping.wait)
        env.run()
        one.crash()
        one.recover()  # runs both once more
        assert waiting.result() == 1
    assert stops == ["add", "wait", "wait"]
