"""Model of instances with only the algorithm of ordered multicast, and a network that keeps each stream's order.

Each operation and each arrival is a step, which the driver of the world chooses. Each delivery is checked at once: it
must follow all that was visible anywhere when its message was sent. That is causality by any means, since a side
channel can lead from anywhere to anywhere.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Self

import msgspec

from immortal.appsdk.ordering.groups import State
from immortal.appsdk.ordering.machine import Ordering, Release, RunsCommitted, Send
from immortal.appsdk.ordering.messages import Commit, Propose
from immortal.appsdk.ordering.send_queue import Held, Run, SendQueue, Waiting

Step = tuple[str, str, str]  # ("op", instance, "") or ("arrive", sender, receiver)


class Op(msgspec.Struct, frozen=True):
    """Operation of a script. ``kind``: "multicast", or "plain" to the one destination."""

    kind: str
    destinations: tuple[str, ...]


Script = dict[str, tuple[Op, ...]]
"""Operations of each instance, which it sends in this order, at any time."""


def multicast(*destinations: str) -> Op:
    return Op("multicast", destinations)


def plain(destination: str) -> Op:
    return Op("plain", (destination,))


class ViolationError(AssertionError):
    """Raised when the promised order is broken."""


@dataclass
class Message:
    """Message that was sent: its destinations, and what was visible somewhere by then."""

    to: tuple[str, ...]
    before: frozenset[str]
    known: list[str] = field(init=False)  # the same, in order

    def __post_init__(self) -> None:
        self.known = sorted(self.before)


@dataclass
class World:
    script: Script
    make: type[Ordering] = Ordering
    machines: dict[str, Ordering] = field(default_factory=dict)
    channels: dict[tuple[str, str], list[object]] = field(default_factory=dict)
    done: dict[str, int] = field(default_factory=dict)
    sending: dict[str, SendQueue] = field(default_factory=dict)
    run_labels: dict[tuple[str, int], set[str]] = field(default_factory=dict)
    delivered: dict[str, list[str]] = field(default_factory=dict)
    visible: set[str] = field(default_factory=set)
    messages: dict[str, Message] = field(default_factory=dict)
    lates_left: int = 0  # how often a run that delays others can be postponed, at any time
    saved: dict[str, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = {one for ops in self.script.values() for op in ops for one in op.destinations} | self.script.keys()
        for name in sorted(names):
            self.join(name, self.make(name))
            self.save(name)
            self.done.setdefault(name, 0)
            self.delivered.setdefault(name, [])

    # --- steps --------------------------------------------------------------------------------------------------------

    def steps(self) -> list[Step]:
        found = [("op", name, "") for name, ops in self.script.items() if self.done[name] < len(ops)]
        if self.lates_left:
            found += [("late", name, "") for name, machine in self.machines.items() if machine.late is not None]
        return found + [("arrive", *way) for way, queue in sorted(self.channels.items()) if queue]

    def commuting(self, *, early_commits: bool = False) -> Step | None:
        """Return a step that all others commute with, so that it can be taken first: an arrival at an instance that
        only sends, and has nothing left to send. ``early_commits``: also a commit once all is sent, since all clocks
        have then advanced, which a broken algorithm forgets."""
        all_sent = early_commits and all(self.done[name] == len(ops) for name, ops in self.script.items())
        for (sender, receiver), queue in sorted(self.channels.items()):
            if queue and all_sent and isinstance(queue[0], Commit) and not self.sending[receiver].must_hold:
                return "arrive", sender, receiver
            is_destination = any(receiver in op.destinations for ops in self.script.values() for op in ops)
            if queue and not is_destination and self.done[receiver] == len(self.script.get(receiver, ())):
                return "arrive", sender, receiver
        return None

    def do(self, step: Step) -> None:
        self.take(step)
        self.save(_who_acts(step))

    def take(self, step: Step) -> None:
        kind, one, other = step
        if kind == "late":
            machine = self.machines[one]
            assert machine.late is not None
            self.lates_left -= 1
            machine.postpone(machine.late)
            self.act(one)
            return
        if kind == "op":
            number = self.done[one]
            op = self.script[one][number]
            self.done[one] = number + 1
            self.send(one, op, f"{one}{number + 1}")
            return
        message = self.channels[one, other].pop(0)
        self.receive(other, one, message)

    def send(self, name: str, op: Op, label: str) -> None:
        sending = self.sending[name]
        if op.kind == "multicast":
            self.messages[label] = Message(op.destinations, self.before(name, label))
            sending.multicast(label, 1, list(op.destinations), [label.encode()])
            sending.advance()
        elif sending.must_hold:
            sending.hold(op.destinations[0], [label.encode()])
        else:
            self.leave(name, Held(op.destinations[0], 0, [label.encode()]))
        self.act(name)

    def leave(self, name: str, held: Held) -> None:
        for part in held.parts:
            label = part.decode()
            self.messages[label] = Message((held.destination,), self.before(name, label))
            self.put(name, held.destination, label)

    def before(self, name: str, label: str) -> frozenset[str]:
        """Return what is visible somewhere by now, and the runs that ``name`` has sent before."""
        earlier = self.script[name][: int(label.removeprefix(name)) - 1]
        mine = {f"{name}{index + 1}" for index, one in enumerate(earlier) if one.kind == "multicast"}
        return frozenset(self.visible | mine)

    def join(self, name: str, machine: Ordering, waiting: list[Waiting] | None = None) -> None:
        self.machines[name] = machine
        self.sending[name] = SendQueue(machine, lambda held: self.leave(name, held), waiting)

    def put(self, sender: str, receiver: str, message: object) -> None:
        self.channels.setdefault((sender, receiver), []).append(message)

    def receive(self, name: str, source: str, message: object) -> None:
        machine = self.machines[name]
        if isinstance(message, str):
            if machine.is_busy:
                machine.enqueue_call(message.encode())
            else:
                self.deliver(name, [message.encode()])
        elif isinstance(message, Propose):
            machine.handle_propose(message)
        elif not machine.handle_message(source, message):  # type: ignore[arg-type]
            raise ViolationError(f"{name} knows nothing of {message} of {source}")
        self.act(name)

    def act(self, name: str) -> None:
        machine = self.machines[name]
        while machine.actions:
            actions, machine.actions = machine.actions, []
            for action in actions:
                if isinstance(action, Send):
                    if isinstance(action.message, Propose):
                        run = {call.decode() for call in action.message.calls}
                        self.run_labels[name, action.message.number] = run
                    self.put(name, action.destination, action.message)
                elif isinstance(action, Release):
                    self.deliver(name, action.filed.calls)
                    machine.note_executed()
                elif isinstance(action, RunsCommitted):  # from now on whoever hears of the sender can know of the run
                    self.visible.update(self.run_labels.get((name, action.number), ()))
            self.sending[name].advance()

    # --- promises -----------------------------------------------------------------------------------------------------

    def deliver(self, name: str, calls: list[bytes]) -> None:
        for call in calls:
            label = call.decode()
            mine = self.delivered[name]
            if label in mine:
                raise ViolationError(f"{name} gets {label} twice")
            for earlier in self.messages[label].known:
                if name in self.receivers(earlier) and earlier not in mine:
                    raise ViolationError(
                        f"causality: {name} gets {label} before {earlier}, which was visible before it"
                    )
            mine.append(label)
            self.visible |= self.messages[label].before
            if self.is_run(label):
                self.visible.add(label)

    def receivers(self, label: str) -> tuple[str, ...]:
        name = label.rstrip("0123456789")
        return self.script[name][int(label.removeprefix(name)) - 1].destinations

    def is_run(self, label: str) -> bool:
        name = label.rstrip("0123456789")
        return self.script[name][int(label.removeprefix(name)) - 1].kind == "multicast"

    def check_end(self) -> None:
        """Check all promises once all is at rest."""
        for label, message in self.messages.items():
            for name in message.to:
                if label not in self.delivered[name]:
                    raise ViolationError(f"{name} never gets {label}")
        if any(one.waiting for one in self.sending.values()) or not all(one.is_idle for one in self.machines.values()):
            raise ViolationError("something waits for ever")
        self.check_consistency()

    def check_consistency(self) -> None:
        """Check that one order of all runs fits what each instance has seen."""
        behind: dict[str, set[str]] = {}
        for seen in self.delivered.values():
            runs = [one for one in seen if self.is_run(one)]
            for first, second in pairwise(runs):
                behind.setdefault(first, set()).add(second)
        placed: set[str] = set()
        walked: set[str] = set()

        def visit(one: str) -> None:
            if one in walked and one not in placed:
                raise ViolationError(f"consistency: no order of all fits what was seen: {self.delivered}")
            if one not in walked:
                walked.add(one)
                for other in behind.get(one, ()):
                    visit(other)
                placed.add(one)

        for one in list(behind):
            visit(one)

    # --- copies -------------------------------------------------------------------------------------------------------

    def after(self, step: Step, *, crashes: bool = True) -> Self:
        """Return a copy that has done ``step``, in which one instance acts: it is restored from its checkpoint.

        Without ``crashes`` it is not, and this world is of no use any more.
        """
        other = self.fork()
        name = _who_acts(step)
        machine, waiting = self.machines[name], self.sending[name].waiting
        if crashes:
            state, waiting = _decode(self.saved[name])
            machine = self.make(name, state)
        other.join(name, machine, waiting)
        other.do(step)
        return other

    def fork(self) -> Self:
        """Return a copy. Both have the same instances, of which none may act in either."""
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        other.machines, other.sending, other.saved = dict(self.machines), dict(self.sending), dict(self.saved)
        other.run_labels = dict(self.run_labels)
        other.channels = {way: list(queue) for way, queue in self.channels.items()}
        other.done = dict(self.done)
        other.delivered = {name: list(seen) for name, seen in self.delivered.items()}
        other.visible = set(self.visible)
        other.messages = dict(self.messages)
        return other

    def save(self, name: str) -> None:
        self.saved[name] = msgspec.msgpack.encode((self.machines[name].save(), self.sending[name].waiting))

    def key(self) -> bytes:
        text = msgspec.msgpack.encode(
            (
                list(self.saved.values()),
                [(way, [str(each) for each in queue]) for way, queue in sorted(self.channels.items()) if queue],
                list(self.done.values()),
                list(self.delivered.values()),
                sorted(self.visible),
                self.lates_left,
                sorted((label, one.known) for label, one in self.messages.items()),
            )
        )
        return hashlib.blake2b(text, digest_size=16).digest()


def _who_acts(step: Step) -> str:
    return step[2] or step[1]


_decode = msgspec.msgpack.Decoder(tuple[State, list[Run | Held]]).decode


def explore(
    script: Script, make: type[Ordering] = Ordering, *, early_commits: bool = False, lates: int = 0
) -> tuple[int, int]:
    """Explore all interleavings: (states seen, ends seen). Each step starts from a checkpoint. Raises ViolationError.

    ``early_commits``: see :meth:`World.commuting`.
    """
    first = World(script, make, lates_left=lates)
    seen = {first.key()}
    stack = [first]
    ends = 0
    while stack:
        world = stack.pop()
        commuting = world.commuting(early_commits=early_commits)
        steps = [commuting] if commuting is not None else world.steps()
        if not steps:
            world.check_end()
            ends += 1
        for step in steps:
            other = world.after(step)
            key = other.key()
            if key not in seen:
                seen.add(key)
                stack.append(other)
    return len(seen), ends
