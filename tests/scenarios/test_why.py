"""`immortal why`: a value of a planted bug is followed from line to line through three services to its input."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from immortal.coordinator.config import InstanceSettings
from immortal.coordinator.instances import own_logs
from immortal.coordinator.instances.registry import Registry
from immortal.replay.travel.sessions import Sessions
from immortal.replay.why import Explainer, Step
from tests.helpers.cli import HOME, immortal
from tests.helpers.recorded import Instances, load_module, write_module
from tests.helpers.waiting import EffectsByHand, WaitingInstances

SOURCE = """
import asyncio
from datetime import timedelta

import immortal
from immortal import Immortal, impulse, peer, rpc



def thermometer() -> int:
    return 0


PRICES = {"tea": 5, "rice": 2}


class Till(Immortal):
    sold: dict[str, int]
    mode: str
    day: int = 1

    def __init__(self) -> None:
        self.sold = {}
        self.mode = "open"

    @rpc
    def take(self, item: str, amount: int) -> None:
        self._add(item, amount)
        self._count()

    def _add(self, item: str, amount: int) -> None:
        self.sold[item] = self.sold.get(item, 0) + amount

    def _count(self) -> None: ...

    @rpc
    def switch(self, mode: str) -> None:
        self.mode = mode

    @rpc
    def total(self, item: str) -> int:
        if item in self.sold:
            return self.sold[item]
        return 0


class Shop(Immortal):
    till = peer(Till, "till")

    @rpc
    def order(self, item: str, count: int) -> None:
        self.till.take.fork("nothing", 0)
        price = PRICES[item]
        if count >= 3:
            price = price * count  # the planted bug: the line below does so as well
        self.till.take.fork(item, price * count)


class Front(Immortal):
    shop = peer(Shop, "shop")
    till = peer(Till, "till")
    known: dict[str, int]
    heard: list[str]

    def __init__(self) -> None:
        self.known = {}
        self.heard = []

    @impulse
    def buy(self, item: str, count: int) -> None:
        self.shop.order.fork(item, count)

    @impulse
    def switch(self, mode: str) -> None:
        self.till.switch.fork(mode)

    @impulse
    async def ask(self, item: str) -> None:
        answer = await self.till.total(item)
        await immortal.step(self.note, item, answer)

    @rpc
    def note(self, item: str, answer: int) -> None:
        self.known[item] = answer

    @impulse
    async def wait(self, who: str) -> None:
        word = await immortal.event("word", str)
        await immortal.step(self.hear, who, word)

    @rpc
    def hear(self, who: str, word: str) -> None:
        self.heard.append(f"{who}: {word}")

    @impulse
    async def compare(self, one: str, two: str) -> None:
        first, second = await asyncio.gather(self.till.total(one), self.till.total(two))
        await immortal.step(self.note, "first", first)
        await immortal.step(self.note, "second", second)

    @impulse
    async def sleep(self) -> None:
        await immortal.sleep(timedelta(hours=1))
        await immortal.step(self.hear, "clock", "an hour")

    @impulse
    async def measure(self) -> None:
        heat = await immortal.effect(thermometer)
        await immortal.step(self.note, "heat", heat)

    @impulse
    def say(self, word: str) -> None:
        immortal.signal("word", word)
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three orders, of which one has the wrong price, with checkpoints between them."""
    folder = tmp_path_factory.mktemp("why")
    registry = Registry(folder / HOME)
    name = write_module(folder, SOURCE)
    module = load_module(folder, name)
    effects = EffectsByHand()
    for service in ("till", "shop", "front"):
        registry.register(service, "tcp://127.0.0.1:*", app=f"{name}:{service.capitalize()}", keep_checkpoints="all")
    classes = {"till": module.Till, "shop": module.Shop, "front": module.Front}
    instances = WaitingInstances(registry.home, classes, effects)
    front = instances["front"]

    def checkpoints() -> None:
        for one in instances._running.values():
            one.checkpoint()

    front.impulse("buy", "tea", 2)
    checkpoints()
    front.impulses([("buy", ("rice", 1)), ("buy", ("tea", 4)), ("buy", ("rice", 2))])
    for mode in ("shut", "open"):
        front.impulse("switch", mode)
    checkpoints()
    front.impulse("ask", "tea")
    front.impulse("wait", "ann")
    front.impulse("buy", "rice", 1)
    front.impulse("say", "hello")
    checkpoints()
    front.impulse("compare", "coffee", "tea")
    front.impulse("sleep")
    front.impulse("measure")
    effects.waiting[0].returned(21)
    instances.settle()
    instances.pass_time(2 * 3600)
    instances.close()
    return folder


@pytest.fixture
def explainer(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Explainer]:
    monkeypatch.chdir(home)
    registry = Registry(home / HOME)
    sessions = Sessions(registry.home)
    yield Explainer(registry, sessions)
    sessions.close()


def chain(step: Step) -> list[tuple[str, str, str]]:
    """(instance, call, line) from the newest to the oldest, by the first cause of each."""
    found = []
    while True:
        found.append((step.instance, step.call, "" if step.line is None else step.line["text"]))
        if not (causes := calls(step)):
            return found
        step = causes[0]


def calls(step: Step) -> list[Step]:
    """The causes of a message, without what set the values that it read."""
    return [one for one in step.causes if one.role != "set"]


def test_messages_are_followed_as_long_as_there_is_time(home: Path, explainer: Explainer) -> None:
    late = Explainer(explainer._registry, explainer._sessions, limit_s=-1.0)
    step = late.explain("till", 'sold["tea"]').step
    assert (step.call, step.note, step.causes) == ("", "not followed further: the time was up", [])


def test_each_log_is_read_in_its_turn(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that asks why reads logs that other requests read: a process can't open one twice."""
    monkeypatch.chdir(home)
    held: list[str] = []
    opened = own_logs.open_reader

    @contextmanager
    def locked(settings: InstanceSettings) -> Iterator[None]:
        held.append(settings.name)
        yield
        held.remove(settings.name)

    def open_reader(settings: InstanceSettings, **options: Any) -> Any:
        assert settings.name in held
        return opened(settings, **options)

    monkeypatch.setattr(own_logs, "open_reader", open_reader)
    registry = Registry(home / HOME)
    sessions = Sessions(registry.home, locked)
    found = Explainer(registry, sessions).explain("till", 'sold["tea"]')
    sessions.close()
    assert [instance for instance, _, _ in chain(found.step)] == ["till", "shop", "front"]


