"""Upgrades: what ``@upgrades`` takes, which class runs when, and what happens when an upgrade fails."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import datetime
from types import ModuleType
from typing import Any

import pytest

import immortal
from immortal import Immortal, Transient, peer, rpc, upgrades
from immortal.appsdk.dispatch.events import BecamePrimary
from immortal.appsdk.handlers.definition import definition_of
from immortal.appsdk.state.schema import decode_envelope
from immortal.errors import EXIT_UPGRADE_FAILED, DefinitionError, StateError, UpgradeError
from immortal.protocol.errors import RemoteProtocolError
from immortal.protocol.extensions import decode_app_description, decode_hello
from immortal.protocol.messages import MessageType
from tests.helpers.sdk import TAKE, TAKE_FIRST, Life, first_start, recover, upgrade_record
from tests.helpers.wire import call, checkpoint_record, initial_record, logged


class Sink(Immortal):
    @rpc(id=9)
    def take(self, text: str) -> None:
        pass


class CounterV1(Immortal):
    sink = peer(Sink, "sink")
    count: int

    def __init__(self) -> None:
        self.count = 0

    @rpc(id=1)
    def add(self, amount: int) -> None:
        self.count += amount
        self.sink.take.fork(f"V1 {self.count}")


@upgrades(CounterV1)
class CounterV2(Immortal):
    other = peer(Sink, "other")
    total: int
    upgraded_at: datetime
    lot: float
    history: Transient[list[int]]

    def __init__(self) -> None:
        self.total = 0
        self.upgraded_at = immortal.now()
        self.lot = immortal.random.random()

    def prepare(self) -> None:
        self.history = [self.total]

    @classmethod
    def upgrade(cls, old: CounterV1) -> CounterV2:
        new = cls()
        new.total = old.count
        return new

    @rpc(id=1)
    def add(self, amount: int) -> None:
        self.total += 10 * amount
        self.history.append(self.total)
        self.other.take.fork(f"V2 {self.total}")

    @rpc(id=2)
    def reset(self) -> None:
        self.total = 0


@upgrades(CounterV2)
class CounterV3(Immortal):
    totals: list[int]

    def upgrade(cls, old: CounterV2) -> CounterV3:  # noqa: N805 (the decorator makes it a class method)
        new: CounterV3 = CounterV3.__new__(CounterV3)
        new.totals = old.history
        return new

    @rpc(id=1)
    def add(self, amount: int) -> None:
        self.totals.append(amount)


@upgrades(CounterV2)
class BackToV1(CounterV1, version=1, formerly=("CounterV1",)):
    @classmethod
    def upgrade(cls, old: CounterV2) -> BackToV1:
        new = cls()
        new.count = old.total
        return new


def old_life() -> tuple[bytes, list[bytes]]:
    """The first checkpoint of a CounterV1, and the records behind it."""
    life = Life.of(CounterV1)
    life.give(TAKE_FIRST)
    return life.output.blobs[0], [initial_record(life.output.initial_message), logged(1, [call(1, 5)])]


def versions_of(life: Life) -> list[int]:
    return [decode_envelope(blob)[0].version for blob in life.output.blobs]


def restored(app: type, blob: bytes, *records: bytes) -> Life:
    life = Life.of(app)
    life.give(checkpoint_record(blob) + b"".join(records))
    return life


def test_versions() -> None:
    versions = [definition_of(cls).version for cls in (CounterV1, CounterV2, CounterV3, BackToV1)]
    assert versions == [1, 2, 3, 1]
    assert [definition.cls for definition in definition_of(CounterV3).chain] == [CounterV3, CounterV2, CounterV1]

    class Seventh(Immortal, version=7):
        pass

    @upgrades(Seventh)
    class Eighth(Seventh):
        def upgrade(cls, old: Seventh) -> Eighth:  # noqa: N805
            return cls()  # type: ignore[operator,no-any-return]

    assert definition_of(Eighth).version == 8
    assert isinstance(Eighth.upgrade(Seventh()), Eighth)  # type: ignore[arg-type,call-arg]


def test_hello_and_description_are_the_main_class_s() -> None:
    life = restored(CounterV2, old_life()[0])
    assert decode_hello(life.output.messages[0].data).label.endswith(":CounterV2")
    assert life.sent_types[1] == MessageType.APP_DESCRIPTION
    assert decode_app_description(life.output.messages[1].data).version == 2


@pytest.mark.parametrize("version", [2, None])
def test_an_upgrade_as_the_coordinator_asks_for_it(version: int | None) -> None:
    """8 + blob, records, 10, 8 + blob, 2, 8 + blob: only then primary."""
    blob, records = old_life()
    life = restored(CounterV2, blob, *records)
    assert type(life.dispatcher.instance) is CounterV1
    assert life.dispatcher.definition is definition_of(CounterV1)
    upgraded = life.give(upgrade_record(version))
    assert type(upgraded) is CounterV2
    assert life.dispatcher.definition is definition_of(CounterV2)
    assert (upgraded.total, upgraded.history) == (5, [5])
    assert life.events == []
    life.give(TAKE)
    assert life.events == [BecamePrimary()]
    assert versions_of(life) == [2, 2]
    assert life.output.blobs[0] == life.output.blobs[1]
    life.give(logged(2, [call(1, 1), call(2), call(1, 1)]))
    assert upgraded.total == 10
    assert life.output.calls == [("sink", 9, ("V1 5",)), ("other", 9, ("V2 15",)), ("other", 9, ("V2 10",))]
    assert [sent for sent in life.sent_types if sent != MessageType.ATTACH_TO][2:] == [
        MessageType.STREAM_BATCH,
        MessageType.CHECKPOINT,
        MessageType.CHECKPOINT,
        MessageType.STREAM_BATCH,
    ]
    life.give(TAKE)
    assert life.events == [BecamePrimary()]  # once
    again = recover(CounterV2, life.output.blobs[-1])
    assert (again.dispatcher.instance.total, again.dispatcher.instance.history) == (10, [10])
    assert again.dispatcher.instance.upgraded_at == upgraded.upgraded_at


def test_the_old_code_runs_until_it_is_told() -> None:
    blob, records = old_life()
    life = restored(CounterV2, blob, *records)
    life.give(TAKE_FIRST)
    assert life.events == [BecamePrimary()]
    assert versions_of(life) == [1]
    assert type(life.dispatcher.instance) is CounterV1
    with pytest.raises(RemoteProtocolError, match="after the app was told that it is primary"):
        life.give(upgrade_record(2))


def test_what_if_of_an_upgrade() -> None:
    blob, records = old_life()
    life = Life.of(CounterV2)
    life.give(checkpoint_record(blob) + upgrade_record(2, MessageType.UPGRADE_SERVICE) + b"".join(records))
    assert life.dispatcher.instance.total == 50
    assert life.output.blobs == []
    life.give(TAKE)
    assert versions_of(life) == [2]
    assert life.events == []  # a replay for inspection starts no hooks


def test_a_replay_across_upgrades_of_the_past() -> None:
    blob, records = old_life()
    life = restored(CounterV3, blob, *records)
    life.give(upgrade_record(2) + logged(2, [call(1, 1)]) + TAKE)
    assert versions_of(life) == [2, 2]
    assert life.events == []
    life.give(upgrade_record(3) + logged(3, [call(1, 7)]) + TAKE_FIRST)
    assert life.dispatcher.instance.totals == [5, 15, 7]
    assert versions_of(life) == [2, 2, 3, 3]
    assert life.events == [BecamePrimary()]


def test_a_chain_in_one_go_is_the_chain_step_by_step() -> None:
    blob, records = old_life()
    at_once = restored(CounterV3, blob, *records, upgrade_record(3))
    assert versions_of(at_once) == [3]
    assert at_once.dispatcher.instance.totals == [5]
    stepwise = restored(CounterV3, blob, *records, upgrade_record(2), upgrade_record(3))
    assert stepwise.output.blobs[-1] == at_once.output.blobs[-1]


def test_an_upgrade_is_the_same_each_time() -> None:
    """Also from a checkpoint with no record behind it, which has no time of its own."""
    blob, records = old_life()
    life = restored(CounterV2, blob, *records)
    life.give(TAKE)
    later = restored(CounterV2, life.output.blobs[0], upgrade_record(2))
    life.give(upgrade_record(2))
    assert later.output.blobs[-1] == life.output.blobs[-1]
    assert life.dispatcher.instance.upgraded_at.year == 2023


def test_the_way_back() -> None:
    first = first_start(CounterV2)
    first.give(logged(1, [call(1, 3)]) + TAKE)
    life = restored(BackToV1, first.output.blobs[-1])
    assert life.dispatcher.definition is definition_of(CounterV2)
    life.give(upgrade_record(1) + TAKE + logged(2, [call(1, 1)]))
    assert life.dispatcher.instance.count == 31
    assert versions_of(life) == [1, 1]
    assert life.output.calls == [("sink", 9, ("V1 31",))]
    # The first class reads what the way back wrote, once it knows the name, and the new one what the first wrote.
    assert recover(BackToV1, life.output.blobs[-1]).dispatcher.instance.count == 30
    assert type(restored(BackToV1, old_life()[0]).dispatcher.instance) is BackToV1


def test_a_replay_across_an_upgrade_and_the_way_back() -> None:
    """Two classes have version 1: the nearer one handles its records, the other one has the way to version 2."""
    blob, records = old_life()
    life = restored(BackToV1, blob, *records)
    life.give(upgrade_record(2) + logged(2, [call(1, 1)]))
    assert life.dispatcher.instance.total == 15
    life.give(upgrade_record(1) + logged(3, [call(1, 1)]) + TAKE_FIRST)
    assert life.dispatcher.instance.count == 16
    assert versions_of(life) == [2, 1, 1]
    assert [arguments for _, _, arguments in life.output.calls] == [("V1 5",), ("V2 15",), ("V1 16",)]


SAME_NAME_1 = """
from immortal import Immortal, rpc

