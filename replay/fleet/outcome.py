"""Outcome of a what-if for a fleet, as plain values and as text: differences, their consequences, the states."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from msgspec import Struct, field

from immortal.appsdk.running.inspection import inspect_state
from immortal.appsdk.state.tree import canonical, differences
from immortal.coordinator.core.formatting import Methods, format_call, method_name, time_text
from immortal.coordinator.log.record_contents import message_at, record_of, rpc_of
from immortal.protocol.client_frames import CLIENTS
from immortal.protocol.command_line import table_lines
from immortal.protocol.messages import RpcKind
from immortal.replay.fleet.model import Broken, Difference, Logs, Rules, Service
from immortal.replay.fleet.player import Place, Recorded
from immortal.replay.fleet.simulation import FIRST_OTHER_SEQUENCE_ID, Simulation, simulate
from immortal.replay.plan import ReplayError
from immortal.replay.result import format_failure

_NEW_CALL = re.compile(r"\b(as|to) call 1\d{12}\b")  # FIRST_OTHER_NUMBER and above
DEPTH_MAX = 30  # of the tree of consequences
SHOWN_MAX = 20
VALUE_SIZE_MAX = 60  # characters


class Calls(Struct):
    """Counts of differing calls of one handler. ``handler``: as ``Till.sold``."""

    to: str
    handler: str
    changed: int = 0
    added: int = 0
    missing: int = 0
    moved: int = 0


class First(Struct):
    """First difference of a service. ``record`` and ``message``: None if the log does not have the message."""

    record: int | None
    message: int | None
    time: str
    words: str


class Fate(Struct):
    """Calls of ``method`` that would fail differently: "would fail", "would not fail", "would fail in another way"."""

    method: str
    fate: str
    count: int
    example: str


class ServiceOutcome(Struct):
    """Outcome of one service. ``because``: why it is in the cone. ``state``: at the end: [{"path", "old", "new"}]."""

    name: str
    is_changed: bool
    because: str
    messages: int
    equal: int
    first: First | None
    calls: list[Calls]
    fates: list[Fate]
    state: list[dict[str, Any]]
    stopped: str

    @property
    def is_different(self) -> bool:
        return bool(self.calls or self.fates or self.state or self.stopped)


class Consequence(Struct):
    """Calls of one kind with the same cause: their number and an example; ``then``: their consequences."""

    service: str
    kind: str
    to: str
    handler: str
    count: int
    example: str
    then: list[Consequence]


class ClientAnswers(Struct):
    changed: int = 0
    added: int = 0
    missing: int = 0
    examples: list[str] = field(default_factory=list)


class Seeds(Struct):
    """Result of ``runs`` orders: how many differ from the first, and how many break the check."""

    runs: int
    different: int = 0
    broken: int = 0


class BrokenCheck(Struct):
    service: str
    record: int | None
    message: int | None
    time: str
    text: str


class FleetOutcome(Struct):
    """Differences between the record and the run under other code.

    ``equal_services``: outside the cone: comparison proved them equal, so they did not run. ``effects``: those without
    a recorded result at their place, with their results. ``unanswered``: calls to services without a log.
    ``broken_in_record``: the check failed in the record too.
    """

    is_different: bool
    services: list[ServiceOutcome]
    equal_services: list[str]
    consequences: list[Consequence]
    client_answers: ClientAnswers
    effects: list[dict[str, str]]
    unanswered: list[dict[str, str]]
    broken: BrokenCheck | None
    broken_in_record: BrokenCheck | None
    seeds: Seeds
    notes: list[str]

    def service(self, name: str) -> ServiceOutcome:
        """Return the outcome of a service of the cone. Raises KeyError."""
        return {one.name: one for one in self.services}[name]


def what_if_fleet(logs: Logs, rules: Rules, *, seeds: int = 1) -> FleetOutcome:
    """Run the changed code over the logs, and the services that its changed calls reach.

    ``seeds``: the number of orders to run; the outcome is that of the first. Raises ReplayError if it can't be run.
    """
    for name in logs.changes:
        if name not in logs.sources:
            raise ReplayError(f"{name!r} has no log here: {', '.join(sorted(logs.sources)) or 'no service'} has one")
    recorded: dict[str, Recorded] = {}
    broken_in_record = None
    if rules.check is not None:
        then = Logs(logs.sources, logs.code, {}, logs.begin_ns, logs.to_ns, logs.outsiders)
        simulation = simulate(then, rules, 0, recorded)
        broken_in_record = simulation.broken
        simulation.close()
    first: FleetOutcome | None = None
    found = Seeds(seeds)
    digest = ""
    for seed in range(seeds):
        simulation = simulate(logs, rules, seed, recorded)
        try:
            states = {name: _states(one, simulation) for name, one in simulation.services.items()}
        finally:
            simulation.close()
        this = _digest(states, simulation)
        if first is None:
            first, digest = _outcome(logs, simulation, states), this
            first.broken_in_record = _broken(broken_in_record)
        found.different += this != digest
        found.broken += simulation.broken is not None
    assert first is not None
    first.seeds = found
    return first


_States = tuple[Any, Any]


def _states(service: Service, simulation: Simulation) -> _States | None:
    """Return the states at the end as trees, recorded and now."""
    if service.stopped:
        return None
    try:
        blob = service.player.finish(service.reached)
        new = inspect_state(service.player.definition, blob).state
        old = inspect_state(simulation.code(service.name), service.recorded.state).state
    except ReplayError as error:
        simulation.notes.append(str(error))
        return None
    return old, new


def _digest(states: Mapping[str, _States | None], simulation: Simulation) -> str:
    shown = {name: "" if one is None else canonical(one[1]) for name, one in states.items()}
    answers = [(one.kind, one.old, one.new) for one in simulation.differences if _is_client(one, simulation)]
    return repr((shown, sorted(answers, key=repr), sorted(one.words for one in simulation.effects)))


def _is_client(difference: Difference, simulation: Simulation) -> bool:
    destination = difference.destination
    if destination == CLIENTS:
        return True
    message = difference.new or difference.old or b""
    return bool(destination) and not simulation.has_log(destination) and rpc_of(message).kind != RpcKind.CALL


def _outcome(logs: Logs, simulation: Simulation, states: Mapping[str, _States | None]) -> FleetOutcome:
    words = _Words(simulation)
    services = []
    by_service: dict[str, dict[tuple[str, str], Calls]] = {}
    clients = ClientAnswers()
    for number, one in enumerate(simulation.differences):
        key = words.to(one), words.handler(one)
        calls = by_service.setdefault(one.service, {}).setdefault(key, Calls(*key))
        setattr(calls, one.kind, getattr(calls, one.kind) + 1)
        if _is_client(one, simulation) and one.kind != "moved":
            setattr(clients, one.kind, getattr(clients, one.kind) + 1)
            if len(clients.examples) < SHOWN_MAX:
                clients.examples.append(words.of(number))
    for service in simulation.services.values():
        state = states[service.name]
        found = [] if state is None else list(islice(differences(*state), SHOWN_MAX + 1))
        services.append(
            ServiceOutcome(
                service.name,
                service.name in logs.changes,
                _because(service, logs, words),
                service.messages,
                sum(service.equal.values()),
                words.first(service),
                list(by_service.get(service.name, {}).values()),
                _fates(service),
                [one.to_json() for one in found],
                service.stopped,
            )
        )
    effects = [
        {"service": one.service, "effect": one.words, "outcome": one.outcome, "time": time_text(one.time_ns)}
        for one in simulation.effects
    ]
    unanswered = [
        {
            "service": one.call.service,
            "to": one.call.to,
            "call": f"{one.call.method}({', '.join(map(repr, one.call.arguments))})",
            "outcome": one.outcome,
            "time": time_text(one.time_ns),
        }
        for one in simulation.unanswered
    ]
    return FleetOutcome(
        any(one.is_different for one in services) or bool(effects or unanswered) or simulation.broken is not None,
        services,
        sorted(logs.sources.keys() - simulation.services.keys()),
        _tree(simulation, words),
        clients,
        effects,
        unanswered,
        _broken(simulation.broken),
        None,
        Seeds(1),
        simulation.notes,
    )


def _because(service: Service, logs: Logs, words: _Words) -> str:
    if service.name in logs.changes:
        return "its code is changed"
    return "what comes to it is the same" if service.why is None else words.of(service.why)


def _broken(found: Broken | None) -> BrokenCheck | None:
    if found is None:
        return None
    return BrokenCheck(found.service, *_place(found.place), time_text(found.time_ns), found.text)


def _place(place: Place) -> tuple[int | None, int | None]:
    return (None, None) if place[0] >= FIRST_OTHER_SEQUENCE_ID else place


def _fates(service: Service) -> list[Fate]:
    """Return calls that fail in one of the runs, or differently in both; an execution is one call wherever it fails."""
    was, now = (
        {("task", one.task) if one.task else one.key: one for one in verdicts if not service.player.is_told(one)}
        for verdicts in (service.recorded.verdicts.values(), service.verdicts.values())
    )
    groups: dict[tuple[str, str], Fate] = {}
    for key in {**was, **now}:
        old, new = was.get(key), now.get(key)
        if new is None or old is None:
            fate = "would fail" if old is None else "would not fail"
        elif (old.kind, old.type_name, old.text) != (new.kind, new.type_name, new.text):
            fate = "would fail in another way"
        else:
            continue
        one = new or old
        assert one is not None
        record, message = _place(one.key[:2])
        where = "a call that the log does not have" if record is None else f"record {record}, message {message}"
        group = (one.method or "a message", fate)
        groups.setdefault(group, Fate(*group, 0, f"{where}: {format_failure(one)}")).count += 1
    return list(groups.values())


class _Words:
    """Descriptions in words of one simulation's differences."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    def _methods(self, service: str) -> Methods:
        one = self._simulation.services[service]
        return {**one.recorded.methods, **one.player.methods}

    def to(self, one: Difference) -> str:
        return "clients" if one.destination == CLIENTS else one.destination or one.service

    def handler(self, one: Difference) -> str:
        rpc = rpc_of(one.new or one.old or b"")
        name = method_name(rpc.method_id, rpc.kind, one.destination, self._methods(one.service))
        return f"{'' if rpc.kind == RpcKind.CALL else 'the answer of '}{name or f'method {rpc.method_id}'}"

    def of(self, number: int) -> str:
        """Describe a difference: the message that caused it, the call then and now."""
        one = self._simulation.differences[number]
        methods = self._methods(one.service)
        old, new = (
            None if call is None else format_call(call, one.destination, methods) for call in (one.old, one.new)
        )
        record, message = _place(one.place)
        where = f"record {record}, message {message}" if record is not None else "a message that the log does not have"
        made = self._input(one)
        text = {
            "changed": f"was {old}; would be {new}",
            "added": f"would be {new}",
            "missing": f"was {old}; would not be",
            "moved": f"moved: {new or old}",
        }[one.kind]
        return _NEW_CALL.sub(r"\1 a new call", f"{one.service}, {where}{made} -> {self.to(one)}: {text}")

    def _input(self, one: Difference) -> str:
        """Describe the message that caused it, and the message that began its execution if that is another one."""
        service = self._simulation.services[one.service]
        made = self._message(service, one.place)
        began = None if one.began in (None, one.place) else self._message(service, one.began)
        return "".join((f": {made}" if made else "", f", in {began}" if began else ""))

    def _message(self, service: Service, place: Place | None) -> str | None:
        at = -1 if place is None else place[0] - service.log.checkpoint.sequence_id - 1
        if place is None or not 0 <= at < len(service.log.records):
            return None
        message = message_at(record_of(service.log.records[at].value).content, place[1])
        return None if message is None else format_call(message, "", self._methods(service.name))

    def first(self, service: Service) -> First | None:
        for number, one in enumerate(self._simulation.differences):
            if one.service == service.name:
                return First(*_place(one.place), time_text(one.time_ns), self.of(number))
        return None