def test_a_wrong_price_is_found_through_three_services_by_one_command(home: Path) -> None:
    found = json.loads(immortal(home, "why", "till", 'sold["tea"]', "--json"))
    assert (found["before"], found["value"]) == ("10", "90")
    steps = [found["step"]]
    while causes := [one for one in steps[-1]["causes"] if one["role"] != "set"]:
        steps += causes
    assert [(one["instance"], one["call"], one["line"]["text"]) for one in steps] == [
        ("till", "Till.take('tea', 80)", "self.sold[item] = self.sold.get(item, 0) + amount"),
        ("shop", "Shop.order('tea', 4)", "self.till.take.fork(item, price * count)"),
        ("front", "Front.buy('tea', 4)", "self.shop.order.fork(item, count)"),
    ]
    assert steps[0]["line"]["function"] == "Till._add"
    assert SOURCE.splitlines()[steps[0]["line"]["line"] - 1].strip() == steps[0]["line"]["text"]
    assert steps[-1]["outside"] == "an impulse of front"
    text = immortal(home, "why", "till", 'sold["tea"]')
    assert text.startswith('till: sold["tea"] is 90, and was 10 before this:\ntill ')
    assert "<- shop " in text
    assert text.endswith("from outside: an impulse of front\n")
    place = f"{steps[0]['record']}:{steps[0]['message']}"
    assert f"till {place}  {steps[0]['time']}  Till.take('tea', 80)" in text


def test_an_earlier_moment_has_an_earlier_cause(home: Path, explainer: Explainer) -> None:
    found = explainer.explain("till", "sold['tea']")
    assert found.step.record is not None
    before = found.step.record - 1
    text = immortal(home, "why", "till", "sold['tea']", "--at", str(before))
    assert "is 10, and was absent before" in text
    assert "Front.buy('tea', 2)" in text
    assert immortal(home, "why", "till", "sold['tea']", "--at", "2100-01-01").split("\n")[0] == found_head(found)


def found_head(found: Any) -> str:
    return next(found.lines())


def test_a_value_that_changed_and_changed_back_has_its_last_change(explainer: Explainer) -> None:
    found = explainer.explain("till", "mode")
    assert (found.before, found.value) == ('"shut"', '"open"')
    assert chain(found.step)[-1] == ("front", "Front.switch('open')", "self.till.switch.fork(mode)")


def test_an_answer_is_a_cause_and_so_is_what_began_the_handler(explainer: Explainer) -> None:
    found = explainer.explain("front", "known['tea']")
    step = found.step
    assert step.call.startswith("the answer 90 of Till.total")
    assert step.handler == "Front.ask('tea')"
    assert step.line is not None
    assert step.line["text"] == "self.known[item] = answer"
    sent, began = calls(step)
    assert (sent.instance, sent.role, sent.call.split(" as ")[0]) == ("till", "sent", "Till.total('tea')")
    assert sent.line is not None
    assert sent.line["text"] == "return self.sold[item]"
    (asked,) = calls(sent)
    assert (asked.call, asked.line and asked.line["text"]) == (
        "Front.ask('tea')",
        "answer = await self.till.total(item)",
    )
    assert asked.outside == "an impulse of front"
    assert (began.role, began.call, began.record, began.note) == ("began", "Front.ask('tea')", asked.record, "as above")


