"""Clients, a coordinator's machine and an app of the SDK, all real; the test controls disk and network."""

from __future__ import annotations

from typing import Any

import msgspec

import immortal
from immortal import Immortal, query, rpc
from immortal.appsdk.client.clients import AsyncClient, Client, Proxy
from immortal.appsdk.client.connection import Connection
from immortal.appsdk.client.session import Call
from immortal.appsdk.dispatch.dispatcher import Dispatcher
from immortal.appsdk.handlers.definition import definition_of
from immortal.coordinator.core import effects as ef
from immortal.coordinator.core import events as ev
from immortal.coordinator.core.life_cycle.session import Phase
from immortal.coordinator.core.limits import Limits
from immortal.coordinator.log.memory import MemoryLogStore
from immortal.protocol.client_frames import (
    ClientFrame,
    ClientFrameType,
    Reply,
    decode_client_frame,
    decode_replies,
    encode_client_frame,
    encode_request,
)
from tests.helpers.core import COMMITTER_ID, NOW_NS, Driven

START_S = 1000.0


class Refused(Exception):  # noqa: N818
    pass


class Ledger(Immortal):
    """App that keeps each token that it is called with, and returns the token's place."""

    entries: list[int]

    def __init__(self) -> None:
        self.entries = []

    @rpc
    def add(self, token: int) -> int:
        self.entries.append(token)
        return len(self.entries)

    @rpc(raises=[Refused])
    def refuse(self, token: int) -> int:
        self.entries.append(token)
        raise Refused(len(self.entries))

    @rpc
    async def add_later(self, token: int) -> int:
        return await self.relay(token)

    @rpc
    async def relay(self, token: int) -> int:
        return await immortal.step(self.add, token)


class ShownLedger(Ledger):
    @query
    def seen(self) -> list[int]:
        return self.entries


def client_of(proxy: object) -> Client | AsyncClient:
    """Return the client of a proxy, which `connect` gives."""
    assert isinstance(proxy, Proxy)
    return proxy._immortal_parts[0]


def request(token: object, number: int, *calls: bytes, client_id: str = "c", **fields: Any) -> ev.ClientFrameReceived:
    """Return an event with calls from ``number`` on."""
    values: dict[str, Any] = {"count": len(calls), "payload": b"".join(calls), "time_ns": NOW_NS} | fields
    frame = ClientFrame(ClientFrameType.REQUEST, client_id, "a", number=number, **values)
    return ev.ClientFrameReceived(token, frame)


def call(argument: int, method_id: int = 3) -> bytes:
    return encode_request(method_id, msgspec.msgpack.encode((argument,)))


def said(effects: list[ef.Effect]) -> list[tuple[object, str, Any]]:
    """Summarize the replies to clients: (token, type, replies as {number: (kind, value)}, or the number, or a code)."""
    found: list[tuple[object, str, Any]] = []
    for effect in effects:
        if isinstance(effect, ef.ReplyToClient):
            frame = effect.frame
            what: Any = frame.code if frame.code else frame.number
            if frame.frame_type is ClientFrameType.REPLY:
                replies = decode_replies(frame.payload, frame.count)
                what = {reply.number: (reply.kind, reply.value) for reply in replies}
            found.append((effect.token, frame.frame_type.name, what))
    return found


