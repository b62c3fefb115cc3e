"""A state that can't be saved: the service goes on, and the message that made it so is taken back or named."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import pytest

import immortal
from immortal import CalleeFailed, Immortal, impulse, initial, peer, query, register_type, rpc, upgrades
from immortal.appsdk.patterns.clone.model import encode as encode_entry
from immortal.appsdk.patterns.queue import clients
from immortal.appsdk.running import time_limits
from immortal.coordinator.core import effects as ef
from immortal.coordinator.core import events as ev
from immortal.coordinator.core.interfaces import Transaction
from immortal.coordinator.log.format import CHUNK_KEY
from immortal.coordinator.log.record_contents import message_at, record_of
from immortal.errors import RecoveryNeeded, StateError
from immortal.protocol.verdicts import Verdict, VerdictKind
from immortal.testing import Environment, Instance, crash_everywhere

LIMIT = 100


class Purse(Immortal):
    """Its state can be saved as long as there are LIMIT in it at most."""

    total: int
    notes: list[str]

    def __init__(self) -> None:
        self.total = 0
        self.notes = []

    def checkpoint(self) -> bytes:
        if self.total > LIMIT:
            raise ValueError(f"{self.total} are too much")
        return f"{self.total}|{','.join(self.notes)}".encode()

    def restore(self, blob: bytes) -> None:
        total, _, notes = blob.decode().partition("|")
        self.total, self.notes = int(total), notes.split(",") if notes else []

    @impulse
    def add(self, amount: int) -> None:
        self.total += amount

    @rpc
    def put(self, amount: int) -> int:
        self.total += amount
        return self.total

    @rpc
    def note(self, text: str) -> int:
        self.notes.append(text)
        return len(self.notes)

    @impulse
    def empty(self) -> None:
        self.total = 0

    @rpc
    async def later(self, amount: int) -> int:
        await immortal.step(self.step_in, amount)
        await immortal.sleep(timedelta(hours=1))
        return 1

    @rpc
    def step_in(self, amount: int) -> None:
        self.total += amount


class Spender(Immortal):
    purse = peer(Purse, "purse")

    @rpc
    async def spend(self, amount: int) -> str:
        try:
            return str(await self.purse.later(amount))
        except CalleeFailed as error:
            return error.type_name


@contextmanager
def an(cls: type, name: str = "purse") -> Iterator[tuple[Environment, Instance[Any]]]:
    with Environment(fail_alone=True) as env:
        yield env, env.start(cls, name)


def status(instance: Instance[Any]) -> Any:
    driver = instance._node._driver
    assert driver is not None
    return driver.machine.view.status(0)["unsaved"]


def checkpoints(instance: Instance[Any]) -> int:
    """Behind which record the last one is."""
    return instance._node.store.summary().checkpoints[-1].sequence_id


def sends(env: Environment, instance: Instance[Any], *amounts: int) -> None:
    for amount in amounts:
        instance.send(Purse.add, amount)
        env.run()


def skip(env: Environment, instance: Instance[Any], sequence_id: int, index: int = 0) -> dict[str, Any]:
    """What an operator is answered who skips that message."""
    node = instance._node
    answers: list[Any] = []
    node._driver._actions[ef.OperatorAnswered] = lambda effect: answers.append(effect.answer)  # type: ignore[union-attr]
    message = message_at(record_of(node.store.read(sequence_id, 1)[0]).content, index)
    node.handle(ev.MessageSkipped(sequence_id, index, "too much", "ann", message, "token"))
    env.run()
    (answer,) = answers
    return dict(answer)


# --- healed without anybody -------------------------------------------------------------------------------------------


def test_a_message_that_nobody_heard_of_is_taken_back() -> None:
    with an(Purse) as (env, purse):
        sends(env, purse, 1, 500, 3)
        purse.checkpoint()
        assert purse.state.total == 4
        assert checkpoints(purse) == 3, "behind all of them"
        (letter,) = purse.dead_letters
        assert (letter.kind, letter.sequence_id, letter.behind) == (VerdictKind.TAKEN_BACK, 2, 3)
        assert "too much" in letter.text
        assert status(purse) is None
        sends(env, purse, 5)
        purse.crash()
        purse.recover()
        assert purse.call(Purse.put, 1) == 10


@pytest.mark.parametrize("amounts", [(500, 600, 700), (1, 500, -500, 1, 600, 2), (500,), (99, 1, 1, 1)])
def test_several_messages_are_taken_back_one_after_the_other(amounts: tuple[int, ...]) -> None:
    with an(Purse) as (env, purse):
        for amount in amounts:  # in one record, and in several
            purse.send(Purse.add, amount)
        env.run()
        sends(env, purse, *amounts)
        purse.checkpoint()
        assert status(purse) is None
        assert purse.state.total <= LIMIT
        assert purse.dead_letters
        places = [(1, index) for index in range(len(amounts))] + [(2 + index, 0) for index in range(len(amounts))]
        lost = {(one.sequence_id, one.message_index) for one in purse.dead_letters}
        kept = sum(amount for place, amount in zip(places, amounts * 2, strict=True) if place not in lost)
        assert purse.state.total == kept


def test_a_repaired_state_costs_no_message() -> None:
    with an(Purse) as (env, purse):
        sends(env, purse, 500)
        purse.send(Purse.empty)
        env.run()
        sends(env, purse, 7)
        purse.checkpoint()
        assert (purse.state.total, purse.dead_letters) == (7, [])


def test_at_a_recovery_too_and_at_a_stop() -> None:
    with an(Purse) as (env, purse):
        sends(env, purse, 1, 500, 3)
        purse.crash()
        purse.recover()
        assert purse.state.total == 4
        sends(env, purse, 600)
        purse.stop()
        purse.recover()
        assert purse.state.total == 4
        assert len(purse.dead_letters) == 2


def test_who_still_waits_is_told() -> None:
    with an(Purse) as (env, purse):
        spender = env.start(Spender, "spender")
        call = spender.begin(Spender.spend, 500)
        env.run()
        purse.checkpoint()
        assert purse.state.total == 0
        assert call.done
        assert call.result() == "StateError"
        assert spender.call(Spender.spend, 5) == "1"


def test_whatever_crashes_meanwhile() -> None:
    for env in crash_everywhere(fail_alone=True, runs_max=12):
        with env:
            purse, spender = env.start(Purse, "purse"), env.start(Spender, "spender")
            sends(env, purse, 1, 500)
            call = spender.begin(Spender.spend, 600)
            env.run()
            assert purse.call(Purse.note, "meanwhile") == 1
            purse.checkpoint()
            assert status(purse) is None
            assert purse.state.total == 1
            assert call.result() == "StateError"
            assert purse.call(Purse.note, "behind") == 2
            purse.checkpoint()
            assert len(purse.dead_letters) == 2


def test_without_a_copy_to_go_back_to_the_app_is_recovered_for_it() -> None:
    with an(Purse) as (env, purse):
        sends(env, purse, 1, 500)
        dispatcher = purse._node.local_app.dispatcher  # type: ignore[union-attr]
        dispatcher.healing.may_recover = True
        dispatcher._rewinds.copies.forget()
        with pytest.raises(RecoveryNeeded, match="501 are too much"):
            purse.checkpoint()
        purse.recover()
        assert status(purse) is None
        assert purse.state.total == 1


def test_a_recovery_from_a_checkpoint_before_does_it_once_more() -> None:
    with an(Purse) as (env, purse):
        spender = env.start(Spender, "spender")
        sends(env, purse, 1, 500)
        call = spender.begin(Spender.spend, 600)
        env.run()
        purse.checkpoint()
        assert call.result() == "StateError"
        purse.call(Purse.note, "behind")
        node = purse._node
        last = node.store.summary().checkpoints[-1].checkpoint_id
        purse.crash()
        node.store.backend.durable.put("chunks", CHUNK_KEY.pack(last, 0), b"damaged")
        purse.recover()
        assert purse.state.total == 1
        assert purse.call(Purse.note, "again") == 2


# --- an operator's choice ---------------------------------------------------------------------------------------------


def test_what_was_answered_is_left_to_an_operator() -> None:
    with an(Purse) as (env, purse):
        assert purse.call(Purse.put, 500) == 500
        before = checkpoints(purse)
        for _ in range(3):
            purse.checkpoint()
        assert checkpoints(purse) == before
        said = status(purse)
        assert (said["record"], said["message"], said["method"], said["failures"]) == (1, 0, "Purse.put", 3)
        assert said["caller"] == "test"
        assert "test was told" in said["why"]
        assert "immortal skip purse 1:0" in said["ways_out"]
        assert purse.call(Purse.note, "on") == 1
        purse.crash()
        purse.recover()
        assert purse.call(Purse.put, 1) == 501
        purse.stop()
        purse.recover()
        assert status(purse)["record"] == 1
        assert skip(env, purse, 1) == {"skipped": True}
        assert status(purse) is None
        assert purse.state.total == 1
        assert purse.state.notes == ["on"]
        assert [one.text for one in purse.dead_letters] == ["too much"]
        assert purse.call(Purse.put, 1) == 2
        sends(env, purse, 700)
        purse.checkpoint()
        assert status(purse) is None, "that one is found anew"
        purse.crash()
        purse.recover()
        assert purse.call(Purse.put, 1) == 3


def test_one_is_skipped_while_the_instance_is_stopped() -> None:
    with an(Purse) as (_, purse):
        purse.call(Purse.put, 500)
        purse.call(Purse.put, 1)
        purse.stop()
        last = purse._node.store.summary().last_sequence_id
        purse._node.store.commit(
            Transaction(verdicts=[Verdict(1, 0, VerdictKind.TAKEN_BACK, text="too much", behind=last)])
        )
        purse.recover()
        assert status(purse) is None
        assert purse.call(Purse.put, 1) == 2


def test_two_messages_are_skipped_one_after_the_other() -> None:
    with an(Purse) as (env, purse):
        purse.call(Purse.put, 500)
        purse.call(Purse.put, 600)
        purse.checkpoint()
        assert status(purse)["record"] == 1
        assert "record 2" in skip(env, purse, 1)["refused"]
        assert status(purse)["record"] == 2
        assert skip(env, purse, 2) == {"skipped": True}
        assert purse.state.total == 0
        assert purse.call(Purse.put, 1) == 1


def test_a_message_that_repairs_the_state_ends_it() -> None:
    with an(Purse) as (env, purse):
        purse.call(Purse.put, 500)
        purse.checkpoint()
        assert status(purse) is not None
        purse.send(Purse.empty)
        env.run()
        purse.checkpoint()
        assert status(purse) is None
        assert purse.dead_letters == []
        assert skip(env, purse, 1)["refused"]


class Larger(Purse, formerly=("Purse",)):
    """New code of the same version, whose state can be saved."""

    def checkpoint(self) -> bytes:
        return f"{self.total}|{','.join(self.notes)}".encode()


@upgrades(Purse)
class Cents(Immortal):
    cents: int

    @classmethod
    def upgrade(cls, old: Purse) -> Cents:
        new = cls()
        new.cents = 100 * old.total
        return new

    def __init__(self) -> None:
        self.cents = 0

    @rpc
    def have(self) -> int:
        return self.cents


@upgrades(Purse)
class Broken(Immortal):
    cents: Any

    @classmethod
    def upgrade(cls, old: Purse) -> Broken:
        new = cls()
        new.cents = object()
        return new

    def __init__(self) -> None:
        self.cents = 0


def test_new_code_is_a_way_out() -> None:
    with an(Purse) as (_, purse):
        purse.call(Purse.put, 500)
        purse.checkpoint()
        larger = purse.upgrade(Larger)
        assert status(larger) is None
        assert larger.call(Larger.put, 1) == 501
        assert larger.state.total == 501


def test_an_upgrade_is_a_way_out_and_one_that_fails_leaves_the_old_version() -> None:
    with an(Purse) as (_, purse):
        purse.call(Purse.put, 500)
        purse.checkpoint()
        with pytest.raises(Exception, match="cents"):
            purse.upgrade(Broken)
        purse = purse.upgrade(Purse)
        assert purse.call(Purse.put, 1) == 501
        cents = purse.upgrade(Cents)
        assert cents.call(Cents.have) == 50_100
        assert status(cents) is None


# --- what is found where it is made -----------------------------------------------------------------------------------


class Heavy:
    def __init__(self, weight: int) -> None:
        self.weight = weight


def encode_heavy(heavy: Heavy) -> int:
    if heavy.weight > LIMIT:
        raise OverflowError("too heavy")
    return heavy.weight


register_type(Heavy, encode=encode_heavy, decode=Heavy, form=int)


def lift(heavy: Heavy) -> int:
    return heavy.weight


class Porter(Immortal):
    count: int

    def __init__(self) -> None:
        self.count = 0

    @rpc
    def ping(self) -> int:
        self.count += 1
        return self.count

    @query
    def asks(self) -> Heavy:
        return Heavy(500)

    @rpc
    def returns(self) -> Heavy:
        self.count += 100
        return Heavy(500)

    @rpc
    async def returns_later(self) -> Heavy:
        await immortal.sleep(timedelta(seconds=1))
        return Heavy(500)

    @rpc
    async def steps(self) -> int:
        return (await immortal.step(self.returns)).weight

    @rpc
    async def lifts(self) -> int:
        return await immortal.effect(lift, Heavy(500))

    @rpc
    async def continues(self, heavy: Heavy | None = None) -> int:
        await immortal.sleep(timedelta(seconds=1))
        return immortal.continue_as(Heavy(500))

    @rpc
    def signals(self) -> None:
        immortal.signal("done", Heavy(500))

    @rpc
    def signals_nothing_that_has_a_name(self) -> None:
        self.count += 100
        immortal.signal("\ud800", 1)

    @rpc
    async def waits_for_nothing_that_has_a_name(self) -> None:
        await immortal.event("\ud800", int)


@pytest.mark.parametrize(
    "handler",
    [
        Porter.asks,
        Porter.returns,
        Porter.returns_later,
        Porter.steps,
        Porter.lifts,
        Porter.continues,
        Porter.signals,
        Porter.signals_nothing_that_has_a_name,
        Porter.waits_for_nothing_that_has_a_name,
    ],
    ids=lambda handler: handler.name,
)
def test_what_handlers_give_away_fails_there_and_not_at_the_checkpoint(handler: Any) -> None:
    with Environment(fail_alone=True) as env:
        porter = env.start(Porter, "porter", effects={lift: lift})
        with pytest.raises(CalleeFailed):
            porter.call(handler)
        porter.checkpoint()
        assert status(porter) is None
        assert porter.call(Porter.ping) == 1


def test_rows_of_a_table_and_tasks_of_a_queue_are_bytes_before_they_are_sent() -> None:
    with pytest.raises(TypeError):
        encode_entry(Heavy(500))
    with pytest.raises(TypeError, match="the arguments can't be encoded"):
        clients.submission("lift", [Heavy(500)], {})


# --- hooks ------------------------------------------------------------------------------------------------------------


class Forking(Purse, checkpoint="fork", formerly=("Purse",)):
    pass


def test_a_snapshot_that_fails_is_followed_by_a_checkpoint_that_heals() -> None:
    with an(Forking) as (env, purse):
        sends(env, purse, 1, 500, 3)
        purse.checkpoint()
        assert status(purse) is None
        assert purse.state.total == 4
        purse.call(Purse.put, 500)
        purse.checkpoint()
        assert status(purse)["failures"] == 1
        assert skip(env, purse, status(purse)["record"]) == {"skipped": True}
        assert purse.state.total == 4


def forbidding() -> Any:
    """A hook that works for nothing any more, as of code that was changed."""
    raise KeyError("never again")


def test_code_that_saves_nothing_is_named_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    with an(Purse) as (env, purse):
        sends(env, purse, 1)
        monkeypatch.setattr(Purse, "checkpoint", lambda self: forbidding())
        purse.checkpoint()
        said = status(purse)
        assert (said["record"], said["problem"]) == (None, "Purse.checkpoint raised KeyError: 'never again'")
        assert "skip" not in said["ways_out"]
        purse.crash()
        purse.recover()
        assert purse.call(Purse.put, 1) == 2
        monkeypatch.undo()
        purse.checkpoint()
        assert status(purse) is None


class Initial(Purse):
    @initial
    def fill(self) -> None:
        self.total = 500


def test_the_initial_message_is_not_taken_back() -> None:
    with an(Initial) as (env, purse):
        purse.checkpoint()
        assert (status(purse)["record"], "without which" in status(purse)["why"]) == (0, True)
        purse.send(Purse.empty)
        env.run()
        purse.checkpoint()
        assert status(purse) is None


@pytest.mark.parametrize("times", [1, 2, 3, 5, 8])
def test_what_passes_is_no_messages_fault(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    with an(Purse) as (env, purse):
        sends(env, purse, *range(1, 9))
        original, left = Purse.checkpoint, [times]

        def flaky(self: Purse) -> bytes:
            left[0] -= 1
            if left[0] >= 0:
                raise ConnectionError("no route")
            return original(self)

        with monkeypatch.context() as changed:
            changed.setattr(Purse, "checkpoint", flaky)
            purse.checkpoint()
            purse.checkpoint()
        purse.checkpoint()
        assert status(purse) is None
        assert purse.dead_letters == []
        assert purse.state.total == 36


def test_where_memory_is_short_no_message_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def greedy(self: Purse) -> bytes:
        raise MemoryError

    with an(Purse) as (env, purse):
        sends(env, purse, 1, 2)
        with monkeypatch.context() as changed:
            changed.setattr(Purse, "checkpoint", greedy)
            purse.checkpoint()
            assert "not enough memory" in status(purse)["why"]
        purse.checkpoint()
        assert status(purse) is None
        assert purse.state.total == 3


class Pickled(Immortal, serializer="pickle"):
    jobs: list[Any]

    def __init__(self) -> None:
        self.jobs = []

    @impulse
    def add(self, kind: str) -> None:
        self.jobs.append((lambda: 1) if kind == "lambda" else Unwilling() if kind == "unwilling" else kind)

    @rpc
    def count(self) -> int:
        return len(self.jobs)


class Unwilling:
    def __getstate__(self) -> object:
        raise RuntimeError("I stay here")


def test_what_can_not_be_pickled_is_taken_back() -> None:
    with an(Pickled) as (env, pickled):
        for kind in ("one", "lambda", "two", "unwilling"):
            pickled.send(Pickled.add, kind)
        env.run()
        pickled.checkpoint()
        assert pickled.call(Pickled.count) == 2
        texts = " ".join(letter.text for letter in pickled.dead_letters)
        assert "lambda" in texts
        assert "I stay here" in texts


@pytest.fixture
def _own_alarm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """That of pytest's own limit is set aside: where somebody else has it, there is no limit."""
    handler = signal.signal(signal.SIGALRM, signal.SIG_DFL)
    left = signal.setitimer(signal.ITIMER_REAL, 0)
    monkeypatch.setattr(time_limits, "ENCODING_LIMIT_S", 0.05)
    yield
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, *left)


