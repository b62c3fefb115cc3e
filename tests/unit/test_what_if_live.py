"""Shadow of a service whose log grows: what it tells, and what it does where it can't go on; the report on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from msgspec.structs import replace

import immortal
from immortal import Immortal, impulse, peer, rpc, upgrades
from immortal.appsdk.handlers.definition import definition_of
from immortal.coordinator.core.errors import LogUnavailableError
from immortal.coordinator.instances.registry import Registry
from immortal.log import LogReader
from immortal.presenters.what_if_live import LINES_MAX, LiveReport
from immortal.replay.fleet import shadow as shadow_module
from immortal.replay.fleet.shadow import Event, Found, Mark, Note, Progress, Shadow
from immortal.replay.plan import ReplayError
from immortal.testing import Environment, Instance


def pay(cents: int) -> str:
    return f"paid {cents}"


class Till(Immortal):
    sold: int

    def __init__(self) -> None:
        self.sold = 0

    @rpc
    def sell(self, count: int) -> int:
        self.sold += count
        return self.sold

    @impulse
    def noted(self, count: int) -> None: ...


class Shop(Immortal):
    till = peer(Till, "till")
    orders: int
    factor: ClassVar[int] = 1

    def __init__(self) -> None:
        self.orders = 0

    @rpc(on_error="stop")
    def order(self, count: int) -> None:
        self.orders += 1
        self.till.sell.fork(count * self.factor)

    @rpc
    async def ask(self, count: int) -> int:
        await immortal.effect(pay, count)
        return await self.till.sell(count * self.factor)


class Twice(Shop, formerly=("Shop",)):
    factor = 2


class Quiet(Shop, formerly=("Shop",)):
    @rpc(on_error="stop")
    def order(self, count: int) -> None:
        self.orders += 2
        self.till.sell.fork(count)


class Stopping(Shop, formerly=("Shop",)):
    @rpc(on_error="stop")
    def order(self, count: int) -> None:
        raise KeyError(count)


class Failing(Shop, formerly=("Shop",)):
    @rpc
    def order(self, count: int) -> None:
        raise KeyError(count)


@upgrades(Shop)
class NewShop(Shop):
    @classmethod
    def upgrade(cls, old: Shop) -> NewShop:
        new = cls()
        new.orders = old.orders
        return new


class GrowingReader(LogReader):
    """Reader of the log in memory of an instance, which is another one after a crash."""

    def __init__(self, instance: Instance[Any]) -> None:
        self._node = instance._node
        self.is_away = False
        super().__init__(self._backend)
        self.identity = replace(self.identity, instance_name=instance.name)
        self.trusts_pickle = True

    @property
    def _backend(self) -> Any:
        if self.is_away:
            raise LogUnavailableError("nobody is there")
        return self._node.store.backend

    @_backend.setter
    def _backend(self, value: object) -> None: ...


class Scene:
    def __init__(self, folder: Path) -> None:
        self.env = Environment()
        self.till = self.env.start(Till, "till")
        self.shop: Instance[Any] = self.env.start(Shop, "shop", effects={pay: pay})
        registry = Registry(folder / "home")
        registry.register("shop", "tcp://127.0.0.1:*")
        registry.remember_app("shop", f"{__name__}:Shop")
        self.registry = registry
        self.told: list[Event] = []

    def shadow(self, cls: type[Immortal], mark: Mark | None = None, begin_ns: int | None = None) -> Shadow:
        self.reader, mark = GrowingReader(self.shop), mark or Mark()
        one = Shadow(self.registry, self.reader, definition_of(cls), mark, begin_ns, self.told.append, note)
        one.start()
        return one

    def follow(self, shadow: Shadow) -> list[Event]:
        """Let it compare what there is; return what it told since the last time."""
        while shadow.round() or shadow.round():
            pass
        shadow.report_progress()
        told, self.told[:] = self.told[:], []
        return told


def note(record: int, side: str) -> None: ...


def texts(events: list[Event]) -> list[str]:
    return [one.text for one in events if not isinstance(one, Progress)]


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.setattr(shadow_module, "RETRY_S", 0.0)
    scene = Scene(tmp_path)
    yield scene
    scene.env.close()


def test_each_record_is_compared_as_it_comes(scene: Scene) -> None:
    shadow = scene.shadow(Twice)
    assert texts(scene.follow(shadow)) == ["from checkpoint 1 (before record 0) on"]
    scene.shop.call(Shop.order, 3)
    found, progress = scene.follow(shadow)
    assert isinstance(found, Found)
    assert (found.kind, found.to, found.handler, found.message) == ("changed", "till", "Till.sell", 0)
    assert "was Till.sell(3); would be Till.sell(6)" in found.text
    assert isinstance(progress, Progress)
    assert (progress.record, progress.same) == (found.record, 1)  # the answer
    assert scene.follow(shadow) == []


def test_a_changed_call_that_is_awaited_names_what_began_it(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shadow_module, "WAITING_MAX", 1)
    shadow = scene.shadow(Twice)
    scene.shop.call(Shop.ask, 3)
    changed, missing, *states = texts(scene.follow(shadow))[1:]
    assert ", in Shop.ask(3) " in changed
    assert "was Till.sell(3) as call" in changed
    assert "would be Till.sell(6) as a new call of shop" in changed
    assert missing.startswith("the answer 3 of Till.sell")
    assert missing.endswith("would not be")
    assert any("$waiting" in one for one in states)
    scene.shop.call(Shop.ask, 3)
    assert "over 1 handlers of the new code wait" in texts(scene.follow(shadow))[-1]


def test_many_differences_of_a_record_are_counted(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shadow_module, "TEXTS_MAX", 3)
    shadow = scene.shadow(Twice)
    for count in range(1, 3):
        pending = [scene.shop.begin(Shop.order, count) for _ in range(4)]
        scene.env.run()
        assert all(one.done for one in pending)
    told = [one for one in scene.follow(shadow) if isinstance(one, Found) and one.to == "till"]
    assert [(one.record, one.count) for one in told] == [(1, 1), (1, 1), (1, 2), (2, 4)]


def test_failures_of_a_record_are_counted(scene: Scene) -> None:
    shadow = scene.shadow(Failing)
    for count in range(3):
        scene.shop.begin(Shop.order, count)
    scene.env.run()
    told = [one for one in scene.follow(shadow) if isinstance(one, Found) and one.kind == "would fail"]
    assert [(one.record, one.handler, one.count) for one in told] == [(1, "Failing.order", 3)]


def test_a_part_of_the_state_is_told_once(scene: Scene) -> None:
    shadow = scene.shadow(Quiet)
    scene.shop.call(Shop.order, 1)
    assert texts(scene.follow(shadow))[1:] == ["the state: orders: was 1; would be 2"]
    scene.shop.call(Shop.order, 1)
    assert texts(scene.follow(shadow)) == []


def test_code_that_stops_goes_on_at_the_next_checkpoint(scene: Scene) -> None:
    shadow = scene.shadow(Stopping)
    scene.shop.call(Shop.order, 1)
    *_, stops, note = texts(scene.follow(shadow))
    assert stops.startswith("would stop its app at record 1, message 0: Stopping.order raised KeyError")
    assert "\n" not in stops
    assert note.startswith("the new code stops at record ")
    scene.shop.call(Shop.ask, 1)
    assert texts(scene.follow(shadow)) == []
    scene.shop.checkpoint()
    (begun,) = texts(scene.follow(shadow))
    assert "are not compared" in begun
    scene.shop.call(Shop.ask, 1)
    assert texts(scene.follow(shadow)) == []


def test_crashes_change_nothing(scene: Scene) -> None:
    shadow = scene.shadow(Twice)
    scene.shop.call(Shop.order, 1)
    scene.shop.crash()
    scene.shop.recover()
    scene.shop.call(Shop.order, 1)
    scene.shop.crash_app()
    scene.shop.recover()
    scene.shop.call(Shop.order, 1)
    assert len(texts(scene.follow(shadow))) == 4


def test_it_begins_again_behind_an_upgrade(scene: Scene) -> None:
    shadow = scene.shadow(NewShop)
    scene.shop.call(Shop.order, 1)
    assert len(texts(scene.follow(shadow))) == 1
    scene.shop = scene.shop.upgrade(NewShop)
    scene.registry.remember_app("shop", f"{__name__}:NewShop")
    scene.shop.call(NewShop.order, 1)
    ended, begun = texts(scene.follow(shadow))
    assert ended.startswith("version 2 has taken over")
    assert begun.startswith("from checkpoint ")
    scene.shop.call(NewShop.order, 1)
    assert texts(scene.follow(shadow)) == []


def test_code_that_does_not_take_the_state_is_tried_now_and_then(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Any] = []

    def refuse(*given: Any, **named: Any) -> None:
        tried.append(given)
        raise ReplayError("it does not take the state")

    monkeypatch.setattr(shadow_module, "Screening", refuse)
    monkeypatch.setattr(shadow_module, "STATES_SHARE", 1e9)
    shadow = Shadow(
        scene.registry, GrowingReader(scene.shop), definition_of(Twice), Mark(), None, scene.told.append, note
    )
    assert texts(scene.follow(shadow)) == ["it does not take the state; it begins again at the next checkpoint"]
    assert texts(scene.follow(shadow)) == []
    assert len(tried) == 1


def test_impulses_to_others_are_no_calls_of_handlers(scene: Scene) -> None:
    shadow = scene.shadow(Twice)
    for count in range(1, 4):
        scene.shop.run_hook(lambda shop, impulses: impulses.till.noted(7))
        scene.shop.call(Shop.order, count)
        assert f"would be Till.sell({2 * count})" in texts(scene.follow(shadow))[-1]


def test_a_log_that_is_away_is_waited_for(scene: Scene) -> None:
    shadow = scene.shadow(Twice)
    scene.follow(shadow)
    scene.shop.call(Shop.order, 1)
    scene.reader.is_away = True
    assert texts(scene.follow(shadow)) == ["nobody is there; it is tried again"]
    assert texts(scene.follow(shadow)) == []
    scene.reader.is_away = False
    found, goes_on = texts(scene.follow(shadow))
    assert "would be Till.sell(2)" in found
    assert goes_on == "it continues"


def test_a_log_that_was_cut_is_told(scene: Scene) -> None:
    shadow = scene.shadow(Twice)
    for _ in range(3):
        scene.shop.call(Shop.order, 1)
    (*_, last) = scene.follow(shadow)
    assert isinstance(last, Progress)
    scene.shop._node.store.cut(last.record)
    ended, begun = texts(scene.follow(shadow))
    assert ended.startswith(f"the log ends with record {last.record - 1} now")
    assert begun.startswith("from checkpoint 1 ")


def test_code_that_does_not_repeat_the_log_is_no_base(scene: Scene) -> None:
    scene.registry.remember_app("shop", f"{__name__}:Twice")  # the app runs Shop
    shadow = scene.shadow(Shop)
    scene.shop.call(Shop.order, 1)
    scene.follow(shadow)
    scene.shop.call(Shop.order, 1)
    assert texts(scene.follow(shadow))[0].startswith("there is nothing to compare with: 'shop' does not do again")


def test_another_process_tells_nothing_again(scene: Scene) -> None:
    first = scene.shadow(Twice)
    scene.shop.call(Shop.order, 1)
    (*_, last) = scene.follow(first)
    assert isinstance(last, Progress)
    again = scene.shadow(Twice, Mark(last.record, -1))
    scene.shop.call(Shop.order, 7)
    _, found = texts(scene.follow(again))
    assert "was Till.sell(7)" in found
    scene.shop.checkpoint()
    behind = scene.shadow(Twice, Mark(last.record, last.record + 1), begin_ns=1)
    assert "are not compared" in texts(scene.follow(behind))[0]


def test_it_begins_at_a_time(scene: Scene) -> None:
    begin_ns = int(scene.env.now.timestamp() * 1e9)
    scene.env.advance(seconds=5)
    scene.shop.call(Shop.order, 1)
    scene.shop.checkpoint()
    assert len(texts(scene.follow(scene.shadow(Twice)))) == 1
    assert len(texts(scene.follow(scene.shadow(Twice, begin_ns=begin_ns)))) == 2


# --- the report -------------------------------------------------------------------------------------------------------


def found(record: int, kind: str = "changed") -> Found:
    return Found("shop", kind, "till", "Till.sell", record, 0, 0, 0.25, "was <b>1</b>; would be 2")


def test_a_report_shows_the_first_lines_of_a_handler_and_counts_the_others() -> None:
    report = LiveReport({"shop": "shop_v2:Shop"})
    assert not report.is_different
    lines = [report.add(found(record)) for record in range(LINES_MAX + 5)]
    assert lines[0] == "shop, record 0, message 0: was <b>1</b>; would be 2 (0.2 s later)"
    assert lines[LINES_MAX - 1].endswith("; further ones like this are only counted")
    assert lines[LINES_MAX:] == [""] * 5
    assert report.add(found(99, "missing"))
    assert report.add(replace(found(100, "missing"), count=41))
    shown = "\n".join(report.lines())
    assert "shop     till  Till.sell  changed         15" in shown
    assert "shop     till  Till.sell  missing         42" in shown
    assert shown.endswith("\ndifferent")
    page = report.page()
    assert '<meta http-equiv="refresh"' in page
    assert "was &lt;b&gt;1&lt;/b&gt;" in page


def test_a_report_goes_on_with_the_counts_of_an_earlier_process() -> None:
    report = LiveReport({"shop": "shop_v2:Shop"})
    report.add(Note("shop", "from checkpoint 1 on", follows=True))
    assert report.marks == {"shop": Mark()}
    report.add(Progress("shop", 7, 10, 8, 0.1))
    report.add(Progress("shop", 9, 12, 9, 0.1))
    report.note_restart("shop", 10)
    assert report.marks == {"shop": Mark(9, 10)}
    report.add(Note("shop", "it ended", follows=False))
    assert report.following == {"shop": False}
    assert "not followed at the end: shop" in report.lines()
    report.add(Note("shop", "from checkpoint 2 on", follows=True))
    assert report.marks == {"shop": Mark(9, 10)}  # with --from it would come to that record again
    report.add(Progress("shop", 12, 3, 3, 0.2))
    assert report.totals == [Progress("shop", 12, 15, 12, 0.2)]
    assert report.line == "15 messages, 12 calls the same, 0 different, 0.2 s behind"
    assert not report.is_different
    assert list(report.lines())[-1] == (
        "no difference in the compared records; the notes say which records of shop were not compared"
    )
