"""Fleets with one planted bug each, recorded into logs, and the question whose answer has to name the bug.

A seed makes the source of 2 to 5 services in a chain, of which one has one wrong line, which matters for one input
alone: the culprit.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from immortal.coordinator.config import InstanceSettings
from immortal.coordinator.instances import own_logs
from immortal.coordinator.instances.registry import Registry
from immortal.replay.travel.sessions import Sessions
from immortal.replay.travel.traveller import MomentExplorer
from immortal.replay.travel.values import steps_of, value_at
from immortal.replay.why import Explainer, Step
from tests.helpers.recorded import load_module, write_module
from tests.helpers.waiting import WaitingInstances

ITEMS = ("tea", "rice", "salt", "oil")
CULPRIT = "culprit"  # the word that the planted line looks for

Input = tuple[str, tuple[Any, ...]]
"""Handler of the first service, and its arguments: (item, count, word) or less."""


@dataclass(frozen=True)
class Bug:
    """Kind of a bug: ``handler`` has the line ``right`` of the source below; ``wrong``: lines for the culprit alone.

    ``place``: "first", "middle" or "last" service of the chain. ``looks``: (service, path) of the wrong value.
    """

    handler: str
    place: str
    right: str
    wrong: str
    looks: str


LAST, FIRST = "last.stock[{item!r}]", "first.known[{item!r}]"
BUGS = {
    "a number is doubled on its way": Bug("place", "any", "count = count", "count = count * 2 + 1", LAST),
    "an item is taken for another one": Bug("place", "any", "item = item", "item = {other!r}", "last.stock[{other!r}]"),
    "it is counted twice": Bug("put", "last", "pass", "self.stock[item] = self.stock.get(item, 0) + count", LAST),
    "it is sent twice": Bug("place", "middle", "pass", "self.onward.place.fork(item, count, word)", LAST),
    "what was there is forgotten": Bug("put", "last", "before = self.stock.get(item, 0)", "before = 0", LAST),
    "two keys are swapped": Bug("put", "last", "key = item", "key = {other!r}", "last.stock[{other!r}]"),
    "a field of a struct is not what came": Bug(
        "put", "last", "size = count", "size = len(item)", "last.lines[-1].size"
    ),
    "a flag stays set, and all that comes is less": Bug("put", "last", "pass", "self.mode = 'half'", LAST),
    "an answer is that of another item": Bug("look", "last", "found = item", "found = {other!r}", FIRST),
    "an answer is too large": Bug("look", "last", "more = 0", "more = 7", FIRST),
    "a handler adds to an answer": Bug("ask", "first", "have = have", "have = have + 100", FIRST),
    "a handler has a stale answer": Bug("compare", "first", "after = after", "after = before - 1", "first.seen[-1]"),
    "a handler keeps what it read before it waited": Bug(
        "ask", "first", "old = self.base", "old = self.base - 13", FIRST
    ),
    "a base is set wrong, and asked for later": Bug("tune", "first", "base = base", "base = base + 1000", FIRST),
}

SOURCE = """
import immortal
import msgspec
from immortal import Immortal, impulse, peer, rpc


class Line(msgspec.Struct):
    item: str
    size: int


class Service(Immortal):
    stock: dict[str, int]
    known: dict[str, int]
    lines: list[Line]
    seen: list[int]
    mode: str
    base: int

    def __init__(self) -> None:
        self.stock, self.known, self.lines, self.seen = {}, {}, [], []
        self.mode = "whole"
        self.base = 0
"""

HANDLERS = """
    @impulse
    def order(self, item: str, count: int, word: str) -> None:
        self.onward.place.fork(item, count, word)

    @rpc
    def place(self, item: str, count: int, word: str) -> None:
        # place: count = count
        # place: item = item
        self.onward.place.fork(item, count, word)
        # place: pass

    @impulse
    def tune(self, base: int, word: str) -> None:
        # tune: base = base
        self.base = base

    @impulse
    async def ask(self, item: str, word: str) -> None:
        old = 0
        # ask: old = self.base
        have = await self.onward.look(item, word)
        # ask: have = have
        await immortal.step(self.note, item, have + old)

    @rpc
    def note(self, item: str, have: int) -> None:
        self.known[item] = have

    @impulse
    async def compare(self, item: str, word: str) -> None:
        before = await self.onward.look(item, word)
        after = await self.onward.look(item, word)
        # compare: after = after
        await immortal.step(self.see, after)

    @rpc
    def see(self, number: int) -> None:
        self.seen.append(number)
