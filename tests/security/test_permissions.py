"""Methods that a caller may not call: nothing is carried out, nothing else is held up, and the caller is told."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from immortal import event, peer, query, rpc, signal
from immortal.appsdk.dispatch.dispatcher import Dispatcher
from immortal.appsdk.handlers.definition import definition_of
from immortal.client import CalleeFailed, CallRefused, connect
from immortal.coordinator.config import ConfigError
from immortal.coordinator.core import effects as ef
from immortal.coordinator.core import events as ev
from immortal.coordinator.core.components import Components
from immortal.coordinator.core.input.admission import OpenCalls
from immortal.coordinator.core.limits import Limits
from immortal.coordinator.core.permissions import EVERYTHING, Permission, Permissions
from immortal.coordinator.instances.registry import Registry
from immortal.coordinator.log.memory import MemoryLogStore
from immortal.coordinator.peers import keys
from immortal.protocol.batch import check_batch
from immortal.protocol.client_frames import ClientCode
from immortal.protocol.extensions import ALL_EXTENSIONS, QUERIES, AppDescription, Hello, encode_hello
from immortal.protocol.messages import RpcKind, encode_incoming_rpc
from immortal.protocol.peer_frames import FrameType, PeerFrame, RefusedCode
from immortal.protocol.system_methods import CANCEL_CALL_METHOD_ID
from immortal.protocol.verdicts import Cause, Verdict, VerdictKind
from tests.helpers.apps import COUNTER
from tests.helpers.cli import HOME, Run, immortal
from tests.helpers.clients import Ledger, request, said
from tests.helpers.core import COMMITTER_ID, PEER_COMMITTER_ID, Driven
from tests.helpers.processes import House

METHODS = definition_of(Ledger)
ADD, REFUSE = METHODS.handlers["add"].method_id, METHODS.handlers["refuse"].method_id
ONLY_ADD = {name: Permission(frozenset({"add"})) for name in ("b", "web")}


class Guarded:
    """An instance called "a" with an app of the SDK, whose callers "b" and "web" may call ``add`` alone."""

    def __init__(
        self, permissions: dict[str, Permission] | None = None, limits: Limits | None = None, app: type = Ledger
    ) -> None:
        self.permissions = ONLY_ADD if permissions is None else permissions
        self.limits = limits
        self.definition = definition_of(app)
        self._begin(MemoryLogStore(COMMITTER_ID))

    def _begin(self, store: MemoryLogStore) -> None:
        self.driven = Driven(store, permissions=self.permissions, limits=self.limits)
        self.app: Dispatcher | None = None
        self._given = 0

    def crash(self) -> None:
        """Of both processes."""
        self._begin(self.driven.store.crash())

    def serve(self) -> list[int]:
        """The app does all that there is for it; what it has noted so far."""
        if self.app is None:
            self.driven.connect()
            self.app = Dispatcher(self.definition, lambda: bytes(16))
        for _ in range(10):
            given = bytes(self.driven.app_bytes)
            self.driven.app_bytes.clear()
            self.app.receive_data(given)
            made = [bytes(chunk) for chunk in self.app.data_to_send()]
            while self.app.next_event() is not None:
                made += [bytes(chunk) for chunk in self.app.data_to_send()]
            made += [bytes(chunk) for chunk in self.app.data_to_send()]
            self.driven.handle(ev.AppSent(len(given)), *([ev.AppData(b"".join(made))] if made else []))
        found: list[int] = self.app.instance.entries
        return found

    def greet(self, name: str = "b", epoch: int = 1) -> list[PeerFrame]:
        hello = PeerFrame(FrameType.HELLO, name, "a", PEER_COMMITTER_ID, epoch, 0)
        return answers(self.driven.handle(ev.PeerFrameReceived("hello", hello)))

    def send(self, position: int, *calls: bytes, name: str = "b") -> list[PeerFrame]:
        payload = b"".join(calls)
        frame = PeerFrame(FrameType.BATCH, name, "a", PEER_COMMITTER_ID, 1, position, len(calls), 5, payload)
        return answers(self.driven.handle(ev.PeerFrameReceived("batch", frame)))

    @property
    def verdicts(self) -> list[Verdict]:
        return list(self.driven.store.summary().verdicts)


def answers(effects: list[ef.Effect]) -> list[PeerFrame]:
    return [effect.frame for effect in effects if isinstance(effect, ef.ReplyToPeer)]


def fork(token: int, method_id: int = ADD) -> bytes:
    return encode_incoming_rpc(method_id, 1, msgspec.msgpack.encode((token,)))


def waiting(number: int, token: int, method_id: int = ADD) -> bytes:
    return encode_incoming_rpc(method_id, 0, msgspec.msgpack.encode(("b", number, token)))


def by(caller: str, event: ev.ClientFrameReceived) -> ev.ClientFrameReceived:
    return ev.ClientFrameReceived(event.token, event.frame, caller)


def requested(token: int, method_id: int = ADD) -> bytes:
    return encode_incoming_rpc(method_id, 0, msgspec.msgpack.encode((token,)))


@pytest.fixture
def guarded() -> Guarded:
    made = Guarded()
    made.serve()
    made.greet()
    return made


# --- peers ------------------------------------------------------------------------------------------------------------


def test_a_peer_cannot_call_what_it_may_not_and_the_rest_goes_on_in_order(guarded: Guarded) -> None:
    sent = fork(1), fork(2, REFUSE), waiting(7, 3, REFUSE), fork(4)
    (acknowledged,) = guarded.send(1, *sent)
    assert (acknowledged.frame_type, acknowledged.position) == (FrameType.TRIM_TO, 4)
    assert guarded.serve() == [1, 4]
    first, second = guarded.verdicts
    assert (first.kind, first.cause) == (second.kind, second.cause) == (VerdictKind.REFUSED, Cause.FORBIDDEN)
    assert (first.message_index, second.message_index) == (1, 2)
    assert first.text == "'b' may not call 'refuse' of 'a'"
    assert [frame.receiver for frame in guarded.driven.frames(FrameType.HELLO)] == ["b"], "it is to be answered"
    assert guarded.send(5, fork(5))[0].position == 5
    assert guarded.serve() == [1, 4, 5]


def test_a_refused_peer_is_told(guarded: Guarded) -> None:
    guarded.send(1, waiting(7, 3, REFUSE))
    guarded.serve()
    guarded.driven.reply(FrameType.WELCOME, 0)
    (batch,) = guarded.driven.frames(FrameType.BATCH)
    check_batch(batch.payload, 1)
    assert batch.payload[2] == RpcKind.RAISED
    assert b"~refused" in batch.payload
    assert b"'b' may not call 'refuse' of 'a'" in batch.payload


def test_what_was_refused_stays_so_after_a_crash_and_under_other_settings(guarded: Guarded) -> None:
    guarded.send(1, fork(1), fork(2, REFUSE), fork(3))
    guarded.permissions = {}
    guarded.crash()
    assert guarded.serve() == [1, 3]


def test_a_verdict_is_durable_with_its_message_or_not_at_all(guarded: Guarded) -> None:
    """Else a crash in between would let the call through."""
    guarded.driven.auto = False
    guarded.send(1, *[fork(number) for number in range(400)], fork(-1, REFUSE))
    commits = [job.transaction for job in guarded.driven.jobs if isinstance(job, ef.Commit)]
    holding = [transaction for transaction in commits if transaction.records]
    assert len(holding) == 1
    assert [verdict.message_index for verdict in holding[0].verdicts] == [400]
    assert holding[0].verdicts[0].sequence_id == holding[0].records[0][0]


def test_messages_are_counted_over_all_batches_of_the_record(guarded: Guarded) -> None:
    guarded.driven.auto = False
    guarded.send(1, fork(0))  # on its way to the disk: what follows gathers in one record
    guarded.greet("c")
    guarded.send(1, fork(1), fork(2), name="c")
    guarded.send(2, fork(3), fork(4, REFUSE))
    guarded.driven.disk_all()
    guarded.driven.auto = True
    assert guarded.serve() == [0, 1, 2, 3]
    (verdict,) = guarded.verdicts
    assert verdict.message_index == 3


def test_a_peer_cannot_push_out_dead_letters_of_others(guarded: Guarded) -> None:
    guarded.send(1, *[fork(number, REFUSE) for number in range(50)])
    assert guarded.serve() == []
    assert guarded.driven.machine.view.letters == []
    assert len(guarded.verdicts) == 50


def test_answers_need_no_permission(guarded: Guarded) -> None:
    answer = encode_incoming_rpc(REFUSE, 0, msgspec.msgpack.encode((1, 2)), RpcKind.RETURNED_VALUE)
    guarded.send(1, answer)
    guarded.serve()
    assert [verdict for verdict in guarded.verdicts if verdict.cause is Cause.FORBIDDEN] == []


def test_nothing_is_taken_before_the_app_has_said_what_its_methods_are(guarded: Guarded) -> None:
    """A coordinator that has just been started, and whose app is not there yet."""
    guarded.send(1, fork(1))
    guarded.serve()
    guarded.crash()
    (again,) = guarded.send(2, fork(2, REFUSE))
    assert (again.frame_type, again.position) == (FrameType.RESEND, 0)
    assert guarded.greet() == [], "it is held back"
    (other,) = guarded.greet("c")
    assert other.frame_type is FrameType.WELCOME, "others need not wait"
    guarded.driven.effects.clear()
    guarded.serve()
    welcomes = [frame for frame in answers(guarded.driven.effects) if frame.receiver == "b"]
    assert [(frame.frame_type, frame.position) for frame in welcomes] == [(FrameType.WELCOME, 1)]
    guarded.send(2, fork(2, REFUSE), fork(3))
    assert guarded.serve() == [1, 3]


def test_other_settings_hold_from_then_on(guarded: Guarded) -> None:
    guarded.driven.handle(ev.PermissionsChanged({}))
    guarded.send(1, fork(1, REFUSE))
    guarded.driven.handle(ev.PermissionsChanged({"b": Permission(frozenset())}))
    guarded.send(2, fork(2))
    assert guarded.serve() == [1]


def test_refused_calls_do_not_fill_the_memory() -> None:
    """A verdict is remembered until the next checkpoint: beyond a limit one is asked for, and no more is taken."""
    guarded = Guarded(limits=Limits(verdicts_max=10))
    guarded.serve()
    guarded.greet()
    guarded.greet("c")
    guarded.driven.forget()
    guarded.send(1, *[fork(number, REFUSE) for number in range(10)])
    (refused,) = guarded.send(11, fork(1))
    assert (refused.frame_type, refused.code) == (FrameType.REFUSED, RefusedCode.NOT_READY)
    assert "takes a checkpoint: too many calls that were refused" in refused.reason
    busy = said(guarded.driven.handle(by("web", request("t", 1, requested(1)))))
    assert busy == [("t", "PONG", ClientCode.BUSY)]
    assert guarded.send(1, fork(2), name="c")[0].frame_type is FrameType.TRIM_TO, "others are served"
    guarded.serve()
    assert guarded.send(11, fork(3))[0].frame_type is FrameType.TRIM_TO
    assert guarded.serve() == [2, 3]


# --- clients ----------------------------------------------------------------------------------------------------------


def test_a_client_cannot_call_what_it_may_not(guarded: Guarded) -> None:
    calls = requested(1), requested(2, REFUSE), requested(3)
    guarded.driven.handle(by("web", request("t", 1, *calls)))
    guarded.driven.effects.clear()
    assert guarded.serve() == [1, 3]
    replies = {
        number: reply
        for _, kind, what in said(guarded.driven.effects)
        if kind == "REPLY"
        for number, reply in what.items()
    }
    assert replies[1][0] == replies[3][0] == 1
    name, arguments, _ = msgspec.msgpack.decode(b"\x93" + replies[2][1])
    assert (name, arguments) == ("~refused", ["'web' may not call 'refuse' of 'a'"])


def test_who_may_call_some_methods_may_cancel_its_calls_of_them(guarded: Guarded) -> None:
    cancels = encode_incoming_rpc(CANCEL_CALL_METHOD_ID, 0, msgspec.msgpack.encode((1, "enough")))
    guarded.driven.handle(by("web", request("t", 1, requested(1), cancels)))
    guarded.driven.effects.clear()
    assert guarded.serve() == [1]
    (replies,) = [what for _, kind, what in said(guarded.driven.effects) if kind == "REPLY"]
    assert replies[2] == (1, msgspec.msgpack.encode(False)), "it has ended, and it may ask for that"


def test_a_client_waits_for_the_app_to_say_what_its_methods_are(guarded: Guarded) -> None:
    guarded.crash()
    assert said(guarded.driven.handle(by("web", request("t", 1, requested(1))))) == [
        ("t", "REFUSED", ClientCode.NOT_READY)
    ]
    assert said(guarded.driven.handle(by("other", request("u", 1, requested(2), client_id="d")))) == []
    guarded.serve()
    guarded.driven.handle(by("web", request("t", 1, requested(3))))
    assert guarded.serve() == [2, 3]


def test_the_instances_owner_may_call_everything() -> None:
    permissions = Permissions("a", {"a": Permission(frozenset())})
    assert (permissions.wait_reason("a"), permissions.limits("a")) == ("", False)


def test_an_app_that_takes_no_verdicts_cannot_be_protected_and_its_limited_callers_wait() -> None:
    permissions = Permissions("a", ONLY_ADD)
    permissions.app_connected(accepts_verdicts=False)
    permissions.describe(AppDescription(1, {("", 3): "Ledger.add"}))
    assert "lets 'b' call some methods only" in permissions.wait_reason("b")
    assert permissions.wait_reason("c") == ""


# --- queries ----------------------------------------------------------------------------------------------------------


class Read(Ledger):
    """Two methods only read; one of them says so and does not."""

    @query
    def length(self, token: int) -> int:
        return len(self.entries) + token

    @query
    def cheat(self, token: int) -> int:
        self.entries.append(token)
        return len(self.entries)


READ = definition_of(Read)
LENGTH, CHEAT = READ.handlers["length"].method_id, READ.handlers["cheat"].method_id
QUERIES_ONLY = {name: Permission(frozenset({QUERIES})) for name in ("b", "web")}


def test_who_may_query_can_query_and_nothing_else() -> None:
    guarded = Guarded(QUERIES_ONLY, app=Read)
    guarded.serve()
    guarded.greet()
    methods = [handler.method_id for name, handler in READ.handlers.items() if name not in ("length", "cheat")]
    assert len(methods) >= 4
    peers = [waiting(number, 1, method_id) for number, method_id in enumerate([*methods, LENGTH, 999], 1)]
    guarded.send(1, *peers, *[fork(1, method_id) for method_id in methods])
    guarded.driven.handle(by("web", request("t", 1, *[requested(1, one) for one in (*methods, LENGTH)])))
    assert guarded.serve() == []
    assert {verdict.cause for verdict in guarded.verdicts} == {Cause.FORBIDDEN}
    assert len(guarded.verdicts) == 3 * len(methods) + 1
    replies = {
        number: reply
        for _, kind, what in said(guarded.driven.effects)
        if kind == "REPLY"
        for number, reply in what.items()
    }
    assert [number for number, (kind, _) in replies.items() if kind == 1] == [len(methods) + 1]


def test_a_query_that_cheats_changes_nothing_for_who_may_only_query() -> None:
    guarded = Guarded(QUERIES_ONLY, app=Read)
    guarded.serve()
    guarded.greet()
    guarded.send(1, fork(5, CHEAT), waiting(1, 5, CHEAT), fork(1, LENGTH))
    assert guarded.serve() == []
    assert [(verdict.kind, verdict.type_name) for verdict in guarded.verdicts] == [
        (VerdictKind.UNDONE, "QueryError"),
        (VerdictKind.UNDONE, "QueryError"),
    ]


def test_who_may_call_by_name_can_not_query() -> None:
    guarded = Guarded(app=Read)
    guarded.serve()
    guarded.greet()
    guarded.send(1, fork(1), fork(2, LENGTH))
    assert guarded.serve() == [1]
    assert [verdict.text for verdict in guarded.verdicts] == ["'b' may not call 'length' of 'a'"]


def test_queries_and_names_can_be_allowed_together() -> None:
    guarded = Guarded({"b": Permission(frozenset({QUERIES, "add"}))}, app=Read)
    guarded.serve()
    guarded.greet()
    guarded.send(1, fork(1), fork(2, LENGTH), fork(3, REFUSE))
    assert guarded.serve() == [1]
    assert [verdict.message_index for verdict in guarded.verdicts] == [2]


def test_where_the_app_has_no_queries_who_may_query_is_told_so() -> None:
    """One of an SDK that knows of none, say."""
    guarded = Guarded(QUERIES_ONLY)
    guarded.serve()
    guarded.greet()
    guarded.send(1, fork(1))
    assert guarded.serve() == []
    assert [verdict.text for verdict in guarded.verdicts] == [
        "'b' may not call 'add' of 'a'; its app marks no method as @query"
    ]


def test_no_query_is_taken_before_the_app_has_said_which_those_are() -> None:
    guarded = Guarded(QUERIES_ONLY, app=Read)
    guarded.serve()
    guarded.greet()
    guarded.crash()
    (again,) = guarded.send(1, fork(1, LENGTH))
    assert (again.frame_type, again.position) == (FrameType.RESEND, 0)
    guarded.greet()
    guarded.serve()
    assert guarded.send(1, fork(1, LENGTH))[0].frame_type is FrameType.TRIM_TO


# --- how many ---------------------------------------------------------------------------------------------------------

SECOND_NS = 1_000_000_000
FEW = {"b": Permission(rate=4), "web": Permission(rate=4), "slow": Permission(concurrent=2)}


@pytest.fixture
def few() -> Guarded:
    made = Guarded(FEW)
    made.serve()
    made.greet()
    made.driven.forget()
    return made


def later(guarded: Guarded, passed_ns: int) -> list[ef.Effect]:
    guarded.driven.now_ns += passed_ns
    return guarded.driven.handle(ev.Tick())


def test_a_peer_cannot_make_more_calls_than_its_rate(few: Guarded) -> None:
    """It is asked to send the rest again, and heard when it may call again: nothing is lost, and the order is kept."""
    calls = [fork(number) for number in range(10)]
    (answer,) = few.send(1, *calls)
    assert (answer.frame_type, answer.position) == (FrameType.RESEND, 0)
    for position in range(5, 11):  # one that does not care
        (answer,) = few.send(position, *calls[position - 1 :])
        assert answer.frame_type is FrameType.RESEND
    assert few.serve() == [0, 1, 2, 3]
    assert few.greet() == [], "it is not heard yet"
    assert few.driven.of(ef.WakeAt), "it will be"
    (welcome,) = answers(later(few, SECOND_NS))
    assert (welcome.frame_type, welcome.position) == (FrameType.WELCOME, 4)
    few.send(5, *calls[4:])
    assert few.serve() == list(range(8))
    assert few.driven.machine.view.status(0)["held_back"] == {"b": 3}


def test_a_peer_within_its_rate_is_not_held_up(few: Guarded) -> None:
    for number in range(20):
        (answer,) = few.send(number + 1, fork(number))
        assert answer.frame_type is FrameType.TRIM_TO
        few.driven.now_ns += SECOND_NS // 4
    assert few.serve() == list(range(20))


def test_a_peers_answers_do_not_count(few: Guarded) -> None:
    answer = encode_incoming_rpc(REFUSE, 0, msgspec.msgpack.encode((1, 2)), RpcKind.RETURNED_VALUE)
    (acknowledged,) = few.send(1, *[answer] * 50)
    assert acknowledged.position == 50


def test_a_clock_that_is_set_gives_nobody_more(few: Guarded) -> None:
    few.send(1, *[fork(number) for number in range(4)])
    few.driven.now_ns += 10_000 * SECOND_NS
    few.send(5, *[fork(number) for number in range(4, 20)])
    few.driven.now_ns -= 20_000 * SECOND_NS
    few.send(9, *[fork(number) for number in range(8, 20)])
    assert few.serve() == list(range(8))


def test_settings_that_leave_a_rate_as_it_was_give_nobody_more(few: Guarded) -> None:
    few.send(1, *[fork(number) for number in range(4)])
    few.driven.handle(ev.PermissionsChanged(FEW))
    assert few.send(5, fork(4))[0].frame_type is FrameType.RESEND
    few.driven.handle(ev.PermissionsChanged(FEW | {"b": Permission(rate=5)}))
    few.send(5, *[fork(number) for number in range(4, 20)])
    assert few.serve() == list(range(9)), "a second's worth of the new rate"


def test_a_client_cannot_make_more_calls_than_its_rate(few: Guarded) -> None:
    calls = [requested(number) for number in range(6)]
    told = said(few.driven.handle(by("web", request("t", 1, *calls))))
    assert ("t", "PONG", ClientCode.BUSY) in told
    few.driven.effects.clear()
    assert few.serve() == [0, 1, 2, 3]
    again = request("t", 5, *calls[4:])
    assert said(few.driven.handle(by("web", again))) == [("t", "PONG", ClientCode.BUSY)]
    other = request("u", 1, requested(100), client_id="d")
    few.driven.handle(by("other", other))
    few.driven.now_ns += SECOND_NS
    few.driven.handle(by("web", again))
    assert few.serve() == [0, 1, 2, 3, 100, 4, 5]


def test_a_client_cannot_have_more_open_calls_than_it_may_under_however_many_ids(few: Guarded) -> None:
    few.driven.handle(by("slow", request("t", 1, requested(0))))
    told = said(few.driven.handle(by("slow", request("t", 1, *[requested(n) for n in range(1, 4)], client_id="d"))))
    assert told == [("t", "PONG", ClientCode.BUSY)]
    refused = said(few.driven.handle(by("slow", request("t", 1, requested(9), client_id="e"))))
    assert refused == [("t", "PONG", ClientCode.BUSY)]
    assert few.serve() == [0, 1]
    few.driven.handle(by("slow", request("t", 2, requested(2), requested(3), client_id="d")))
    assert few.serve() == [0, 1, 2, 3]


def test_a_stream_above_its_rate_arrives_whole_and_in_order(tmp_path: Path) -> None:
    """Of real processes: what is held back is sent again until it is taken."""
    house = House(tmp_path)
    try:
        house.register("alice", "bob")
        for name in ("alice", "bob"):
            keys.create(house.settings(name).folder)
        path = house.registry.path("bob")
        path.write_text(f"{path.read_text()}\n[allow]\nalice = {{rate = 100}}\n")
        process, bob = house.both("bob")
        _, alice = house.both("alice", peer="bob")
        for number in range(250):
            alice.impulse(number)
        bob.until(lambda: len(bob.state["told"]) == 250)
        assert bob.state["told"] == list(range(250))
        assert process.status()["held_back"]["alice"] >= 1
    finally:
        house.close()


def test_open_calls_are_counted_over_a_restart(few: Guarded) -> None:
    few.driven.handle(by("slow", request("t", 1, requested(0), requested(1))))
    few.crash()
    told = said(few.driven.handle(by("slow", request("t", 3, requested(2)))))
    assert told == [("t", "PONG", ClientCode.BUSY)]
    few.serve()
    few.driven.handle(by("slow", request("t", 3, requested(2))))
    assert few.serve() == [0, 1, 2]


# --- calls of peers that wait for answers -----------------------------------------------------------------------------


class Patient(Ledger):
    """Some calls end when somebody says so."""

    @rpc
    async def hold(self, token: int) -> int:
        await event("go")
        return token

    @rpc
    def go(self, token: int) -> None:
        signal("go")


PATIENT = definition_of(Patient)
HOLD, GO = PATIENT.handlers["hold"].method_id, PATIENT.handlers["go"].method_id
TWO = {"b": Permission(concurrent=2)}


@pytest.fixture
def patient() -> Guarded:
    made = Guarded(TWO, app=Patient)
    made.serve()
    made.greet()
    made.greet("c")
    made.driven.forget()
    return made


def open_calls(guarded: Guarded) -> int:
    found: int = guarded.driven.machine.view.status(0)["open_calls"]["b"]
    return found


def test_a_peer_cannot_have_more_open_calls_than_it_may(patient: Guarded) -> None:
    sent = [waiting(number, number, HOLD) for number in range(1, 5)]
    (answer,) = patient.send(1, *sent, fork(7))
    assert (answer.frame_type, answer.position) == (FrameType.TRIM_TO, 5), "the stream goes on"
    assert patient.serve() == [7]
    assert [(one.cause, one.message_index, one.text) for one in patient.verdicts] == [
        (Cause.FORBIDDEN, index, "'b' has 2 calls of 'a' open, and may have no more") for index in (2, 3)
    ]
    assert patient.verdicts[0].method == "hold"
    assert patient.driven.machine.view.forbidden == {"b": 2}
    patient.send(1, fork(0, GO), name="c")
    patient.serve()
    assert open_calls(patient) == 1
    patient.send(6, waiting(5, 5, HOLD), waiting(6, 6, HOLD))
    patient.serve()
    assert patient.driven.machine.view.forbidden == {"b": 3}


def test_a_peer_gains_nothing_by_giving_its_calls_one_number(patient: Guarded) -> None:
    patient.send(1, *[waiting(1, 1, HOLD)] * 5)
    patient.serve()
    assert (open_calls(patient), patient.driven.machine.view.forbidden) == (2, {"b": 3})
    patient.driven.handle(ev.CheckpointRequested())
    patient.serve()
    patient.crash()
    patient.serve()
    patient.greet("c")
    assert open_calls(patient) == 2
    patient.send(1, fork(0, GO), name="c")
    patient.serve()
    assert open_calls(patient) == 1


def test_who_is_above_its_open_calls_is_told(patient: Guarded) -> None:
    patient.send(1, *[waiting(number, number, HOLD) for number in range(1, 4)])
    patient.serve()
    patient.driven.reply(FrameType.WELCOME, 0)
    (batch,) = patient.driven.frames(FrameType.BATCH)
    check_batch(batch.payload, 1)
    assert RpcKind.RAISED in batch.payload[:4]
    assert b"~refused" in batch.payload
    assert b"'b' has 2 calls of 'a' open" in batch.payload


def test_only_calls_that_wait_for_an_answer_count(patient: Guarded) -> None:
    answered = encode_incoming_rpc(ADD, 0, msgspec.msgpack.encode((1, 2)), RpcKind.RETURNED_VALUE)
    patient.send(1, *[fork(number) for number in range(5)], *[answered] * 5, waiting(1, 1, HOLD), waiting(2, 2, HOLD))
    patient.send(1, *[waiting_of("c", number, HOLD) for number in range(5)], name="c")
    assert open_calls(patient) == 2
    patient.serve()
    assert patient.driven.machine.view.forbidden == {}


def waiting_of(caller: str, number: int, method_id: int) -> bytes:
    return encode_incoming_rpc(method_id, 0, msgspec.msgpack.encode((caller, number, number)))


def test_what_stands_behind_a_call_too_many_is_taken() -> None:
    """The reason why it is refused and not held back: behind it may be the answer that all the others wait for."""

    class Back(Ledger):
        b = peer(Ledger, "b")

        @rpc
        async def ask_back(self, token: int) -> int:
            return await self.b.add(token)

    guarded = Guarded(TWO, app=Back)
    ask = definition_of(Back).handlers["ask_back"].method_id
    guarded.serve()
    guarded.greet()
    guarded.send(1, *[waiting(number, number, ask) for number in range(1, 4)])
    guarded.serve()
    assert open_calls(guarded) == 2
    answers_of_b = [
        encode_incoming_rpc(ADD, 0, msgspec.msgpack.encode((number, 9)), RpcKind.RETURNED_VALUE)
        for number in guarded.app.tasks.calls  # type: ignore[union-attr]
    ]
    assert len(answers_of_b) == 2
    guarded.send(4, waiting(4, 4, ask), *answers_of_b)
    guarded.serve()
    assert open_calls(guarded) == 0


@pytest.mark.parametrize("checkpoint", [True, False])
def test_a_peers_open_calls_are_counted_over_a_crash(patient: Guarded, *, checkpoint: bool) -> None:
    patient.send(1, waiting(1, 1, HOLD), waiting(2, 2, HOLD), waiting(3, 3, HOLD))
    patient.serve()
    if checkpoint:
        patient.driven.handle(ev.CheckpointRequested())
        patient.serve()
    patient.send(1, fork(0, GO), name="c")
    patient.serve()
    patient.send(4, waiting(4, 4, HOLD), waiting(5, 5, HOLD))
    patient.crash()
    assert patient.greet() == [], "it is not known yet what is open"
    (again,) = patient.send(6, waiting(6, 6, HOLD))
    assert (again.frame_type, again.position) == (FrameType.RESEND, 0)
    assert patient.greet("c")[0].frame_type is FrameType.WELCOME, "others need not wait"
    patient.driven.effects.clear()
    patient.serve()
    assert [frame.position for frame in answers(patient.driven.effects) if frame.receiver == "b"] == [5]
    assert open_calls(patient) == 2
    patient.send(6, waiting(6, 6, HOLD))
    assert patient.driven.machine.view.forbidden == {"b": 1}


def test_what_is_open_is_not_known_before_the_checkpoint_is_chosen(patient: Guarded) -> None:
    patient.send(1, waiting(1, 1, HOLD), waiting(2, 2, HOLD))
    patient.serve()
    patient.crash()
    driven = patient.driven
    driven.unanswered = (ef.CheckCheckpoint,)
    driven.connect(encode_hello(Hello(ALL_EXTENSIONS, "test")))
    assert driven.machine.components.admission.permissions.accepts_verdicts, "the app has said so"
    assert patient.greet() == []
    (again,) = patient.send(3, waiting(3, 3, HOLD))
    assert (again.frame_type, again.position) == (FrameType.RESEND, 0)


def test_an_app_that_is_gone_answers_nobody_and_its_limited_callers_wait(patient: Guarded) -> None:
    patient.send(1, waiting(1, 1, HOLD), waiting(2, 2, ADD))
    patient.serve()
    patient.driven.handle(ev.AppClosed())
    patient.app = None
    assert patient.send(2, waiting(3, 3, HOLD))[0].frame_type is FrameType.RESEND
    assert patient.greet() == []
    assert patient.send(1, fork(5), name="c")[0].frame_type is FrameType.TRIM_TO, "others need not wait"
    patient.driven.effects.clear()
    patient.serve()
    assert [frame.position for frame in answers(patient.driven.effects) if frame.receiver == "b"] == [2]
    assert open_calls(patient) == 1
    patient.send(2, fork(0, GO), name="c")
    patient.serve()
    assert open_calls(patient) == 0


@pytest.mark.parametrize("seed", range(30))
def test_open_calls_are_counted_as_a_simple_model_does(seed: int) -> None:
    """Any order of calls, answers, checkpoints and crashes, of the app alone and of both."""
    draw = random.Random(seed)
    reuses_numbers = seed % 3 == 0
    limit = draw.choice([1, 2, 5])
    guarded = Guarded({"b": Permission(concurrent=limit)}, app=Patient)
    guarded.serve()
    for name in ("b", "c"):
        guarded.greet(name)
    held = 0  # calls that are open until somebody says "go"
    at_once = 0  # those that the app answers as soon as it comes to them: refused ones, too
    position, number, gone, said_go = 1, 0, 1, 0
    for _ in range(60):
        action = draw.choice(["call", "call", "call", "go", "serve", "checkpoint", "app dies", "crash"])
        if action == "call":
            calls, beyond, holds, others = [], 0, 0, 0
            for _ in range(draw.randint(1, 4)):
                number += 1
                kind = draw.choice([HOLD, ADD, None])
                calls.append(fork(number) if kind is None else waiting(1 if reuses_numbers else number, number, kind))
                if kind is None:
                    continue
                is_beyond = held + at_once + holds + others >= limit
                beyond += is_beyond
                holds += kind == HOLD and not is_beyond
                others += kind != HOLD or is_beyond
            before = guarded.driven.machine.view.forbidden.get("b", 0)
            (answer,) = guarded.send(position, *calls)
            if guarded.app is None:
                assert answer.frame_type is FrameType.RESEND
                continue
            position, held, at_once = position + len(calls), held + holds, at_once + others
            assert guarded.driven.machine.view.forbidden.get("b", 0) - before == beyond
        elif action == "go":
            guarded.send(gone, fork(0, GO), name="c")
            gone, said_go = gone + 1, said_go + 1
        elif action == "checkpoint":
            guarded.driven.handle(ev.CheckpointRequested())
        elif action == "app dies" and guarded.app is not None:
            guarded.driven.handle(ev.AppClosed())
            guarded.app = None
        elif action == "crash":
            guarded.crash()
            guarded.greet("c")
        if action in ("serve", "crash"):
            guarded.serve()
            guarded.greet()
            at_once, ended = 0, min(said_go, held)
            held, said_go = held - ended, said_go - ended
        if guarded.app is not None:
            assert open_calls(guarded) == held + at_once, action


def test_a_checkpoint_has_the_open_calls_up_to_its_record() -> None:
    """Later ones come with their records; or not at all, where the log is cut."""
    calls = OpenCalls({"b": Permission(concurrent=5), "c": Permission(concurrent=5)}, is_known=True)
    assert calls.add_calls("b", waiting(1, 1) + fork(2) + waiting(3, 3), 5) == []
    assert calls.add_calls("b", waiting(4, 4), 6) == []
    calls.answered("b", encode_incoming_rpc(ADD, 0, msgspec.msgpack.encode((1, 2)), RpcKind.RETURNED_VALUE))
    assert (calls.open_at(4), calls.open_at(5), calls.open_at(6)) == ({}, {"b": [3]}, {"b": [3, 4]})
    recovering = OpenCalls({"b": Permission(concurrent=5)}, is_known=False)
    recovering.restore({"b": [3], "gone": [1]}, 5)
    recovering.replayed("b", waiting(4, 4), 6)
    assert recovering.open_at(6) == {"b": [3, 4]}


def test_another_log_of_a_peer_has_nothing_open(patient: Guarded) -> None:
    patient.send(1, waiting(1, 1, HOLD), waiting(2, 2, HOLD))
    patient.serve()
    patient.driven.handle(ev.PeerReset("b", None))
    assert open_calls(patient) == 0


def test_a_limit_that_is_set_later_counts_from_then_on(patient: Guarded) -> None:
    patient.driven.handle(ev.PermissionsChanged({}))
    patient.send(1, *[waiting(number, number, HOLD) for number in range(1, 6)])
    patient.serve()
    patient.driven.handle(ev.PermissionsChanged(TWO))
    patient.send(6, *[waiting(number, number, HOLD) for number in range(6, 9)])
    patient.serve()
    assert (open_calls(patient), patient.driven.machine.view.forbidden) == (2, {"b": 1})


def test_a_refused_call_is_open_until_its_caller_is_told() -> None:
    """Whatever it is refused for: the answers of all of them look the same."""
    guarded = Guarded({"b": Permission(frozenset({"hold"}), concurrent=2)}, app=Patient)
    guarded.serve()
    guarded.greet()
    guarded.send(1, waiting(1, 1, ADD), waiting(2, 2, ADD), waiting(3, 3, HOLD))
    assert open_calls(guarded) == 3
    assert guarded.serve() == []
    assert open_calls(guarded) == 0
    guarded.send(4, *[waiting(number, number, HOLD) for number in (4, 5, 6)])
    guarded.serve()
    assert ["may not call" in one.text for one in guarded.verdicts] == [True, True, False, False]
    assert open_calls(guarded) == 2
    guarded.send(7, waiting(7, 7, ADD))
    assert "may not call" in guarded.verdicts[-1].text, "what will not change is said first"


def test_a_peer_with_a_limit_waits_for_an_app_that_can_leave_calls_out() -> None:
    admission = Components("a", permissions=TWO).admission
    assert "lets 'b' have 2 calls open at once" in admission.peer_wait_reason("b")
    assert (admission.peer_wait_reason("c"), admission.permissions.wait_reason("b")) == ("", "")
    admission.permissions.app_connected(accepts_verdicts=True)
    assert admission.peer_wait_reason("b") == ""


def test_refusals_beyond_a_limit_do_not_fill_the_memory() -> None:
    guarded = Guarded(TWO, limits=Limits(verdicts_max=10), app=Patient)
    guarded.serve()
    guarded.greet()
    guarded.send(1, *[waiting(number, number, HOLD) for number in range(1, 13)])
    (refused,) = guarded.send(13, waiting(13, 13, HOLD))
    assert (refused.frame_type, refused.code) == (FrameType.REFUSED, RefusedCode.NOT_READY)


@pytest.mark.kills
def test_a_peer_within_its_limit_of_real_processes_and_one_beyond(
    folder: Path, runs: Callable[[str, str], Run]
) -> None:
    """Over a crash of the callee: what is open stays counted, what is answered makes room."""
    for name in ("gate", "crowd"):
        immortal(folder, "register", name, "--peer", "tcp://127.0.0.1:*")
        immortal(folder, "keys", name, "--make")
    settings = folder / HOME / "gate.toml"
    settings.write_text(settings.read_text() + "\n[allow]\ncrowd = {concurrent = 2}\n")
    gate, crowd = runs("gate", "shop:Gate"), runs("crowd", "shop:Crowd")
    gate.line("ready")
    crowd.line("ready")

    def enter(count: int, inside: int, refused: int) -> None:
        immortal(folder, "call", "crowd", "enter_all", str(count))
        counts = immortal(folder, "call", "crowd", "wait_for", str(inside), str(refused))
        assert json.loads(counts) == [inside, refused]

    enter(5, 0, 3)
    assert '"open_calls": {"crowd": 2}' in json.dumps(json.loads(immortal(folder, "status", "gate", "--json")))
    gate.kill()
    gate = runs("gate", "shop:Gate")
    gate.line("ready")
    enter(2, 0, 5)
    immortal(folder, "call", "gate", "open")
    enter(0, 2, 5)
    enter(2, 4, 5)
    assert crowd.stop() == gate.stop() == 0
    for name in ("gate", "crowd"):
        immortal(folder, "log", "verify", name)
        immortal(folder, "verify", name, "--all", "--app", f"shop:{name.capitalize()}")


# --- settings ---------------------------------------------------------------------------------------------------------


def settings_with(folder: Path, text: str) -> Any:
    registry = Registry(folder / "home")
    registry.register("alice", "tcp://127.0.0.1:*")
    path = registry.path("alice")
    path.write_text(f"{path.read_text()}\n{text}")
    return registry.remember_app("alice", "module:Class"), registry


def test_permissions_come_back_as_they_were(tmp_path: Path) -> None:
    text = (
        '[allow]\nweb = ["place", "total"]\nbob = "*"\nnobody = []\nreports = ["@query", "place"]\nslow = {rate = 5}\n'
    )
    text += 'few = {methods = ["place"], concurrent = 2}\n'
    settings, registry = settings_with(tmp_path, text)
    assert settings.allow == ("web", "bob", "nobody", "reports", "slow", "few")
    assert settings.permissions == {
        "bob": EVERYTHING,
        "web": Permission(frozenset({"place", "total"})),
        "nobody": Permission(frozenset()),
        "slow": Permission(rate=5),
        "few": Permission(frozenset({"place"}), concurrent=2),
        "reports": Permission(frozenset({QUERIES, "place"})),
    }
    from immortal.coordinator.config import settings_text

    registry.path("alice").write_text(settings_text(settings, log=None))
    assert registry.load("alice") == settings


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[allow]\nweb = 'place'", "line 4, field 'allow.web': got \"place\", expected a list of names of methods"),
        ("[allow]\nweb = ['@rpc']", 'expected a list of names of methods, .* with "@query" for all that only read'),
        ("[allow]\nweb = '@query'", "expected a list of names of methods"),
        ("[allow]\nweb = [3]", "expected a list of names of methods"),
        ("[allow]\nweb = {rate = 0}", 'expected a whole number from 1 to 1000000000 as "rate"'),
        ("[allow]\nweb = {concurrent = true}", 'as "concurrent"'),
        ("[allow]\nweb = {per_minute = 1}", 'expected "methods", "rate" and "concurrent", not "per_minute"'),
        ("[allow]\n'no name' = ['place']", "'no name' is no instance name"),
        ("allow = 'web'", r"or a table \[allow\] of names and the methods that each may call"),
    ],
)
def test_permissions_that_make_no_sense_are_refused(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        settings_with(tmp_path, text)


# --- real processes ---------------------------------------------------------------------------------------------------

SHOP = (
    "import immortal\nfrom immortal import CalleeFailed, CallRefused, peer, query\n"
    + COUNTER
    + """
    @query
    def total(self) -> int:
        return self.count

    @query
    def cheat(self) -> int:
        self.count += 1
        return self.count