def test_an_answer_that_a_handler_had_before_is_a_cause(explainer: Explainer) -> None:
    step = explainer.explain("front", "known['first']").step
    sent, had, began = calls(step)
    assert [one.role for one in calls(step)] == ["sent", "had", "began"]
    assert sent.line is not None
    assert sent.line["text"] == "return self.sold[item]"
    assert had.call.startswith("the answer 0 of Till.total")
    assert not had.note
    (answered,) = calls(had)
    assert (answered.call.split(" as ")[0], answered.line and answered.line["text"]) == (
        "Till.total('coffee')",
        "return 0",
    )
    assert began.call == "Front.compare('coffee', 'tea')"


def test_an_event_is_a_cause_and_so_is_what_began_the_handler(explainer: Explainer) -> None:
    step = explainer.explain("front", "heard[0]").step
    assert (step.call, step.handler) == ("Front.say('hello')", "Front.wait('ann')")
    assert step.outside == "an impulse of front"
    (began,) = calls(step)
    assert (began.call, began.outside) == ("Front.wait('ann')", "an impulse of front")


def test_timers_and_results_of_effects_come_from_outside(explainer: Explainer) -> None:
    for path, outside, handler in (
        ("heard[1]", "a timer", "Front.sleep()"),
        ("known['heat']", "the result of an effect", "Front.measure()"),
    ):
        step = explainer.explain("front", path).step
        assert (step.outside, step.handler) == (outside, handler)
        (began,) = calls(step)
        assert (began.call, began.outside) == (handler, "an impulse of front")


@pytest.fixture
def versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Explainer]:
    """A log of two versions: the second one converts ``total``, and both count."""
    old = write_module(tmp_path, COUNTER)
    first = load_module(tmp_path, old)
    monkeypatch.syspath_prepend(tmp_path)
    new = write_module(tmp_path, COUNTER_2.format(old=old))
    second = load_module(tmp_path, new)
    instances = Instances(tmp_path)
    counter = instances.start("counter", first.Counter)
    for who in ("ann", "bob", "eve"):
        counter.impulse("add", who)
    instances.stop("counter")
    instances.start("counter", second.Counter, upgrade_to=2).impulse("add", "eve")
    instances.close()
    registry = Registry(tmp_path)
    registry.register("counter", "tcp://127.0.0.1:*")
    registry.remember_app("counter", f"{new}:Counter")
    monkeypatch.chdir(tmp_path)
    sessions = Sessions(tmp_path)
    yield Explainer(registry, sessions)
    sessions.close()


COUNTER = """
from immortal import Immortal, impulse


class Counter(Immortal):
    total: int
    seen: dict[str, int]

    def __init__(self) -> None:
        self.total = 0
        self.seen = {}

    @impulse
    def add(self, who: str) -> None:
        self.seen[who] = self.seen.get(who, 0) + 1
"""

COUNTER_2 = """
from {old} import Counter as One
from immortal import upgrades


@upgrades(One)
class Counter(One):
    @classmethod
    def upgrade(cls, old: One) -> "Counter":
        new = cls.__new__(cls)
        new.total, new.seen = 100, old.seen
        return new
"""


def test_a_value_of_a_version_before_is_found(versions: Explainer) -> None:
    step = versions.explain("counter", "seen['bob']").step
    assert (step.record, step.call) == (2, "Counter.add('bob')")
    assert step.line is not None


def test_what_an_upgrade_converted_is_no_messages_doing(versions: Explainer) -> None:
    found = versions.explain("counter", "total")
    assert (found.before, found.value, found.step.record) == ("0", "100", None)
    assert found.step.note == "the upgrade after record 3 converted it, and no message changed it"


def test_what_set_the_values_that_it_read_comes_below_and_can_be_left_out(home: Path, explainer: Explainer) -> None:
    (read,) = [one for one in explainer.explain("till", "sold['tea']").step.causes if one.role == "set"]
    assert (read.path, read.call) == ("sold['tea']", "Till.take('tea', 10)")
    assert chain(read)[-1][1] == "Front.buy('tea', 2)"
    assert "reading sold['tea'], of till " in immortal(home, "why", "till", "sold['tea']")
    assert "reading" not in immortal(home, "why", "till", "sold['tea']", "--reads", "0")