"""

PASSES_ON = """
    @rpc
    async def look(self, item: str, word: str) -> int:
        return await self.onward.look(item, word)
"""

KEEPS = """
    @rpc
    def place(self, item: str, count: int, word: str) -> None:
        self.put(item, count, word)

    def put(self, item: str, count: int, word: str) -> None:
        # put: pass
        # put: key = item
        # put: size = count
        # put: before = self.stock.get(item, 0)
        if self.mode == "half":
            count = count // 2
        self.stock[key] = before + count if key == item else self.stock.get(key, 0) + count
        self.lines.append(Line(item, size))

    @rpc
    def look(self, item: str, word: str) -> int:
        # look: found = item
        # look: more = 0
        return self.stock.get(found, 0) + more
"""


class Planted:
    """A fleet with a bug. ``source(is_right=True)``: the one without it."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(f"planted {seed}")
        self.kind = list(BUGS)[seed % len(BUGS)]
        self.bug = BUGS[self.kind]
        at_least = 3 if self.bug.place == "middle" else 2
        self.names = [f"s{number}" for number in range(rng.randint(at_least, 5))]
        self.item, self.other = rng.sample(ITEMS, 2)
        last = len(self.names) - 1
        where = {"first": 0, "last": last, "middle": rng.randint(1, max(1, last - 1))}
        self.place = where.get(self.bug.place, rng.randint(1, last - 1) if last > 1 else 0)
        if self.bug.handler == "place" and not 0 < self.place < last:
            self.names = ["s0", "s1", "s2"]
            self.place = 1
        self.inputs, self.culprit = self._traffic(rng)
        self.service, _, path = self.bug.looks.partition(".")
        self.service = self.names[0 if self.service == "first" else -1]
        self.path = path.format(item=self.item, other=self.other)

    def _traffic(self, rng: random.Random) -> tuple[list[Input], int]:
        """Return inputs of all kinds, one of which is the culprit, with some of the same item behind it."""

        def some(item: str, word: str) -> Input:
            way = rng.choice(["order", "order", "order", "ask", "compare", "tune"])
            if way == "tune":
                return way, (rng.randint(0, 9), word)
            return way, (item, rng.randint(1, 9), word) if way == "order" else (item, word)

        before = [some(rng.choice(ITEMS), "") for _ in range(rng.randint(5, 30))]
        before += [("order", (item, 50 + rng.randint(1, 9), "")) for item in ITEMS]
        rng.shuffle(before)
        handler = {"put": "order", "place": "order", "look": "ask"}.get(self.bug.handler, self.bug.handler)
        arguments = {
            "order": (self.item, 31, CULPRIT),
            "tune": (5, CULPRIT),
        }.get(handler, (self.item, CULPRIT))
        others = [item for item in ITEMS if item not in (self.item, self.other)]
        behind = [some(rng.choice(others), "") for _ in range(rng.randint(0, 10))]
        if handler == "order" and "lines" not in self.bug.looks:  # what comes later is added to the wrong value
            behind += [("order", (item, 3, "")) for item in (self.item, self.other) * rng.randint(0, 2)]
        behind = [one for one in behind if one[0] in ("order", "ask") and one[0] + handler != "comparecompare"]
        if "lines" in self.bug.looks:
            behind = [one for one in behind if one[0] == "ask"]
        if "mode" in self.bug.wrong or handler == "tune":
            behind = [one for one in behind if one[0] == "order"]
            behind += [("ask", (self.item, ""))] if handler == "tune" else [("order", (self.item, 9, ""))]
        return [*before, (handler, arguments), *behind], len(before)

    def source(self, *, is_right: bool = False) -> str:
        text = SOURCE
        for number in reversed(range(len(self.names))):
            is_last = number == len(self.names) - 1
            body = KEEPS if is_last else HANDLERS + ("" if number == 0 else PASSES_ON)
            onward = "" if is_last else f"    onward = peer(S{number + 1}, 's{number + 1}')\n"
            text += f"\n\nclass S{number}(Service):\n{onward}{body}"
            text = self._planted(text, is_here=number == self.place and not is_right)
        return text

    def _planted(self, text: str, *, is_here: bool) -> str:
        lines: list[str] = []
        for line in text.split("\n"):
            mark, _, code = line.strip().partition(": ")
            if not mark.startswith("# "):
                lines.append(line)
                continue
            indent = line[: len(line) - len(line.lstrip())]
            if code != "pass":
                lines.append(indent + code)
            if is_here and (mark[2:], code) == (self.bug.handler, self.bug.right):
                wrong = self.bug.wrong.format(item=self.item, other=self.other)
                lines += [f"{indent}if word == {CULPRIT!r}:", f"{indent}    {wrong}  # planted"]
        return "\n".join(lines)

    def record(self, folder: Path, *, is_right: bool = False, without: int | None = None) -> Recording:
        """Run the inputs, and return the states at the end and the home of the logs."""
        source = self.source(is_right=is_right)
        name = write_module(folder, source)
        module = load_module(folder, name)
        registry = Registry(folder / f"home_{name}")
        for service in self.names:
            registry.register(service, "tcp://127.0.0.1:*", app=f"{name}:{service.upper()}", keep_checkpoints="all")
        instances = WaitingInstances(registry.home, {one: getattr(module, one.upper()) for one in self.names})
        culprit = -1
        for number, (handler, arguments) in enumerate(self.inputs):
            if number == without:
                continue
            if number == self.culprit:
                culprit = instances["s0"].driven.store.summary().last_sequence_id
            instances["s0"].impulse(handler, *arguments)
            if number % 11 == 10:
                for one in self.names:
                    instances[one].checkpoint()
        states = {one: instances.app(one) for one in self.names}
        instances.close()
        return Recording(registry, name, states, culprit)

    def ask(self, folder: Path) -> Found:
        """Ask why the wrong value is what it is. ``folder``: is on Python's path."""
        wrong, right = self.record(folder), self.record(folder, is_right=True)
        values = [value_at(run.states[self.service], steps_of(self.path)) for run in (wrong, right)]
        with closing(InProcess(wrong.registry)) as sessions:
            explainer = Explainer(wrong.registry, cast("Sessions", sessions))
            found = explainer.explain(self.service, self.path)
        every = list(steps(found.step))
        place = self.names[self.place]
        return Found(
            values[0] != values[1],
            any(one.outside and (one.instance, one.record) == ("s0", wrong.culprit + 1) for one in every),
            any(one.instance == place and CULPRIT in f"{one.call}{one.handler}" for one in every),
            any(line["text"].endswith("# planted") for one in every for line in (one.line, *one.behind) if line),
            "\n".join(found.lines()),
        )