class Gate(Immortal):
    opened: bool

    def __init__(self) -> None:
        self.opened = False

    @rpc
    async def enter(self) -> None:
        await immortal.event("open")

    @rpc
    def open(self) -> None:
        for _ in range(9):
            immortal.signal("open")


class Crowd(Immortal):
    gate = peer(Gate, "gate")
    inside: int
    refused: int

    def __init__(self) -> None:
        self.inside = 0
        self.refused = 0

    @rpc
    async def enter(self) -> None:
        try:
            await self.gate.enter()
        except CallRefused as error:
            assert "'crowd' has 2 calls of 'gate' open, and may have no more" in str(error)
            await immortal.step(self.note, False)
        else:
            await immortal.step(self.note, True)

    @rpc
    def note(self, inside: bool) -> None:
        self.inside += inside
        self.refused += not inside
        immortal.signal("noted")

    @rpc
    def enter_all(self, count: int) -> None:
        for _ in range(count):
            self.enter.fork()

    @query
    def counts(self) -> list[int]:
        return [self.inside, self.refused]

    @rpc
    async def wait_for(self, inside: int, refused: int) -> list[int]:
        while (counts := await immortal.step(self.counts))[0] < inside or counts[1] < refused:
            await immortal.event("noted")
        return counts


class Shop(Immortal):
    counter = peer(Counter, "counter")
    last: str

    def __init__(self) -> None:
        self.last = ""

    @rpc
    async def sell(self) -> str:
        count = await self.counter.add()
        try:
            await self.counter.reset()
        except CallRefused as error:
            return f"{count}: {error}"
        return "reset"

    @rpc
    async def look(self) -> str:
        said = [f"total {await self.counter.total()}"]
        for method in (self.counter.add, self.counter.cheat):
            try:
                said.append(f"{await method()}")
            except (CallRefused, CalleeFailed) as error:
                said.append(f"{type(error).__name__}: {error}")
        return "; ".join(said)