def test_a_limit_ends_the_way_and_says_so(home: Path) -> None:
    text = immortal(home, "why", "till", "sold['tea']", "--steps", "2")
    assert "<- shop" in text
    assert text.endswith("not followed further: --steps is the limit\n")


def test_a_service_without_a_log_ends_the_way_and_is_named(home: Path, tmp_path: Path) -> None:
    copied = tmp_path / "copy"
    shutil.copytree(home, copied)
    shutil.rmtree(copied / HOME / "shop" / "log")
    assert "what made this call is not known: the log of shop is not here" in immortal(copied, "why", "till", "sold")
    shutil.rmtree(copied / HOME / "shop")
    text = immortal(copied, "why", "till", "sold")
    assert re.search(r"<- shop\n +what made this call is not known: ", text)


def test_paths_that_lead_nowhere(home: Path) -> None:
    def said(*arguments: str, status: int = 1) -> str:
        return immortal(home, "why", *arguments, status=status)

    assert "'sold[' names no value: such as balances[3]" in said("till", "sold[")
    assert "till has no value at sold['coffee'], now or before" in said("till", "sold['coffee']")
    assert "front has no value at till" in said("front", "till")
    assert "till: day is 1 since the first start: __init__ made it" in said("till", "day")
    assert "record 999 is not in the log yet" in said("till", "sold", "--at", "999")
    assert "has no message 7" in said("till", "sold", "--at", "1:7")
    assert "'nobody'" in said("nobody", "sold")
    assert "Missing argument 'PATH'" in said("till", status=2)


def test_the_fewest_inputs_become_a_test_that_fails_once_the_bug_is_gone(home: Path, tmp_path: Path) -> None:
    case = tmp_path / "test_case.py"
    arguments = "why", "till", "sold['tea']", "--export", str(case)
    text = immortal(home, *arguments)
    # 90 is 10 + 80: both orders are needed, and nothing else
    assert "inputs since the first start that give it this value: 2 of 6, of which none can be left out" in text
    assert [line.split("  ")[2] for line in text.splitlines()[-2:]] == ["Till.take('tea', 10)", "Till.take('tea', 80)"]
    assert "service.begin(Till.take, 'tea', 80)\n" in case.read_text()
    ran = run_pytest(home, case)
    assert ran.returncode == 0, ran.stdout
    case.write_text(case.read_text().replace("'tea', 80", "'tea', 20"))
    assert run_pytest(home, case).returncode == 1
    assert f"{case} is there already" in immortal(home, *arguments, status=1)


def test_what_can_not_be_is_refused_in_one_line(home: Path) -> None:
    said = immortal(home, "why", "till", "mode", "--export", "missing/test_case.py", status=1)
    assert (
        said
        == "error: --export missing/test_case.py: the folder missing does not exist: create it, or give another path\n"
    )
    assert "a number of at most 18 digits" in immortal(home, "why", "till", "mode", "--at", "9" * 30, status=2)


def test_code_that_ends_its_process_is_named_with_its_status(home: Path, tmp_path: Path) -> None:
    shutil.copytree(home, copied := tmp_path / "copy")
    module = next(path for path in copied.glob("*.py"))
    module.write_text(module.read_text() + "\nimport os\nos._exit(7)\n")
    said = immortal(copied, "why", "till", "mode", status=1)
    assert said.startswith("error: the process that replays till has ended (status 7): ")


def test_a_replay_that_hangs_is_ended_in_the_time_that_was_given(home: Path, tmp_path: Path) -> None:
    shutil.copytree(home, copied := tmp_path / "copy")
    module = next(path for path in copied.glob("*.py"))
    module.write_text(module.read_text().replace("        self.mode = mode\n", "        while True: pass\n"))
    said = immortal(copied, "why", "till", "mode", "--timeout-s", "2", status=1)
    assert said.startswith("error: the replay of till did not answer for 2 s, and was ended: a handler hangs")


def run_pytest(home: Path, case: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(case.parent), str(case)],
        env={**os.environ, "PYTHONPATH": str(home)},
        capture_output=True,
        text=True,
    )


def test_the_fewest_inputs_of_a_handler_that_waits_are_its_own(home: Path, tmp_path: Path) -> None:
    found = json.loads(immortal(home, "why", "front", "known['tea']", "--minimal", "--json"))["minimal"]
    assert [one["call"].split(" of ")[0] for one in found["inputs"]] == ["Front.ask('tea')", "the answer 90"]
    case = tmp_path / "test_case.py"
    said = immortal(home, "why", "front", "known['tea']", "--export", str(case), status=1)
    assert "a test can't send record" in said
    assert not case.exists()
    said = immortal(home, "why", "front", "$waiting", "--minimal", status=1)
    assert "'$waiting': the fewest inputs are found for an attribute" in said