@dataclass(frozen=True)
class Found:
    """What an explanation names. ``is_wrong``: the value is another one without the bug."""

    is_wrong: bool
    names_culprit: bool
    names_handler: bool
    names_line: bool
    text: str


@dataclass(frozen=True)
class Recording:
    """``culprit``: the last record of the first service's log before the culprit."""

    registry: Registry
    module: str
    states: dict[str, Any]
    culprit: int


class InProcess:
    """What :class:`Sessions` does, in this process, which saves its start for each service."""

    def __init__(self, registry: Registry, question_s: float = 60.0) -> None:
        self._copy = registry.home.with_suffix(".copy")  # a log is opened once in a process
        shutil.copytree(registry.home, self._copy)
        self._question_s = question_s
        self._readers: dict[str, Any] = {}
        self._explorers: dict[str, MomentExplorer] = {}

    def locked(self, settings: InstanceSettings) -> AbstractContextManager[None]:
        return nullcontext()

    def ask(self, name: str, what: str, **given: Any) -> Any:
        if name not in self._explorers:
            settings = Registry(self._copy).load(name)
            self._readers[name] = own_logs.open_reader(settings, check=False)
            self._explorers[name] = MomentExplorer(self._readers[name], str(settings.app))
        explorer = self._explorers[name]
        explorer.begin(time.monotonic() + self._question_s)
        return getattr(explorer, what)(**given)

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()


def steps(step: Step) -> Iterator[Step]:
    yield step
    for cause in step.causes:
        yield from steps(cause)