"""
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "shop.py").write_text(SHOP)
    monkeypatch.setenv("IMMORTAL_HOME", str(tmp_path / HOME))
    return tmp_path


@pytest.fixture
def runs(folder: Path) -> Iterator[Callable[[str, str], Run]]:
    started: list[Run] = []

    def run(name: str, app: str) -> Run:
        started.append(Run(folder, name, app, "--restart"))
        return started[-1]

    yield run
    for each in started:
        each.kill()


@pytest.mark.kills
def test_peers_and_clients_are_kept_to_their_methods_by_real_processes(
    folder: Path, runs: Callable[[str, str], Run]
) -> None:
    for name in ("counter", "shop"):
        immortal(folder, "register", name, "--peer", "tcp://127.0.0.1:*")
    immortal(folder, "keys", "web", "--make", "--client")
    settings = folder / HOME / "counter.toml"
    before = settings.read_text()
    settings.write_text(before + '\n[allow]\nshop = ["add"]\nweb = ["add"]\n')
    counter, shop = runs("counter", "shop:Counter"), runs("shop", "shop:Shop")
    counter.line("ready")
    shop.line("ready")
    assert "may call add" in immortal(folder, "keys", "counter")
    refused = "1: Counter.reset was refused: 'shop' may not call 'reset' of 'counter'"
    assert json.loads(immortal(folder, "call", "shop", "sell")) == refused
    with connect("counter", identity="web") as client:
        assert client.add() == 2
        with pytest.raises(CallRefused, match="'web' may not call 'reset' of 'counter'"):
            client.reset()
        assert client.add() == 3
    assert immortal(folder, "call", "counter", "add").strip() == "4", "its owner's call"
    settings.write_text(before + '\n[allow]\nshop = "*"\n')
    counter.line("permissions changed")
    assert json.loads(immortal(folder, "call", "shop", "sell")) == "reset"
    assert shop.stop() == counter.stop() == 0
    for name in ("counter", "shop"):
        immortal(folder, "log", "verify", name)
        immortal(folder, "verify", name, "--app", f"shop:{name.capitalize()}")
        immortal(
            folder, "what-if", name, "--app", f"shop:{name.capitalize()}"
        )  # no code was asked, so it is no difference


@pytest.mark.kills
def test_who_may_query_can_query_and_nothing_else_of_real_processes(
    folder: Path, runs: Callable[[str, str], Run]
) -> None:
    """Peers and clients; over a crash of both processes; and each replay does the same."""
    for name in ("counter", "shop"):
        immortal(folder, "register", name, "--peer", "tcp://127.0.0.1:*")
    for name in ("web", "writer"):
        immortal(folder, "keys", name, "--make", "--client")
    settings = folder / HOME / "counter.toml"
    allowed = '[allow]\nshop = ["@query"]\nweb = ["@query"]\nwriter = ["add"]\n'
    settings.write_text(f"{settings.read_text()}\n{allowed}")
    counter, shop = runs("counter", "shop:Counter"), runs("shop", "shop:Shop")
    counter.line("ready")
    shop.line("ready")
    assert "may call @query" in immortal(folder, "keys", "counter")
    assert immortal(folder, "call", "counter", "add").strip() == "1", "its owner's call"
    cheated = "Counter.cheat is a query, which only reads, and has changed self.count"
    for _ in range(2):
        total, added, cheat = json.loads(immortal(folder, "call", "shop", "look")).split("; ")
        assert total == "total 1"
        assert added == "CallRefused: Counter.add was refused: 'shop' may not call 'add' of 'counter'"
        assert cheat.startswith("CalleeFailed: ")
        assert cheated in cheat
        with connect("counter", identity="web") as client:
            assert client.total() == 1
            with pytest.raises(CallRefused, match="'web' may not call 'add' of 'counter'"):
                client.add()
            with pytest.raises(CalleeFailed, match=cheated):
                client.cheat()
            assert client.total() == client.query.total() == 1
            with pytest.raises(CalleeFailed, match=cheated):
                client.query.cheat()
            assert client.total() == client.query.total() == 1
        refused = pytest.raises(CallRefused, match="'writer' may not call 'total' of 'counter'")
        with connect("counter", identity="writer") as client, refused:
            client.query.total()
        counter.kill()
        counter = runs("counter", "shop:Counter")
        counter.line("ready")
    assert shop.stop() == counter.stop() == 0
    for name in ("counter", "shop"):
        immortal(folder, "log", "verify", name)
        immortal(folder, "verify", name, "--all", "--app", f"shop:{name.capitalize()}")
