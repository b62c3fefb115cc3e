"""Peers that misuse the protocol of ordered multicasts: nothing of theirs is carried out, and the app goes on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

import immortal
from immortal import Immortal, impulse, peer, rpc
from immortal.appsdk.handlers.decorators import CLOCK_METHOD_ID, EFFECT_METHOD_ID
from immortal.appsdk.handlers.definition import definition_of
from immortal.appsdk.ordering.messages import Commit, Fence, Proposed, Resolve, Settled
from immortal.coordinator.core.permissions import Permission, Permissions
from immortal.protocol.extensions import AppDescription
from immortal.protocol.messages import RpcKind, RpcType, encode_incoming_rpc
from immortal.protocol.system_methods import (
    EXECUTED_METHOD_ID,
    FENCING_METHOD_ID,
    ORDER_METHOD_ID,
    ORDERED_METHOD_ID,
    ORDERING_METHOD_ID,
)
from immortal.testing import Environment


class Box(Immortal):
    kept: list[str]

    def __init__(self) -> None:
        self.kept = []

    @rpc
    def keep(self, text: str) -> None:
        self.kept.append(text)

    @rpc
    def other(self) -> None:
        self.kept.append("other")


class Sender(Immortal):
    box = peer(Box, "box")

    @impulse
    def send(self, text: str) -> None:
        immortal.multicast([self.box]).keep.fork(text)


KEEP, OTHER = (definition_of(Box).handlers[name].method_id for name in ("keep", "other"))


def call(method_id: int, *arguments: Any, rpc_type: int = RpcType.FORK, kind: int = RpcKind.CALL) -> bytes:
    return encode_incoming_rpc(method_id, rpc_type, msgspec.msgpack.encode(arguments), kind)


def say(env: Environment, method_id: int, *arguments: Any) -> None:
    """As the peer "test"."""
    outside = env._world.outside
    handler: Any = SimpleNamespace(function=SimpleNamespace(__qualname__="forged"), method_id=method_id)
    outside._send("box", handler, RpcType.FORK, arguments)
    env.run()


FORGED = {
    "another sender": ("other", KEEP, [call(KEEP, "x")]),
    "another method": ("test", KEEP, [call(KEEP, "x"), call(OTHER)]),
    "a negative method": ("test", CLOCK_METHOD_ID, [call(CLOCK_METHOD_ID, 5)]),
    "an order of an operator": ("test", KEEP, [call(ORDER_METHOD_ID, "cancel", 1, "")]),
    "the result of an effect": ("test", KEEP, [call(EFFECT_METHOD_ID, 1, "x", 0, False, None)]),
    "the protocol inside itself": ("test", ORDERING_METHOD_ID, [call(ORDERING_METHOD_ID, (4, 1, 1))]),
    "an expulsion": ("test", FENCING_METHOD_ID, [call(FENCING_METHOD_ID, Fence("boxes", "b", 9))]),
    "an answer": ("test", KEEP, [call(KEEP, 1, None, kind=RpcKind.RETURNED_VALUE)]),
    "somebody else's answer": ("test", KEEP, [call(KEEP, "other", 1, "x", rpc_type=RpcType.ASYNC)]),
    "a client's answer": ("test", KEEP, [call(KEEP, "~web", 1, "x", rpc_type=RpcType.ASYNC)]),
    "an impulse": ("test", KEEP, [call(KEEP, "x", rpc_type=RpcType.IMPULSE)]),
    "half a call": ("test", KEEP, [call(KEEP, "x")[:-1]]),
    "two calls in one": ("test", KEEP, [call(KEEP, "x") + call(KEEP, "y")]),
    "no bytes": ("test", KEEP, [b""]),
    "nothing": ("test", KEEP, []),
}


@pytest.mark.parametrize("forged", FORGED)
def test_calls_that_are_none_of_their_senders_are_refused(forged: str) -> None:
    sender, method_id, calls = FORGED[forged]
    with Environment(fail_alone=True) as env:
        box, honest = env.start(Box, "box"), env.start(Sender, "honest")
        say(env, ORDERED_METHOD_ID, method_id, sender, 1, 1, calls)
        say(env, ORDERING_METHOD_ID, (4, 1, 1))  # Commit
        honest.send(Sender.send, "honest")
        env.run()
        assert box.state.kept == ["honest"]
        assert len(box.dead_letters) == 2


@pytest.mark.parametrize("message", [Commit(1, 1), Proposed(1, 1), Settled(7)])
def test_messages_about_runs_that_there_are_not_change_nothing(message: Any) -> None:
    with Environment(fail_alone=True) as env:
        box = env.start(Box, "box")
        say(env, ORDERING_METHOD_ID, message)
        say(env, ORDERING_METHOD_ID, "nonsense")
        say(env, ORDERED_METHOD_ID, {})
        assert len(box.dead_letters) == 3
        box.call(Box.keep, "goes on")
        assert box.state.kept == ["goes on"]


def test_who_may_not_call_a_method_may_not_multicast_it() -> None:
    permissions = Permissions("box", {"guest": Permission(frozenset({"keep"}))})
    permissions.describe(AppDescription(1, {("", KEEP): "Box.keep", ("", OTHER): "Box.other"}))

    def forbidden(*arguments: Any, method_id: int = ORDERED_METHOD_ID) -> bool:
        return bool(permissions.find_forbidden("guest", call(method_id, *arguments)))

    assert not forbidden(KEEP, "guest", 1, 1, [])
    assert forbidden(OTHER, "guest", 1, 1, [])
    assert forbidden("text")
    assert forbidden()
    assert not forbidden((1, 1, 1), method_id=ORDERING_METHOD_ID)
    assert forbidden(1, [], method_id=EXECUTED_METHOD_ID)


def test_who_may_not_change_a_group_expels_nobody() -> None:
    fence = call(FENCING_METHOD_ID, Fence("boxes", "b", 1 << 40))
    for methods, may in (({"keep", "group_deliver"}, False), ({"group_change"}, True), ({"keep", "group_told"}, True)):
        permissions = Permissions("box", {"guest": Permission(frozenset(methods))})
        permissions.describe(AppDescription(1, {("", KEEP): "Box.keep"}))
        assert bool(permissions.find_forbidden("guest", fence)) != may, methods


def test_an_app_without_groups_takes_no_expulsion() -> None:
    with Environment(fail_alone=True) as env:
        box = env.start(Box, "box")
        say(env, FENCING_METHOD_ID, Fence("boxes", "b", 1))
        say(env, FENCING_METHOD_ID, Resolve("boxes", "b", 1, 1))
        say(env, ORDERING_METHOD_ID, Fence("boxes", "b", 1))
        assert len(box.dead_letters) == 3
