"""Model of owners and holders, with only the counting of handles, and a network that keeps each stream's order."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import msgspec

from immortal.appsdk.nodes.reference_counts import (
    DESTROYED,
    Ended,
    Forgotten,
    Grant,
    Held,
    Holder,
    NoHoldersLeft,
    Owner,
    Passed,
    Released,
    SendMessage,
    Stage,
)

OWNER, KEY = "o", b"k"
COPY, END = "a copy", "its end"
Step = tuple[str, str, str]  # ("op", who, "") or ("arrive", sender, receiver)
Script = dict[str, tuple[str, ...]]
"""Acts of each, done in this order as soon as possible: "pass x", "release", and for the owner "destroy", "ban x"."""

_decode_grants = msgspec.msgpack.Decoder(list[Grant]).decode
_decode_held = msgspec.msgpack.Decoder(list[Held]).decode


class ViolationError(AssertionError):
    """Raised when a promise about handles is broken."""


@dataclass
class World:
    script: Script
    make_owner: type[Owner] = Owner
    make_holder: type[Holder] = Holder
    owner: Owner = field(init=False)
    holders: dict[str, Holder] = field(init=False)
    channels: dict[tuple[str, str], list[object]] = field(default_factory=dict)
    done: dict[str, int] = field(init=False)
    told_end: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.owner = self.make_owner()
        self.owner.create(KEY, 1)
        names = {part.split()[1] for ops in self.script.values() for part in ops if " " in part} | self.script.keys()
        self.holders = {name: self.make_holder() for name in sorted(names) if name != OWNER}
        self.done = dict.fromkeys(self.script, 0)

    def steps(self) -> list[Step]:
        found = [("op", name, "") for name in self.script if self.can(name)]
        return found + [("arrive", *way) for way, queue in sorted(self.channels.items()) if queue]

    def can(self, name: str) -> bool:
        if self.done[name] == len(self.script[name]):
            return False
        if name == OWNER:
            grant = self.owner.grants.get(KEY)
            return grant is not None and grant.stage == Stage.LIVE
        return self.holders[name].holds(OWNER, KEY)

    def do(self, step: Step) -> None:
        kind, one, other = step
        if kind == "op":
            what, _, to = self.script[one][self.done[one]].partition(" ")
            self.done[one] += 1
            self.operate(one, what, to)
        else:
            self.receive(one, other, self.channels[one, other].pop(0))
        self.act()

    def operate(self, name: str, what: str, to: str) -> None:
        if what == "pass":
            if name == OWNER:
                self.owner.note_passed(KEY, to)
            elif to != OWNER:
                self.holders[name].pass_on(OWNER, KEY, to)
            self.put(name, to, COPY)
        elif what == "release":
            self.holders[name].release(OWNER, KEY)
        elif what == "ban":
            self.owner.ban(KEY, to)
        else:
            for one in self.owner.start_end(KEY):
                self.put(OWNER, one, Ended(KEY, DESTROYED))
            self.put(OWNER, OWNER, END)

    def receive(self, source: str, name: str, message: object) -> None:
        if message == END:
            self.owner.end(KEY, DESTROYED)
        elif name == OWNER:
            known = message == COPY
            if isinstance(message, Passed):
                known = self.owner.note_passed(message.key, message.to)
            elif isinstance(message, Released):
                known = self.owner.note_released(message.key, source, message.count)
            if not known:
                raise ViolationError(f"{source} says {message}, and the owner has forgotten the key")
        elif message == COPY:
            if self.holders[name].note_arrived(OWNER, KEY) and name in self.told_end:
                raise ViolationError(f"{name} gets a handle that leads somewhere, though it was told of its end")
        elif isinstance(message, Ended):
            self.told_end.add(name)
            self.holders[name].note_end(OWNER, message.key, message.how)
        elif isinstance(message, Forgotten):
            self.holders[name].forget(OWNER, message.key)

    def act(self) -> None:
        for name, machine in [(OWNER, self.owner), *self.holders.items()]:
            actions, machine.actions = machine.actions, []  # type: ignore[attr-defined]
            for action in actions:
                if isinstance(action, SendMessage):
                    self.put(name, action.to, action.message)
                    if isinstance(action.message, Forgotten):
                        self.require_nobody("is forgotten")
                elif isinstance(action, NoHoldersLeft):
                    self.require_nobody("is said to be released")

    def put(self, sender: str, receiver: str, message: object) -> None:
        self.channels.setdefault((sender, receiver), []).append(message)

    def require_nobody(self, what: str) -> None:
        """Check that no copy exists, except on its way to the owner itself."""
        for (_, to), queue in self.channels.items():
            if to != OWNER and COPY in queue:
                raise ViolationError(f"the key {what}, and a copy is under way to {to}")
        for name, holder in self.holders.items():
            if any(one.count for one in holder.held.values()):
                raise ViolationError(f"the key {what}, and {name} holds it")

    def check_end(self) -> None:
        """Check the counts once all is at rest."""
        grant = self.owner.grants.get(KEY)
        holding = {
            name: one.count for name, holder in self.holders.items() for one in holder.held.values() if one.count
        }
        if (grant.holders if grant else {}) != holding:
            raise ViolationError(f"the owner counts {grant and grant.holders}, held are {holding}")
        if grant is None:
            left = [name for name, holder in self.holders.items() if holder.held]
            if left:
                raise ViolationError(f"{left} remember a key for ever")
        elif grant.stage != Stage.LIVE:
            raise ViolationError(f"the key was destroyed, and {list(grant.holders)} were never told")

    # --- copies: each is also a crash, since all are restored from their checkpoints ----------------------------------

    def fork(self) -> World:
        other = World(self.script, self.make_owner, self.make_holder)
        other.owner = self.make_owner(_decode_grants(msgspec.msgpack.encode(self.owner.save())))
        other.holders = {
            name: self.make_holder(_decode_held(msgspec.msgpack.encode(holder.save())))
            for name, holder in self.holders.items()
        }
        other.channels = {way: list(queue) for way, queue in self.channels.items()}
        other.done, other.told_end = dict(self.done), set(self.told_end)
        return other

    def key(self) -> bytes:
        state = (
            self.owner.save(),
            {name: holder.save() for name, holder in self.holders.items()},
            [(way, [str(one) for one in queue]) for way, queue in sorted(self.channels.items()) if queue],
            list(self.done.values()),
            sorted(self.told_end),
        )
        return hashlib.blake2b(msgspec.msgpack.encode(state), digest_size=16).digest()


def explore(script: Script, owner: type[Owner] = Owner, holder: type[Holder] = Holder) -> tuple[int, int]:
    """Explore all interleavings: (states, ends) seen. Each step starts from a checkpoint. Raises ViolationError."""
    first = World(script, owner, holder)
    seen, stack, ends = {first.key()}, [first], 0
    while stack:
        world = stack.pop()
        steps = world.steps()
        if not steps:
            world.check_end()
            ends += 1
        for step in steps:
            other = world.fork()
            other.do(step)
            key = other.key()
            if key not in seen:
                seen.add(key)
                stack.append(other)
    return len(seen), ends
