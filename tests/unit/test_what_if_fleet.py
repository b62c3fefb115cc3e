"""What-if for a fleet, in the environment of tests: effects, timers, failures, checks, orders, trimmed logs."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import pytest
from msgspec.structs import replace

import immortal
from immortal import Immortal, peer, rpc, upgrades
from immortal.appsdk.testing.instance import MemorySource
from immortal.coordinator.core.interfaces import LogSummary
from immortal.errors import UsageError
from immortal.replay.fleet import player, simulation
from immortal.replay.fleet.model import Call
from immortal.replay.fleet.outcome import FleetOutcome
from immortal.replay.fleet.report import outcome_lines
from immortal.replay.fleet.streams import Stream
from immortal.replay.plan import ReplayError
from immortal.testing import Environment, Instance, crash_everywhere
from tests.helpers.recorded import load_module

EXAMPLES = Path(__file__).parents[2] / "examples"


def pay(cents: int) -> str:
    return f"paid {cents}"


class Till(Immortal):
    sold: dict[str, int]

    def __init__(self) -> None:
        self.sold = {}

    @rpc
    def sell(self, item: str, count: int) -> int:
        if count == 7:
            raise ValueError("no seven")
        self.sold[item] = self.sold.get(item, 0) + count
        return self.sold[item]


class Shop(Immortal):
    till = peer(Till, "till")
    receipts: list[str]
    factor: ClassVar[int] = 1

    def __init__(self) -> None:
        self.receipts = []

    @rpc
    def keep(self, receipt: str) -> None:
        self.receipts.append(receipt)

    @rpc
    async def order(self, item: str, count: int) -> int:
        count *= self.factor
        await immortal.sleep(timedelta(seconds=1))
        receipt = await immortal.effect.options(key=f"{item} at the till")(pay, count)
        await immortal.step(self.keep, receipt)
        return await self.till.sell(item, count)


class Twice(Shop, formerly=("Shop",)):
    factor = 2


class Slow(Shop, formerly=("Shop",)):
    @rpc
    async def order(self, item: str, count: int) -> int:
        await immortal.sleep(timedelta(hours=1))
        return await self.till.sell(item, count)


class Cleaning(Slow, formerly=("Shop",)):
    sealed: ClassVar[list[bool]] = []

    @rpc
    async def order(self, item: str, count: int) -> int:
        try:
            return await super().order(item, count)
        finally:
            self.sealed.append(player._running)


class Loud(Till, formerly=("Till",)):
    @rpc
    def sell(self, item: str, count: int) -> int:
        raise KeyError(item)


class Stopping(Till, formerly=("Till",)):
    @rpc(on_error="stop")
    def sell(self, item: str, count: int) -> int:
        raise KeyError(item)


class Shard(Immortal):
    lines: list[str]

    def __init__(self) -> None:
        self.lines = []

    @rpc
    def put(self, line: str) -> int:
        self.lines.append(line)
        return len(self.lines)


class Front(Immortal):
    a = peer(Shard, "a")
    b = peer(Shard, "b")
    mark: ClassVar[str] = ""

    @rpc
    async def say(self, line: str) -> None:
        await immortal.multicast([self.a, self.b]).put.all(line + self.mark)


class Marking(Front, formerly=("Front",)):
    mark = "!"


class Doubling(Front, formerly=("Front",)):
    @rpc
    async def say(self, line: str) -> None:
        await immortal.multicast([self.a, self.b]).put.all(line)
        await self.a.put(f"{line}!")


@upgrades(Till)
class NewTill(Till):
    @rpc
    def sell(self, item: str, count: int) -> int:
        return super().sell(item, -count)


class Fleet:
    """Three orders, of 1, 2 and 7, two seconds apart; the last one fails."""

    def __init__(self, shop: type[Shop] = Shop) -> None:
        self.env = Environment(fail_alone=True)
        self.till: Instance[Till] = self.env.start(Till, "till")
        self.shop: Instance[Shop] = self.env.start(shop, "shop", effects={pay: pay})
        for count in (1, 2, 7):
            self.shop.begin(Shop.order, "tea", count)
            self.env.advance(seconds=2)

    def what_if(self, **given: Any) -> FleetOutcome:
        return self.env.what_if(**given)


def state_of(outcome: FleetOutcome, name: str) -> dict[str, tuple[Any, Any]]:
    return {one["path"]: (one.get("old"), one.get("new")) for one in outcome.service(name).state}


def test_the_same_code_makes_no_difference() -> None:
    outcome = Fleet().what_if(changes={"shop": Shop, "till": Till})
    assert not outcome.is_different
    assert list(outcome_lines(outcome))[-1] == "no difference"


def test_what_a_service_does_not_reach_is_not_run() -> None:
    outcome = Fleet().what_if(changes={"till": Till})
    assert (outcome.is_different, outcome.equal_services) == (False, ["shop"])


def test_an_effect_with_an_equal_request_gets_its_recorded_result_and_others_fail() -> None:
    outcome = Fleet().what_if(changes={"shop": Twice})
    asked = {one["effect"]: one["outcome"] for one in outcome.effects}
    assert asked["pay(cents=2)"] == "the result that the log has"
    assert "a what-if runs no effect" in asked["pay(cents=4)"]
    fates = {one.fate: one.count for one in outcome.service("shop").fates}
    assert fates == {"would fail": 1, "would fail in another way": 1}
    assert state_of(outcome, "till") == {"sold['tea']": (3, 2)}


def test_by_key_an_effect_gets_the_recorded_result_of_its_key() -> None:
    outcome = Fleet().what_if(changes={"shop": Twice}, effects="by-key")
    assert {one["outcome"] for one in outcome.effects} == {"the result that the log has"}
    assert state_of(outcome, "till") == {"sold['tea']": (3, 20)}


def test_a_function_stands_for_effects() -> None:
    called: list[Call] = []

    def effect(call: Call) -> str:
        called.append(call)
        return f"would pay {call.arguments[0]}"

    outcome = Fleet().what_if(changes={"shop": Twice}, effects=effect)
    assert [(one.service, one.method, list(one.arguments)) for one in called] == [
        ("shop", "pay", [4]),
        ("shop", "pay", [14]),
    ]
    assert state_of(outcome, "shop")["receipts[1]"] == ("paid 2", "would pay 4")


def test_it_is_what_the_new_code_does() -> None:
    outcome = Fleet().what_if(changes={"shop": Twice}, effects=lambda call: f"paid {call.arguments[0]}")
    now = Fleet(Twice)
    assert state_of(outcome, "till") == {"sold['tea']": (3, now.till.state.sold["tea"])}
    receipts = {f"receipts[{at}]": one for at, one in enumerate(now.shop.state.receipts)}
    assert {path: new for path, (_, new) in state_of(outcome, "shop").items()} == receipts


def test_a_timer_behind_the_end_of_the_logs_is_said() -> None:
    outcome = Fleet().what_if(changes={"shop": Slow})
    assert any("shop: a timer would go off at 2030-01-01T01:00:00" in note for note in outcome.notes)
    assert outcome.client_answers.missing == 3


def test_no_file_is_left_open() -> None:
    gc.collect()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        Fleet().what_if(changes={"shop": Slow})
        gc.collect()
    assert not [one for one in said if one.category is ResourceWarning]


def test_nothing_leaves_by_handlers_that_wait_at_the_end() -> None:
    Fleet().what_if(changes={"shop": Cleaning})
    assert Cleaning.sealed == [True] * 4  # of the first one in the first round too


def test_a_failure_travels_to_whoever_waits() -> None:
    outcome = Fleet().what_if(changes={"till": Loud})
    assert [(one.method, one.fate, one.count) for one in outcome.service("till").fates] == [
        ("Loud.sell", "would fail in another way", 1),
        ("Loud.sell", "would fail", 2),
    ]
    assert outcome.client_answers.changed == 3
    tree = outcome.consequences[0]
    assert (tree.service, tree.handler, tree.count) == ("till", "the answer of Loud.sell", 3)
    assert [(one.to, one.handler) for one in tree.then] == [("test", "the answer of Shop.order")]


def test_code_that_stops_its_app_gives_a_part_that_says_so() -> None:
    outcome = Fleet().what_if(changes={"till": Stopping})
    assert "KeyError" in outcome.service("till").stopped
    assert any("its outcome here ends there" in note for note in outcome.notes)
    assert outcome.is_different


def test_a_check_is_made_of_the_record_too() -> None:
    def check(fleet: Any) -> None:
        assert fleet["till"].sold.get("tea", 0) < 3, "too much tea"

    outcome = Fleet().what_if(changes={"shop": Twice}, effects="by-key", check=check)
    assert outcome.broken is not None
    assert outcome.broken_in_record is not None
    assert outcome.broken.text.startswith("too much tea")
    assert outcome.prefix is None
    assert "  in the recorded run it fails too, after till" in "\n".join(outcome_lines(outcome))


def test_orders_are_tried_by_seeds() -> None:
    outcome = Fleet().what_if(changes={"shop": Twice}, effects="by-key", seeds=4)
    assert (outcome.seeds.runs, outcome.seeds.different) == (4, 0)


def test_orders_that_end_in_another_way_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stream, "delay_ns", lambda self, sender, receiver, seed, time_ns: seed % 2 * 1_500_000_000)
    with Environment() as env:
        for name in "ab":
            env.start(Shard, name)
        fronts = [env.start(Front, name) for name in "gf"]
        for at in range(3):
            for front in fronts:
                front.send(Front.say, f"{front.name}{at}")
            env.advance(seconds=1)
        outcome = env.what_if({"f": Doubling}, seeds=3, check=lambda fleet: len(fleet["a"].lines) <= 6)
    assert (outcome.seeds.runs, outcome.seeds.different, outcome.seeds.broken) == (3, 1, 3)
    assert [(one.seed, one.count, one.broken) for one in outcome.seeds.ends] == [(0, 2, 2), (1, 1, 1)]
    assert outcome.seeds.ends[1].example.startswith("a: lines[")
    assert "  in 1, the first with seed 1: a: lines[" in "\n".join(outcome_lines(outcome))
    assert outcome.prefix is not None  # behind a message that no log has, or one that is in its place
    assert (outcome.prefix.service, outcome.prefix.inputs) == ("a", 0)


def test_new_messages_take_the_shortest_or_the_longest_recorded_delay() -> None:
    class Parted(Front, formerly=("Front",)):
        @rpc
        async def say(self, line: str) -> None:
            await immortal.multicast([self.a, self.b]).put.all(line)
            if line == "3":
                self.a.put.fork("new")

    with Environment() as env:
        shards = [env.start(Shard, name) for name in "ab"]
        front = env.start(Front, "f")
        for line in ("1", "2", "3"):
            if line == "2":
                env.partition(shards[0], front)  # its message comes 40 minutes later
            front.send(Front.say, line)
            env.advance(minutes=10 if line == "3" else 40)
            env.heal()
        shards[0].send(Shard.put, "from outside")
        env.advance(hours=1)
        for delays, place in (("recorded", 3), ("shortest", 3), ("longest", 4)):
            outcome = env.what_if({"f": Parted}, delays=delays)
            assert state_of(outcome, "a")[f"lines[{place}]"][1] == "new", delays


def test_what_a_trimmed_log_can_not_tell_is_said_with_the_earliest_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet()
    fleet.till.checkpoint()
    whole = MemorySource.summary

    def trimmed(source: MemorySource) -> LogSummary:
        summary = whole(source)
        if source.identity.instance_name != "till":
            return summary
        return replace(summary, checkpoints=summary.checkpoints[-1:], first_sequence_id=summary.last_sequence_id + 1)

    monkeypatch.setattr(MemorySource, "summary", trimmed)
    with pytest.raises(
        ReplayError, match=r"'till' has no state from before 2030-.*the earliest possible start is --from 2030-"
    ):
        fleet.what_if(changes={"shop": Twice}, effects="by-key")


def test_members_of_an_ordered_multicast_have_one_order_under_the_change() -> None:
    with Environment() as env:
        shards = [env.start(Shard, name) for name in "ab"]
        fronts = [env.start(Front, name) for name in "fg"]
        for at in range(3):
            for front in fronts:
                front.send(Front.say, f"{front.name}{at}")
            env.advance(seconds=1)
        assert not env.what_if({"a": Shard, "b": Shard, "f": Front, "g": Front}).is_different
        outcome = env.what_if({"f": Marking})
        assert outcome.equal_services == ["g"]
        lines = shards[0].state.lines
        expected = {f"lines[{at}]": (line, f"{line}!") for at, line in enumerate(lines) if line.startswith("f")}
        assert state_of(outcome, "a") == state_of(outcome, "b") == expected


def test_a_new_version_takes_over_the_state_at_the_beginning() -> None:
    fleet = Fleet()
    assert state_of(fleet.what_if(changes={"till": NewTill}), "till") == {"sold['tea']": (3, -10)}
    till = fleet.till.upgrade(NewTill)
    till.call(NewTill.sell, "tea", 1)
    same = fleet.what_if(changes={"till": NewTill})
    assert not same.is_different
    assert same.notes[0].startswith("till: up to record 3 the log was handled by versions before 2")


class Ping(Immortal):
    count: int

    def __init__(self) -> None:
        self.count = 0

    @rpc
    def hit(self, number: int) -> None:
        self.count += 1


class Endless(Ping, formerly=("Ping",)):
    @rpc
    def hit(self, number: int) -> None:
        self.count += 1
        self.hit.fork(number)


def test_services_that_call_each_other_for_ever_are_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation, "OTHER_MESSAGES_MAX", 50)
    with Environment() as env:
        env.start(Ping, "ping").send(Ping.hit, 1)
        outcome = env.what_if({"ping": Endless})
    assert "stopped after 50 messages that no log has" in outcome.notes[0]
    assert state_of(outcome, "ping") == {"count": (1, 52)}


def test_a_name_of_no_instance_is_refused() -> None:
    with pytest.raises(UsageError, match="there is no such instance"):
        Fleet().what_if(changes={"desk": Shop})


def test_the_bank_makes_no_difference_wherever_it_was_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    bank: Any = load_module(EXAMPLES / "bank", "bank")
    monkeypatch.setattr(bank, "TRANSFERS", 12)
    for env in crash_everywhere(runs_max=6):
        with env:
            for name in bank.BANKS:
                env.start(bank.Bank, name)
            teller = env.start(bank.Teller, "teller")
            for number in range(1, 13):
                teller.send(bank.Teller.take_order, bank.order(number))
            env.run()
            everything = {**dict.fromkeys(bank.BANKS, bank.Bank), "teller": bank.Teller}
            assert not env.what_if(everything).is_different
            assert not env.what_if({"teller": bank.Teller}).is_different


def test_a_module_that_catches_its_limit_is_ended(tmp_path: Path) -> None:
    """It hung for ever."""
    (tmp_path / "swallows.py").write_text(
        "while True:\n    try:\n        sum(range(99))\n    except Exception:\n        pass\n"
    )
    program = (
        "from immortal.replay.fleet import opening, player\n"
        "opening.IMPORT_S = player.CAUGHT_S = 0.1\n"
        "player.seal_process(0.1)\n"
        "opening.load_definition('swallows:App')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert re.fullmatch(r"error: the code at .*swallows\.py:\d goes on after its limit, 0\.1 s: .*\n", done.stderr)