def _tree(simulation: Simulation, words: _Words) -> list[Consequence]:
    """Build the tree of consequences, calls of one kind with one cause together."""
    nodes: dict[tuple[Any, ...], Consequence] = {}
    roots: list[Consequence] = []
    paths: list[tuple[Any, ...]] = []
    for number, one in enumerate(simulation.differences):
        above = () if one.cause is None or one.cause >= number else paths[one.cause]
        key = (one.service, one.kind, words.to(one), words.handler(one))
        path = (*above[: DEPTH_MAX - 1], key) if above[-1:] != (key,) else above
        paths.append(path)
        if path not in nodes:
            nodes[path] = Consequence(*key, 0, words.of(number), [])
            (nodes[path[:-1]].then if path[:-1] else roots).append(nodes[path])
        nodes[path].count += 1
    return roots


# For people.


def outcome_lines(outcome: FleetOutcome) -> Iterator[str]:
    """Yield the outcome as text for people."""
    heads = ["service", "messages", "same calls", "changed", "added", "missing", "moved", "fail otherwise", "state"]
    rows = []
    for one in outcome.services:
        counts = [sum(getattr(call, kind) for call in one.calls) for kind in ("changed", "added", "missing", "moved")]
        fates = sum(fate.count for fate in one.fates)
        state = "stopped" if one.stopped else "differs" if one.state else "same"
        shown = [one.messages, one.equal, *counts, fates]
        rows.append([f"{one.name}{' (changed code)' if one.is_changed else ''}", *(f"{n:,}" for n in shown), state])
    yield from table_lines(heads, rows, right=heads[1:-1])
    if outcome.equal_services:
        yield f"proved equal, and not run: {', '.join(outcome.equal_services)}"
    for one in outcome.services:
        if one.is_different:
            yield ""
            yield from _service_lines(one)
    if outcome.consequences:
        yield from ("", "what follows from what:", *_tree_lines(outcome.consequences, 1))
    clients = outcome.client_answers
    if clients.examples:
        yield ""
        yield f"answers to clients: {clients.changed} changed, {clients.added} added, {clients.missing} missing"
        yield from (f"  {one}" for one in clients.examples[:SHOWN_MAX])
    yield from _list_lines("effects without a recorded result at their place", outcome.effects, "effect")
    yield from _list_lines("calls to services without a log", outcome.unanswered, "call")
    if outcome.broken is not None:
        one_broken = outcome.broken
        yield ""
        yield f"the check does not hold behind {_place_words(one_broken)}: {one_broken.text}"
        then = outcome.broken_in_record
        yield "  in the record it holds" if then is None else f"  nor in the record, behind {_place_words(then)}"
    if outcome.seeds.runs > 1:
        seeds = outcome.seeds
        yield ""
        yield f"in {seeds.different} of {seeds.runs} orders the outcome is another one than this" + (
            f"; in {seeds.broken} the check does not hold" if seeds.broken else ""
        )
    yield from (f"note: {note}" for note in outcome.notes)
    yield ""
    yield "different" if outcome.is_different else "no difference"


