"""What leaves only once calls to another instance are durable there: the machine of one coordinator."""

from __future__ import annotations

from immortal.coordinator.core.interfaces import OutputBatch
from immortal.coordinator.core.limits import Limits
from immortal.coordinator.core.output.outbound import BARRIERS_MAX, Barriers
from immortal.coordinator.core.output.output_stream import OutputStream, StreamState

CALL = b"\x0a\x00\x00\x02\x01\x90"


class Streams:
    def __init__(self, *names: str) -> None:
        self.barriers = Barriers(1000)
        self.streams = {name: OutputStream(name, Limits()) for name in names}
        for stream in self.streams.values():
            stream.state = StreamState.OPEN

    def call(self, name: str) -> None:
        self.barriers.stop(self.streams[name])
        self.streams[name].append(1, CALL)

    def barrier(self, name: str, now_ns: int = 0) -> None:
        self.barriers.add(self.streams[name], now_ns)

    def sent(self, name: str, now_ns: int = 0) -> int:
        """How many of its messages may leave now."""
        self.barriers.update(self.streams, now_ns)
        stream, count = self.streams[name], 0
        while (batch := self._next(stream)) is not None:
            count += batch.count
        return count

    def _next(self, stream: OutputStream) -> OutputBatch | None:
        return stream.next_batch(0, stream.last_sendable_position(self.barriers.passed))


def test_what_follows_from_a_call_leaves_once_the_call_is_durable() -> None:
    world = Streams("b", "c")
    world.call("c")
    world.call("b")
    world.barrier("b")
    world.call("c")
    world.call("b")
    assert world.sent("c") == 1, "what was sent before does not wait"
    assert world.sent("b") == 2, "nor does what goes the same way"
    world.streams["b"].acknowledge(1)
    assert world.sent("c") == 1


def test_each_waits_for_those_before_it() -> None:
    world = Streams("a", "b", "c")
    for name in "abc":
        world.call(name)
        world.barrier(name)
    assert [world.sent(name) for name in "abc"] == [1, 0, 0]
    world.streams["a"].acknowledge(1)
    assert [world.sent(name) for name in "abc"] == [0, 1, 0]
    world.streams["b"].acknowledge(1)
    assert world.sent("c") == 1


def test_who_does_not_answer_is_not_waited_for_again_before_it_does() -> None:
    world = Streams("b", "c")
    world.call("b")
    world.barrier("b", now_ns=5)
    world.call("c")
    assert world.barriers.due_ns == 1005
    assert world.sent("c", now_ns=1004) == 0
    assert world.sent("c", now_ns=1005) == 1
    world.call("b")
    world.barrier("b", now_ns=1006)
    world.call("c")
    assert world.sent("c", now_ns=1006) == 1
    world.streams["b"].acknowledge(1)  # it is there again
    world.call("b")
    world.barrier("b", now_ns=1007)
    world.call("c")
    assert world.sent("c", now_ns=1007) == 0


def test_a_backlog_of_barriers_has_a_limit_and_a_new_life_begins_without() -> None:
    world = Streams("b", "c")
    for _ in range(BARRIERS_MAX + 5):
        world.call("b")
        world.barrier("b")
    world.call("c")
    assert world.sent("c") == 0
    world.barriers.forget()
    assert not world.barriers.is_open
    assert world.sent("c") == 1
