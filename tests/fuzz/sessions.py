"""Whole sessions: a real coordinator's machine and a real app, among peers and clients of which some mean harm.

The bytes of an input say who does what next. Honest ones do what the protocol says; the peer ``evil`` and the client
``worse`` send what they like under their own names, as their keys let them; at the end the app's connection is taken by
somebody who says anything. What must hold is in :meth:`Session.check`.
"""

from __future__ import annotations

from datetime import timedelta

import msgspec

import immortal
from immortal import Immortal, initial, peer, rpc
from immortal.appsdk.handlers.decorators import CLOCK_METHOD_ID, EFFECT_METHOD_ID, INITIAL_METHOD_ID, method_id_of_name
from immortal.appsdk.handlers.definition import definition_of
from immortal.appsdk.running.local_app import LocalApp
from immortal.coordinator.core import effects as ef
from immortal.coordinator.core import events as ev
from immortal.protocol.client_frames import (
    ClientFrame,
    ClientFrameType,
    ReplyKind,
    decode_replies,
    encode_numbers,
    encode_request,
)
from immortal.protocol.messages import RpcKind, RpcType, decode_incoming_rpc, decode_messages, encode_incoming_rpc
from immortal.protocol.peer_frames import FrameType, PeerFrame
from tests.fuzz.fields import Fields
from tests.helpers.core import Driven

HOUR_NS = 3600 * 10**9
STEPS_MAX = 48
TRUTH = 42
HONEST = "the honest peer"  # what only it says of itself


class Ghost(Immortal):
    """Another instance, which the app asks."""

    @rpc
    def total(self) -> int:
        return TRUTH


async def charge() -> str:
    """An effect, which never comes to its end here."""
    raise AssertionError


class Service(Immortal):
    """What is attacked."""

    starts: int
    seen: list[str]
    hits: dict[str, list[int]]
    added: int

    ghost = peer(Ghost, "ghost")

    def __init__(self) -> None:
        self.starts = 0
        self.seen = []
        self.hits = {}
        self.added = 0

    @initial
    def begin(self) -> None:
        self.starts += 1
        self.nap.fork()
        self.pay.fork()

    @rpc
    def note(self, text: str) -> None:
        self.seen.append(text)

    @rpc
    def hit(self, sender: str, number: int) -> None:
        self.hits.setdefault(sender, []).append(number)

    @rpc
    def add(self, number: int) -> int:
        self.added += number
        return self.added

    @rpc
    def boom(self, sender: str) -> None:
        self.hits.setdefault(sender, []).append(-1)
        raise RuntimeError(sender)

    @rpc
    async def ask(self) -> None:
        await immortal.step(self.note, f"ghost {await self.ghost.total()}")

    @rpc
    async def wait_long(self) -> str:
        await immortal.sleep(timedelta(hours=2))
        return "waited"

    @rpc
    async def nap(self) -> None:
        await immortal.sleep(timedelta(hours=1))
        await immortal.step(self.note, "woken")

    @rpc
    async def pay(self) -> None:
        await immortal.step(self.note, f"paid {await immortal.effect(charge)}")


METHODS = ("note", "hit", "add", "boom", "ask", "wait_long", "nap", "pay", "total")
IDS = tuple(method_id_of_name(name) for name in METHODS)