def hang() -> Any:
    lock = threading.Lock()
    with lock, suppress(Exception), lock:
        pass


@pytest.mark.usefixtures("_own_alarm")
def test_a_hook_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StateError, match="has not come to its end within") as caught:
        time_limits.limit_encoding_time(hang)
    assert caught.value.takes_too_long
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
    assert time_limits.limit_encoding_time(lambda: 7) == 7
    with an(Purse) as (env, purse):
        purse._node.local_app.dispatcher.limit_encoding(time_limits.limit_encoding_time)  # type: ignore[union-attr]
        sends(env, purse, 1)
        with monkeypatch.context() as changed:
            changed.setattr(Purse, "checkpoint", lambda self: hang())
            purse.checkpoint()
            assert "to try takes too long" in status(purse)["why"]
        purse.checkpoint()
        assert status(purse) is None


def test_the_first_checkpoint_must_be_there() -> None:
    class Never(Immortal):
        value: Any

        def __init__(self) -> None:
            self.value = object()

    env = Environment(fail_alone=True)
    with pytest.raises(StateError, match="value"):
        env.start(Never, "never")


def test_without_fail_alone_a_test_fails_with_it() -> None:
    env = Environment()
    purse = env.start(Purse, "purse")
    purse.call(Purse.put, 500)
    with pytest.raises(ValueError, match="too much"):
        purse.checkpoint()


class Drawers(Immortal):
    """Large enough that the guard does not look into the drawers that are there."""

    drawers: dict[str, list[Any]]
    last: Any

    def __init__(self) -> None:
        self.drawers = {str(number): ["x" * 100] for number in range(200)}
        self.last = None

    @impulse
    def hide(self) -> None:
        self.drawers["7"].append(len)

    @impulse
    def fill(self) -> None:
        self.drawers["7"].append(7)

    @rpc
    def show(self) -> None:
        self.last = len


def test_after_a_search_the_state_is_guarded_as_before() -> None:
    """The search ended a run early, and then no later message was looked at."""
    with an(Drawers, "drawers") as (env, drawers):
        drawers.checkpoint()
        for method in (Drawers.fill, Drawers.hide, Drawers.fill):  # one record
            drawers.send(method)
        env.run()
        drawers.checkpoint()
        assert drawers.state.drawers["7"][1:] == [7, 7]
        with pytest.raises(CalleeFailed, match="can't be saved"):
            drawers.call(Drawers.show)
        assert drawers.state.last is None
