"""Model of ordered multicast with a group whose member is expelled: by any member, dead or alive, at any time.

The group ``G`` has one view, 1. "d" can crash at any step; then it neither sends nor receives until it is back,
if ever. A message to the group goes to all of its members; an expelling member sends the change to the others.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Self

from immortal.appsdk.ordering.groups import Expel
from immortal.appsdk.ordering.machine import Ordering
from immortal.appsdk.ordering.messages import Cancel, Scope
from tests.helpers.ordering_world import Message, Op, Script, Step, ViolationError, World

GROUP = Scope("G", 1)
DEAD = "d"
CRASH_CHANCE = 0.1


def to_group(*members: str) -> Op:
    return Op("group", members)


def expel(*members: str) -> Op:
    """Return the operation that expels "d". ``members``: of the view."""
    return Op("expel", members)


@dataclass
class ExpellingWorld(World):
    down: bool = False
    was_down: bool = False
    changes: dict[str, tuple[str, ...]] = field(default_factory=dict)

    # --- steps --------------------------------------------------------------------------------------------------------

    def steps(self) -> list[Step]:
        if not self.down:
            return super().steps() + ([] if self.was_down else [("crash", DEAD, "")])
        found = [one for one in super().steps() if DEAD not in one]
        return found or [("back", DEAD, "")]

    def take(self, step: Step) -> None:
        if step[0] == "crash":
            self.down = self.was_down = True
        elif step[0] == "back":
            self.check_without()
            self.down = False
        else:
            super().take(step)

    def send(self, name: str, op: Op, label: str) -> None:
        if op.kind == "expel":
            self.machines[name].expel("G", DEAD, 1, list(op.destinations))
        elif op.kind == "group":
            self._to_group(name, label, op.destinations)
        else:
            super().send(name, op, label)
            return
        self.act(name)

    def _to_group(self, name: str, label: str, members: tuple[str, ...]) -> None:
        sending = self.sending[name]
        self.messages[label] = Message(members, frozenset())
        sending.multicast(label, 1, list(members), [label.encode()], scope=GROUP)
        sending.advance()

    def act(self, name: str) -> None:
        machine = self.machines[name]
        while machine.actions:
            for action in machine.actions:
                if isinstance(action, Expel):
                    members = next(op.destinations for op in self.script[name] if op.kind == "expel")
                    others = tuple(one for one in members if one not in action.leaving)
                    self.changes[f"e{name}"] = others
                    self._to_group(name, f"e{name}", others)
            super().act(name)

    def put(self, sender: str, receiver: str, message: object) -> None:
        if isinstance(message, Cancel):
            self.run_labels.pop((sender, message.number), None)
        super().put(sender, receiver, message)

    # --- promises -----------------------------------------------------------------------------------------------------

    def receivers(self, label: str) -> tuple[str, ...]:
        return self.changes[label] if label in self.changes else super().receivers(label)

    def is_run(self, label: str) -> bool:
        if label in self.changes:
            return True
        name = label.rstrip("0123456789")
        return self.script[name][int(label.removeprefix(name)) - 1].kind in ("group", "multicast")

    def _of_group(self, name: str) -> list[str]:
        """Return the group's messages and changes that ``name`` has got."""
        return [
            one for one in self.delivered[name] if one in self.changes or (self.is_run(one) and self._is_to_group(one))
        ]

    def _is_to_group(self, label: str) -> bool:
        name = label.rstrip("0123456789")
        return self.script[name][int(label.removeprefix(name)) - 1].kind == "group"

    def _members(self) -> set[str]:
        return {one for ops in self.script.values() for op in ops if op.kind == "group" for one in op.destinations}

    def check_without(self) -> None:
        """Check that the others wait for nothing once they have done all that is possible without "d"."""
        expels = any(op.kind == "expel" for name, ops in self.script.items() for op in ops if name != DEAD)
        if not expels:
            raise ViolationError("nobody expels")
        for name, machine in self.machines.items():
            sent_to_it = any(op.kind != "group" and DEAD in op.destinations for op in self.script.get(name, ()))
            sent_to_it = sent_to_it and not any(op.kind == "expel" for op in self.script[name])
            if (
                name != DEAD
                and not sent_to_it
                and (not machine.is_idle or self.sending[name].waiting or machine.state.expulsions)
            ):
                raise ViolationError(f"{name} waits for {DEAD!r}, which is expelled")
        self._check_alike()

    def _check_alike(self) -> None:
        others = sorted(self._members() - {DEAD})
        for name in others[1:]:
            if self._of_group(name) != self._of_group(others[0]):
                raise ViolationError(f"{others[0]} and {name} have not had the same: {self.delivered}")

    def check_end(self) -> None:
        self.check_without()
        self.check_consistency()
        others = sorted(self._members() - {DEAD})
        for name in others:
            seen = self._of_group(name)
            change = min((seen.index(one) for one in self.changes), default=len(seen))
            before = [one for one in seen[:change] if not one.startswith(DEAD)]
            mine = [one for one in self._of_group(DEAD) if not one.startswith(DEAD)]
            if mine != before[: len(mine)]:
                raise ViolationError(f"{DEAD} has {mine}, {name} has {before} in front of the change")
            if len(mine) < len(before):
                raise ViolationError(f"{DEAD} lacks some of {before}: it was a member there")

    # --- copies -------------------------------------------------------------------------------------------------------

    def fork(self) -> Self:
        other = super().fork()
        other.changes = dict(self.changes)
        return other

    def key(self) -> bytes:
        return super().key() + bytes((self.down, self.was_down))


def walk(script: Script, random: Random, make: type[Ordering] = Ordering, *, lates: int = 0) -> None:
    """Run one interleaving; each step starts from a checkpoint. Raises ViolationError."""
    world = ExpellingWorld(script, make, lates_left=lates)
    while steps := [one for one in world.steps() if one[0] != "crash" or random.random() < CRASH_CHANCE]:
        world = world.after(random.choice(steps))
    world.check_end()


def explore_expelling(
    script: Script, make: type[Ordering] = Ordering, *, first_of: str = "", lates: int = 0
) -> tuple[int, int]:
    """Explore as :func:`tests.helpers.ordering_world.explore`. ``first_of``: its messages are delivered first."""
    first = ExpellingWorld(script, make, lates_left=lates)
    while first_of and (steps := [one for one in first.steps() if first_of in one]):
        first = first.after(steps[0])
    seen = {first.key()}
    stack = [first]
    ends = 0
    while stack:
        world = stack.pop()
        steps = world.steps()
        if not [one for one in steps if one[0] != "crash"]:
            world.check_end()
            ends += 1
            continue
        for step in steps:
            other = world.after(step)
            key = other.key()
            if key not in seen:
                seen.add(key)
                stack.append(other)
    return len(seen), ends