class Session:
    """One run of one input."""

    def __init__(self, data: bytes) -> None:
        self.data = Fields(data)
        self.driven = Driven(name="a")
        self.begun_ns = self.driven.now_ns
        self.positions = {"honest": 0, "evil": 0, "ghost": 0}  # sent so far, of each peer
        self.asked: list[int] = []  # numbers of calls that wait for the ghost's answer
        self.truths = 0  # answers that the ghost has given
        self.requests = 0  # of the honest client
        self.asks = 0  # of the client that asks for the ghost's answers, and waits
        self.replies: dict[int, bytes] = {}
        self.connect()
        for name in self.positions:
            self.frame(name, FrameType.HELLO, 0)

    # --- the instance ------------------------------------------------------------------------------------------------

    def connect(self) -> None:
        self.app = LocalApp(definition_of(Service), bytes(16), self.driven.now_ns)  # its effects wait
        self.driven.connect()
        self.settle()

    def settle(self) -> None:
        """Until neither the coordinator nor the app has more to say."""
        while self.driven.app_bytes or self.app.output:
            data = bytes(self.driven.app_bytes)
            self.driven.app_bytes.clear()
            self.app.receive(data)
            assert self.app.error is None, self.app.error
            self.driven.handle(ev.AppSent(len(data)))
            said = bytes(self.app.output)
            self.app.output.clear()
            if said:
                self.driven.data(said)
            self.heard()
        assert not self.driven.of(ef.Stop), self.driven.stop.error
        assert not self.driven.of(ef.CloseApp), self.driven.reports

    def heard(self) -> None:
        """What the coordinator has sent to peers and clients."""
        for effect in self.driven.effects:
            if isinstance(effect, ef.SendToPeer) and effect.frame.receiver == "ghost":
                self.at_ghost(effect)
            elif (
                isinstance(effect, ef.ReplyToClient)
                and effect.frame.client_id == "honest"
                and effect.frame.frame_type is ClientFrameType.REPLY
            ):
                for reply in decode_replies(effect.frame.payload, effect.frame.count):
                    assert reply.kind == ReplyKind.VALUE, reply
                    self.replies[reply.number] = reply.value
        self.driven.effects = [one for one in self.driven.effects if isinstance(one, ef.Stop | ef.CloseApp)]

    def at_ghost(self, effect: ef.SendToPeer) -> None:
        frame = effect.frame
        if frame.frame_type is FrameType.HELLO:
            self.driven.reply(FrameType.WELCOME, len(self.asked), tag=effect.tag, destination="ghost")
        elif frame.position > len(self.asked):
            for _, start, end in decode_messages(frame.payload):
                rpc = decode_incoming_rpc(frame.payload, start, end)
                caller, number = msgspec.msgpack.decode(rpc.arguments)
                assert (caller, rpc.method_id) == ("a", method_id_of_name("total"))
                self.asked.append(number)
            self.driven.reply(FrameType.TRIM_TO, len(self.asked), tag=effect.tag, destination="ghost")

    def frame(self, sender: str, frame_type: FrameType, position: int, *messages: bytes, count: int = -1) -> None:
        payload = b"".join(messages)
        count = len(messages) if count < 0 else count
        sent = PeerFrame(frame_type, sender, "a", 70 + len(sender), 1, position, count, 5, payload)
        effects = self.driven.handle(ev.PeerFrameReceived("token", sent))
        replies = [one.frame for one in effects if isinstance(one, ef.ReplyToPeer)]
        for reply in replies:
            if reply.frame_type in (FrameType.TRIM_TO, FrameType.WELCOME, FrameType.RESEND):
                self.positions[sender] = reply.position
        self.heard()
        self.settle()

    # --- who does what -----------------------------------------------------------------------------------------------

    def run(self) -> None:
        doings = (
            self.honest_peer,
            self.evil_peer,
            self.evil_peer,
            self.evil_answer,
            self.evil_frame,
            self.honest_client,
            self.worse_client,
            self.ghost_answers,
            self.ask,
            self.crash,
            self.time_passes,
            self.checkpoint,
        )
        for _ in range(STEPS_MAX):
            if not self.data.left:
                break
            doings[self.data.number() % len(doings)]()
        self.check()
        before = self.app.state_check()
        self.crash()
        assert self.app.state_check() == before, "a replay leads elsewhere"
        self.check()
        self.app_says_anything()

    def honest_peer(self) -> None:
        position = self.positions["honest"]
        many = [
            encode_incoming_rpc(IDS[1], RpcType.FORK, msgspec.msgpack.encode((HONEST, position + index + 1)))
            for index in range(self.data.number() % 3 + 1)
        ]
        self.frame("honest", FrameType.BATCH, position + 1, *many)
        assert self.positions["honest"] == position + len(many)

    def evil_message(self) -> bytes:
        """A call or answer, near what could be taken."""
        data = self.data
        kind, shape = data.number() % 4, data.number()
        method = (*IDS, INITIAL_METHOD_ID, CLOCK_METHOD_ID, EFFECT_METHOD_ID, 5)[data.number() % (len(IDS) + 4)]
        names = ("evil", "~honest", "~", "a", "", "ghost", "honest", "evi", "evil2")
        front: tuple[object, ...] = (names[data.number() % len(names)], data.number() % 16) if shape & 1 else ()
        items = (data.number(), "evil", self.asked[-1] if self.asked else 1, None, [1], {"a": 1}, 1 << 62, TRUTH + 1)
        rest = tuple(items[data.number() % len(items)] for _ in range(shape >> 1 & 3))
        arguments = msgspec.msgpack.encode((*front, *rest))
        if shape & 16:
            arguments = arguments[: data.number()] + data.piece(shape >> 5)
        return encode_incoming_rpc(method, data.number() % 3, arguments, RpcKind(kind if shape & 8 else 0))

    def evil_peer(self) -> None:
        many = [self.evil_message() for _ in range(self.data.number() % 3 + 1)]
        self.frame("evil", FrameType.BATCH, self.positions["evil"] + 1, *many)

    def evil_answer(self) -> None:
        """To all calls that are open."""
        numbers = [*self.asked[-8:], *range(1, 9)]
        kind = (RpcKind.RETURNED_VALUE, RpcKind.RETURNED_NOTHING, RpcKind.RAISED)[self.data.number() % 3]
        rest: tuple[object, ...] = {1: (666,), 2: (), 3: ("Evil", [], {})}[kind]
        many = [
            encode_incoming_rpc(IDS[8], RpcType.ASYNC, msgspec.msgpack.encode((number, *rest)), kind)
            for number in numbers
        ]
        self.frame("evil", FrameType.BATCH, self.positions["evil"] + 1, *many)

    def evil_frame(self) -> None:
        data = self.data
        frame_type = (*FrameType, FrameType.BATCH)[data.number() % (len(FrameType) + 1)]
        position = self.positions["evil"] + data.number() - 100
        payload = data.piece(data.number() & 31)
        self.frame("evil", frame_type, max(position, 1), payload or b"x", count=max(1, data.number() & 7))

    def client(self, frame: ClientFrame) -> None:
        self.driven.handle(ev.ClientFrameReceived(frame.client_id, frame))
        self.heard()
        self.settle()

    def honest_client(self) -> None:
        self.requests += 1
        call = encode_request(IDS[2], msgspec.msgpack.encode((self.data.number(),)))
        self.client(ClientFrame(ClientFrameType.REQUEST, "honest", "a", 0, self.requests, 0, 1, 5, call))
        assert msgspec.msgpack.decode(self.replies[self.requests]) == self.app.instance.added

    def worse_client(self) -> None:
        data = self.data
        frame_type = (ClientFrameType.REQUEST, *ClientFrameType)[data.number() % (len(ClientFrameType) + 1)]
        count, number, acknowledged = data.number() & 3, data.number() & 15, data.number() & 15
        payload = b""
        if frame_type is ClientFrameType.REQUEST:
            count, number = max(count, 1), max(number, 1)
            method = (*IDS, -1, -2, -3, 5)[data.number() % (len(IDS) + 4)]
            arguments = msgspec.msgpack.encode((data.number(), "~honest")[: data.number() & 3])
            payload = b"".join([encode_request(method, arguments) if method >= 0 else data.piece(9) or b"x"] * count)
        elif frame_type is ClientFrameType.PING:
            payload = encode_numbers(data.number() for _ in range(count))
        self.client(ClientFrame(frame_type, "worse", "a", 0, number, acknowledged, count, data.number(), payload))

    def ghost_answers(self) -> None:
        """Each call once, in order."""
        if self.truths == len(self.asked):
            return
        number = self.asked[self.truths]
        self.truths += 1
        answer = encode_incoming_rpc(
            IDS[8], RpcType.ASYNC, msgspec.msgpack.encode((number, TRUTH)), RpcKind.RETURNED_VALUE
        )
        self.frame("ghost", FrameType.BATCH, self.positions["ghost"] + 1, answer)

    def ask(self) -> None:
        self.asks += 1
        call = encode_request(IDS[4], b"\x90")
        self.client(ClientFrame(ClientFrameType.REQUEST, "asker", "a", 0, self.asks, 0, 1, 5, call))

    def crash(self) -> None:
        """App and coordinator; all that is durable stays."""
        now_ns, self.driven = self.driven.now_ns, self.driven.crash()
        self.driven.now_ns = now_ns
        self.connect()
        for name in self.positions:
            self.frame(name, FrameType.HELLO, self.positions[name])

    def time_passes(self) -> None:
        self.driven.now_ns += self.data.number() * 10**9
        self.driven.handle(ev.Tick())
        self.app.log_time(self.driven.now_ns)
        self.settle()

    def checkpoint(self) -> None:
        self.driven.handle(ev.CheckpointRequested())
        self.heard()
        self.settle()

    def app_says_anything(self) -> None:
        """Somebody else in the app's place: the instance may refuse, or find out at the next recovery."""
        driven = self.driven
        said = self.data.piece(1 << 12)
        driven.data(said)
        driven.close()
        second = driven.crash()
        second.connect()
        assert second.store.summary().last_sequence_id >= 0

    # --- what must hold ----------------------------------------------------------------------------------------------

    def check(self) -> None:
        state = self.app.instance
        elapsed_ns = self.driven.now_ns - self.begun_ns
        assert state.starts == 1, "the initial message came again"
        own = [text for text in state.seen if not text.startswith("evil")]
        assert "woken" not in own or elapsed_ns >= HOUR_NS, "time was forged"
        assert not [text for text in own if text.startswith("paid")], "an effect's result was forged"
        told = [text for text in own if text.startswith("ghost")]
        assert told == [f"ghost {TRUTH}"] * min(self.truths, len(told)), "an answer was forged"
        hits = state.hits.get(HONEST, [])
        assert hits == list(range(1, self.positions["honest"] + 1)), "lost, doubled, or out of order"


def session(data: bytes) -> None:
    """The target."""
    Session(data).run()