def _service_lines(one: ServiceOutcome) -> Iterator[str]:
    yield f"{one.name}: {one.because}" if not one.is_changed else f"{one.name}:"
    if one.first is not None:
        yield f"  first: {one.first.time} {one.first.words}"
    if one.calls:
        heads = ["to", "call", "changed", "added", "missing", "moved"]
        rows = [
            [each.to, each.handler, *map(str, (each.changed, each.added, each.missing, each.moved))]
            for each in one.calls
        ]
        yield from (f"  {line}" for line in table_lines(heads, rows, right=heads[2:]))
    yield from (f"  {fate.count} of {fate.method} {fate.fate}: {fate.example}" for fate in one.fates)
    if one.state:
        yield "  the state at the end:"
        for each in one.state[:SHOWN_MAX]:
            yield f"    {each['path']}: was {_value(each, 'old')}; would be {_value(each, 'new')}"
        if len(one.state) > SHOWN_MAX:
            yield "    ..."
    if one.stopped:
        yield f"  it stops at {one.stopped}"


def _value(difference: Mapping[str, Any], side: str) -> str:
    if side not in difference:
        return "not there"
    text = repr(difference[side])
    return text if len(text) <= VALUE_SIZE_MAX else f"{text[:VALUE_SIZE_MAX]}..."


def _tree_lines(nodes: Sequence[Consequence], depth: int) -> Iterator[str]:
    for one in nodes:
        yield f"{'  ' * depth}{one.count} {one.kind}: {one.service} -> {one.to}: {one.handler}; e.g. {one.example}"
        yield from _tree_lines(one.then, depth + 1)


def _list_lines(title: str, rows: Sequence[Mapping[str, str]], what: str) -> Iterator[str]:
    if rows:
        yield ""
        yield f"{title}: {len(rows)}"
        yield from (f"  {row['service']}: {row[what]}: {row['outcome']}" for row in rows[:SHOWN_MAX])
        if len(rows) > SHOWN_MAX:
            yield "  ..."


def _place_words(one: BrokenCheck) -> str:
    where = "a message that the log does not have"
    if one.record is not None:
        where = f"record {one.record}, message {one.message}"
    return f"{one.service}, {where} ({one.time})"