class Counter(Immortal):
    count: int

    def __init__(self) -> None:
        self.count = 1
"""

SAME_NAME_2 = """
from __future__ import annotations
import first
from immortal import Immortal, upgrades

@upgrades(first.Counter)
class Counter(Immortal):
    counts: list[int]

    @classmethod
    def upgrade(cls, old: first.Counter) -> Counter:
        new = cls()
        new.counts = [old.count]
        return new
"""


def test_the_version_decides_between_classes_of_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    modules: dict[str, Any] = {}
    for name, source in (("first", SAME_NAME_1), ("second", SAME_NAME_2)):
        modules[name] = ModuleType(name)
        monkeypatch.setitem(sys.modules, name, modules[name])
        exec(compile(source, f"{name}.py", "exec"), modules[name].__dict__)
    blob = first_start(modules["first"].Counter).output.blobs[0]
    life = restored(modules["second"].Counter, blob)
    assert type(life.dispatcher.instance) is modules["first"].Counter
    life.give(upgrade_record(2) + TAKE)
    assert life.dispatcher.instance.counts == [1]
    recovered = restored(modules["second"].Counter, life.output.blobs[-1])
    assert type(recovered.dispatcher.instance) is modules["second"].Counter
    with pytest.raises(StateError, match=r"of version 2 \(Counter\), the app first:Counter has version 1 only"):
        restored(modules["first"].Counter, life.output.blobs[-1])


def test_a_checkpoint_of_a_version_that_the_app_does_not_have() -> None:
    class Fifth(Immortal, version=5):
        pass

    blob = first_start(Fifth).output.blobs[0]
    with pytest.raises(StateError) as caught:
        restored(CounterV3, blob)
    for words in ("version 5", "versions 1, 2 and 3", "run the app that has version 5", "immortal upgrade NAME --to 3"):
        assert words in str(caught.value)


# --- failing ----------------------------------------------------------------------------------------------------------


def upgrade_that(body: Callable[[Any, Any], Any]) -> type:
    """A second version of CounterV1 whose upgrade is ``body``."""

    @upgrades(CounterV1)
    class Failing(Immortal):
        total: int

        @classmethod
        def upgrade(cls, old: CounterV1) -> Any:
            return body(cls, old)

    return Failing


def raises(cls: Any, old: CounterV1) -> Any:
    raise KeyError(f"no {old.count}")


def leaves(cls: Any, old: CounterV1) -> Any:
    raise SystemExit(3)


def returns_nothing(cls: Any, old: CounterV1) -> Any:
    return None


def returns_the_old(cls: Any, old: CounterV1) -> Any:
    return old


def forgets_an_attribute(cls: Any, old: CounterV1) -> Any:
    return cls()


def makes_what_can_not_be_saved(cls: Any, old: CounterV1) -> Any:
    new = cls()
    new.total = object()
    return new


def calls(cls: Any, old: CounterV1) -> Any:
    old.sink.take.fork("never")


def calls_a_handler_plainly(cls: Any, old: CounterV1) -> Any:
    old.add(1)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (raises, "Failing.upgrade raised KeyError: 'no 5' ("),
        (leaves, "Failing.upgrade raised SystemExit: 3"),
        (returns_nothing, "Failing.upgrade returned None, a "),
        (returns_the_old, "Failing.upgrade returned a CounterV1, a "),
        (forgets_an_attribute, "attribute 'total' is annotated but not set"),
        (makes_what_can_not_be_saved, "attribute 'total' can't be saved"),
        (calls, "Sink.take.fork: only handlers send calls"),
        (calls_a_handler_plainly, "Sink.take.fork: only handlers send calls"),
    ],
)
def test_an_upgrade_that_fails(body: Callable[[Any, Any], Any], reason: str) -> None:
    blob, records = old_life()
    life = restored(upgrade_that(body), blob, *records)
    with pytest.raises(UpgradeError) as caught:
        life.give(upgrade_record(2))
    assert caught.value.exit_status == EXIT_UPGRADE_FAILED
    assert "from version 1 to version 2" in str(caught.value)
    for chunk in life.dispatcher.data_to_send():
        life.output.receive_data(bytes(chunk))
    last = life.output.messages[-1]
    assert last.message_type == MessageType.UPGRADE_FAILED
    assert reason in last.data.decode()
    assert b"\n" not in last.data
    assert life.output.blobs == []
    assert life.output.calls == [("sink", 9, ("V1 5",))]


def test_the_place_of_the_failure_is_the_user_s() -> None:
    blob, records = old_life()
    with pytest.raises(UpgradeError) as caught:
        restored(upgrade_that(raises), blob, *records).give(upgrade_record(2))
    assert caught.value.reason.endswith(f"({__file__}:{raises.__code__.co_firstlineno + 1})")
    assert "appsdk/" not in str(caught.value)
    assert "KeyError: 'no 5'" in str(caught.value)


def test_a_version_that_can_not_be_reached() -> None:
    blob, records = old_life()
    for app, version in ((CounterV2, 3), (CounterV1, 2)):
        life = restored(app, blob, *records)
        with pytest.raises(UpgradeError, match=f"the upgrade is to version {version}"):
            life.give(upgrade_record(version))
    life = restored(CounterV1, blob, *records, upgrade_record(1), TAKE)  # it is there already
    assert versions_of(life) == [1, 1]


def test_a_subclass_carries_the_state_over_by_name() -> None:
    @upgrades(CounterV1)
    class Counter(CounterV1):
        calls: int

        def __init__(self) -> None:
            super().__init__()
            self.calls = 7

        @rpc(id=1)
        def add(self, amount: int) -> None:
            super().add(amount)
            self.calls += 1

    blob, records = old_life()
    life = restored(Counter, blob, *records)
    upgraded = life.give(upgrade_record(2))
    assert (type(upgraded), upgraded.count, upgraded.calls) == (Counter, 5, 7)


# --- what @upgrades takes ---------------------------------------------------------------------------------------------


def _no_upgrade_method() -> None:
    @upgrades(CounterV1)
    class App(Immortal):
        pass


def _inherited_upgrade_method_of_a_state_in_its_own_form() -> None:
    class Own(CounterV2):
        def checkpoint(self) -> bytes:
            return b""

        def restore(self, blob: bytes) -> None:
            pass

    @upgrades(Own)
    class App(Own):
        pass


def _too_few_parameters() -> None:
    @upgrades(CounterV1)
    class App(Immortal):
        @classmethod
        def upgrade(cls) -> None:
            pass


def _too_many_parameters() -> None:
    @upgrades(CounterV1)
    class App(Immortal):
        def upgrade(self, old: CounterV1, why: str) -> None:
            pass


def _static() -> None:
    @upgrades(CounterV1)
    class App(Immortal):
        @staticmethod
        def upgrade(old: CounterV1) -> None:
            pass


def _handler() -> None:
    @upgrades(CounterV1)
    class App(Immortal):
        @rpc
        def upgrade(self, old: int) -> None:
            pass


def _generator() -> None:
    @upgrades(CounterV1)
    class App(Immortal):
        def upgrade(self, old: CounterV1) -> Any:
            yield old


def _no_immortal() -> None:
    @upgrades(CounterV1)
    class App:  # type: ignore[type-var]
        def upgrade(self, old: CounterV1) -> None:
            pass


def _of_no_immortal() -> None:
    upgrades(int)  # type: ignore[arg-type]


def _twice() -> None:
    @upgrades(CounterV1)
    @upgrades(CounterV1)
    class App(Immortal):
        def upgrade(self, old: CounterV1) -> None:
            pass


def _equal_versions() -> None:
    @upgrades(CounterV2)
    class App(Immortal, version=2):
        def upgrade(self, old: CounterV2) -> None:
            pass


def _version_zero() -> None:
    class App(Immortal, version=0):
        pass


def _version_text() -> None:
    class App(Immortal, version="2"):  # type: ignore[arg-type]
        pass


def _checkpoint_mode() -> None:
    class App(Immortal, checkpoint="thread"):  # type: ignore[arg-type]
        pass


@pytest.mark.parametrize(
    ("define", "words"),
    [
        (_no_upgrade_method, r"needs an upgrade method: write '@classmethod def upgrade\(cls, old: CounterV1\)"),
        (_inherited_upgrade_method_of_a_state_in_its_own_form, "needs an upgrade method"),
        (_too_few_parameters, r"App.upgrade\(cls\).*: it is called with the class and the old object"),
        (_too_many_parameters, r"upgrade\(self, old: 'CounterV1', why: 'str'\).* called with the class and the old"),
        (_static, "is a class method, this is a staticmethod"),
        (_handler, "is a class method, this is a Handler"),
        (_generator, "a plain function was expected"),
        (_no_immortal, "App'> is not a class below immortal.Immortal"),
        (_of_no_immortal, "int'> is not a class below immortal.Immortal"),
        (_twice, "there are two @upgrades"),
        (_equal_versions, r"has the version of the class that it upgrades, 2: leave version= out \(it is then 3\)"),
        (_version_zero, "version=0: a number from 1"),
        (_version_text, "version='2': a number from 1"),
        (_checkpoint_mode, "checkpoint='thread': 'inline' or 'fork' were expected"),
    ],
)
def test_what_a_class_may_not_be(define: Callable[[], None], words: str) -> None:
    with pytest.raises(DefinitionError, match=words):
        define()