class World:
    """One instance, its app, and any number of clients; nothing happens by itself."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.store = MemoryLogStore(COMMITTER_ID)
        self.limits = limits
        self.now_s = START_S
        self.to_coordinator: list[tuple[int, bytes]] = []  # (client, frame) on their way
        self.to_clients: list[tuple[int, bytes]] = []
        self.connections: dict[int, Connection] = {}
        self.queries: list[Call] = []  # that clients asked, without a log entry
        self.made: dict[Call, tuple[str, int, str | None]] = {}  # method, token and key
        self.app: Dispatcher | None = None
        self._begin()

    def _begin(self) -> None:
        self.driven = Driven(self.store, limits=self.limits, auto=False)
        self.app = None

    def _handle(self, *events: ev.Event) -> None:
        self.driven.now_ns = NOW_NS + int((self.now_s - START_S) * 1e9)
        self._after(self.driven.handle(*events))

    def _after(self, effects: list[ef.Effect]) -> None:
        """Pass on the effects: to clients, and to the app, which takes its bytes later."""
        assert not [effect for effect in effects if isinstance(effect, ef.Stop)], effects
        for effect in effects:
            if isinstance(effect, ef.ReplyToClient):
                self.to_clients.append((effect.token, encode_client_frame(effect.frame)))  # type: ignore[arg-type]
            elif isinstance(effect, ef.CloseApp):
                raise AssertionError(f"the app was refused: {self.driven.reports}")

    # --- moves -------------------------------------------------------------------------------------------------------

    def disk(self) -> None:
        """Finish the disk's oldest job."""
        if self.driven.jobs:
            self._after(self.driven.disk())

    def app_turn(self) -> None:
        """Let the app take its bytes, and answer; a missing app connects first."""
        if self.app is None:
            self.driven.app_bytes.clear()
            self._handle(ev.AppConnected())
            self.app = Dispatcher(definition_of(ShownLedger), lambda: bytes(16))
        data = bytes(self.driven.app_bytes)
        self.driven.app_bytes.clear()
        self.app.receive_data(data)
        sent: list[bytes] = [bytes(chunk) for chunk in self.app.data_to_send()]
        while self.app.next_event() is not None:
            sent += [bytes(chunk) for chunk in self.app.data_to_send()]
        sent += [bytes(chunk) for chunk in self.app.data_to_send()]
        self._handle(ev.AppSent(len(data)), *([ev.AppData(b"".join(sent))] if sent else []))

    def kill_app(self) -> None:
        if self.app is not None:
            self.app = None
            self._handle(ev.AppClosed())

    def kill_coordinator(self) -> None:
        """Kill the coordinator, with its app; frames on their way can still arrive at the next one."""
        self.store = self.store.crash()
        self._begin()

    def take_checkpoint(self) -> None:
        if self.driven.phase is Phase.NORMAL:
            self._handle(ev.CheckpointRequested())

    def open_client(self, number: int, client_id: str | None) -> None:
        self.connections[number] = Connection("a", client_id, self.now_s)

    def submit(self, number: int, method: str, token: int, key: str | None = None) -> Call:
        made = Call(method, msgspec.msgpack.encode((token,)), lambda call: None)
        self.made[made] = method, token, key
        self.connections[number].submit(made, key)
        return made

    def ask(self, number: int) -> None:
        made = Call("@query.seen", b"\x90", lambda call: None)
        self.connections[number].query(made)
        self.queries.append(made)

    def client_turn(self, number: int) -> None:
        connection = self.connections[number]
        if connection.needs_reconnect:
            connection.reopened(self.now_s)
        self.to_coordinator += [(number, data) for data in connection.data_to_send(self.now_s)]

    def arrive_at_coordinator(self, index: int, *, again: bool = False) -> None:
        if self.to_coordinator:
            at = index % len(self.to_coordinator)
            number, data = self.to_coordinator[at] if again else self.to_coordinator.pop(at)
            self._handle(ev.ClientFrameReceived(number, decode_client_frame(data)))

    def arrive_at_client(self, index: int, *, again: bool = False) -> None:
        if self.to_clients:
            at = index % len(self.to_clients)
            number, data = self.to_clients[at] if again else self.to_clients.pop(at)
            if number in self.connections:
                self.connections[number].receive(data, self.now_s)

    def settle(self, calls: list[Call], turns_max: int = 600) -> None:
        """Let everything work from now on, until all ``calls`` are done."""
        for _ in range(turns_max):
            if all(made.outcome is not None for made in calls):
                return
            for number in self.connections:
                self.client_turn(number)
            while self.to_coordinator:
                self.arrive_at_coordinator(0)
            for _ in range(4):
                self.app_turn()
                while self.driven.jobs:
                    self.disk()
            while self.to_clients:
                self.arrive_at_client(0)
            self.now_s += 0.05
        raise AssertionError(
            f"not done: {[made.number for made in calls if made.outcome is None]}, phase {self.driven.phase}, "
            f"{[connection.problem for connection in self.connections.values()]}"
        )

    @property
    def entries(self) -> list[int]:
        """Return the tokens that the app has kept; they are up to date after :meth:`settle`."""
        assert self.app is not None
        found: list[int] = self.app.instance.entries
        return found


def is_conflict(reply: object) -> bool:
    """Return True if the call was refused because its key or number is that of another one."""
    return isinstance(reply, Reply) and reply.kind == 3 and b"~refused" in reply.value and b"known" in reply.value


def value_of(reply: object) -> Any:
    """Return the place that ``reply`` names, either returned or raised."""
    assert isinstance(reply, Reply), reply
    if reply.kind == 3:
        name, arguments, _ = msgspec.msgpack.decode(b"\x93" + reply.value)
        assert name == "Refused"
        return arguments[0]
    return msgspec.msgpack.decode(reply.value)
