"""Outcome of a what-if for a fleet, as plain values and as text: differences, their consequences, the states."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import islice
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from immortal.appsdk.running.inspection import inspect_state
from immortal.appsdk.state.tree import canonical, differences
from immortal.coordinator.core.formatting import Methods, format_call, method_name, time_text
from immortal.coordinator.log.record_contents import message_at, record_of, rpc_of
from immortal.protocol.client_frames import CLIENTS
from immortal.protocol.messages import RpcKind
from immortal.replay.fleet.model import Broken, Difference, Logs, Rules, Service
from immortal.replay.fleet.player import Place, first_checkpoint
from immortal.replay.fleet.recorded import Recorded
from immortal.replay.fleet.screening import changed_fates, screen
from immortal.replay.fleet.simulation import FIRST_OTHER_SEQUENCE_ID, Simulation, simulate
from immortal.replay.plan import ReplayError
from immortal.replay.result import format_failure

_NEW_CALL = re.compile(r"\b(as|to) call 1\d{12}\b")  # FIRST_OTHER_NUMBER and above
DEPTH_MAX = 30  # of the tree of consequences
SHOWN_MAX = 20
VALUE_SIZE_MAX = 60  # characters
KINDS = ("changed", "added", "missing", "moved")
HOUR_NS = 3_600_000_000_000


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

    @property
    def text(self) -> str:
        return f"{self.count} {self.kind}: {self.service} -> {self.to}: {self.handler}; e.g. {self.example}"


class ClientAnswers(Struct):
    changed: int = 0
    added: int = 0
    missing: int = 0
    examples: list[str] = field(default_factory=list)


class End(Struct):
    """End that ``count`` orders have; ``seed`` is the first of them. ``example``: a difference from seed 0.

    ``digest``: equal for equal ends; "" for that of the record.
    """

    seed: int
    count: int
    broken: int
    example: str
    digest: str = ""


class Seeds(Struct):
    """Result of ``runs`` orders: how many differ from the first, and how many break the check."""

    runs: int
    different: int = 0
    broken: int = 0
    ends: list[End] = field(default_factory=list)

    @classmethod
    def of(cls, ends: list[End]) -> Seeds:
        runs = sum(one.count for one in ends)
        return cls(runs, runs - ends[0].count, sum(one.broken for one in ends), ends)


class Hour(Struct):
    """Calls that ``service`` makes of one handler in an hour, which begins at ``start_ns``, since the Unix epoch.

    ``recorded``: all that the record has; then those that differ.
    """

    service: str
    to: str
    handler: str
    start_ns: int
    recorded: int = 0
    changed: int = 0
    added: int = 0
    missing: int = 0
    moved: int = 0

    @property
    def different(self) -> int:
        return self.changed + self.added + self.missing + self.moved


class CallDifference(Struct):
    """A call that differs. ``record``, ``message``: of the log, what made it; None where the log does not have that.

    ``time_ns``: since the Unix epoch. ``old``, ``new``: the call in words; None where it was or would be none.
    ``cause``: the number of the difference that it follows from; None: the changed code itself.
    """

    number: int
    service: str
    kind: str
    to: str
    handler: str
    record: int | None
    message: int | None
    time_ns: int
    old: str | None
    new: str | None
    cause: int | None


class BrokenCheck(Struct):
    """A check that does not hold behind a record, of which ``input`` is the last message.

    ``inputs``: how many messages from outside came up to there. ``cut``: the last record by service, -1 for none.
    """

    service: str
    record: int | None
    message: int | None
    time: str
    text: str
    input: str
    inputs: int
    cut: dict[str, int]


class FleetOutcome(Struct):
    """Differences between the record and the run under other code.

    ``equal_services``: outside the cone: comparison proved them equal, so they did not run. ``effects``: those without
    a recorded result at their place, with their results. ``unanswered``: calls to services without a log.
    ``broken_in_record``: the check failed in the record too. ``prefix``: the smallest prefix of the input, in the order
    of time, after which the check fails but holds in the record. ``hours``, ``differences``: only with details; the
    states of services are whole then, not cut off.
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
    prefix: BrokenCheck | None
    seeds: Seeds
    notes: list[str]
    hours: list[Hour] = field(default_factory=list)
    differences: list[CallDifference] = field(default_factory=list)

    def service(self, name: str) -> ServiceOutcome:
        """Return the outcome of a service of the cone. Raises KeyError."""
        return {one.name: one for one in self.services}[name]


def what_if_fleet(
    logs: Logs, rules: Rules, *, seeds: int = 1, details: bool = False, orders: Sequence[int] | None = None
) -> FleetOutcome:
    """Run the changed code over the logs, and the services that its changed calls reach.

    ``seeds``: the number of orders to run; the outcome is that of the first. ``details``: add what grows with the logs.
    ``orders``: run these, without the first round; an empty list: the first round alone, whose outcome says only
    whether something can differ. Raises ReplayError if it can't be run.
    """
    for name in logs.changes:
        if name not in logs.sources:
            raise ReplayError(f"{name!r} has no log here: {', '.join(sorted(logs.sources)) or 'no service'} has one")
    recorded: dict[str, Recorded] = {}
    if rules.check is None and not details and not orders:
        found = _screened(logs, seeds, recorded, continues=orders is None)
        if orders is not None or not found.is_different:
            return found
    broken_in_record: BrokenCheck | None = None
    if rules.check is not None:
        then = Logs(logs.sources, logs.code, {}, logs.begin_ns, logs.to_ns, logs.outsiders)
        simulation = simulate(then, rules, 0, recorded)
        broken_in_record = _broken(simulation.broken, _Words(simulation))
        rules = replace(rules, then=simulation.breaks)
        simulation.close()
    first: FleetOutcome | None = None
    first_states: Mapping[str, _States | None] = {}
    ends: dict[str, End] = {}
    for seed in orders or range(seeds):
        simulation = simulate(logs, rules, seed, recorded)
        try:
            states = {name: _states(one, simulation) for name, one in simulation.services.items()}
        finally:
            simulation.close()
        digest = _digest(states, simulation)
        if first is None:
            first, first_states = _outcome(logs, simulation, states, details=details), states
            first.broken_in_record = broken_in_record
        if digest not in ends:
            ends[digest] = End(seed, 0, 0, _example(first_states, states) if ends else "", digest)
        ends[digest].count += 1
        ends[digest].broken += simulation.broken is not None
    assert first is not None
    first.seeds = Seeds.of(list(ends.values()))
    return first


def _screened(logs: Logs, seeds: int, recorded: dict[str, Recorded], *, continues: bool) -> FleetOutcome:
    """Return the outcome if the changed code does the same in each service by itself; it is different if that is not
    certain. Add the runs of the logs' code to ``recorded``. ``continues``: as for :func:`screen`.
    """
    services: list[ServiceOutcome] = []
    others = sorted(logs.sources.keys() - logs.changes.keys())
    ends = Seeds.of([End(0, seeds, 0, "")])
    found = FleetOutcome(True, services, others, [], ClientAnswers(), [], [], None, None, None, ends, [])
    for name, new in logs.changes.items():
        source = logs.sources[name]
        try:
            route = first_checkpoint(source, logs.begin_ns)
            codes = logs.code(name), new
            recorded[name], is_same = screen(source, route, *codes, logs.outsiders, logs.to_ns, continues=continues)
        except ReplayError:
            return found  # the run says why
        if not is_same:
            return found
        counts = recorded[name].log.messages, recorded[name].sent_count
        services.append(ServiceOutcome(name, True, "its code is changed", *counts, None, [], [], [], ""))
    found.is_different = False
    return found


def value_text(difference: Mapping[str, Any], side: str) -> str:
    if side not in difference:
        return "not there"
    text = repr(difference[side])
    return text if len(text) <= VALUE_SIZE_MAX else f"{text[:VALUE_SIZE_MAX]}..."


def _example(first: Mapping[str, _States | None], other: Mapping[str, _States | None]) -> str:
    """Return the first difference between the states at the end of two orders."""
    for name, one in first.items():
        another = other.get(name)
        if one is not None and another is not None:
            for found in differences(one[1], another[1]):
                values = found.to_json()
                return f"{name}: {found.path} {value_text(values, 'new')} in place of {value_text(values, 'old')}"
    return "other services, answers or effects"


_States = tuple[Any, Any]


def _states(service: Service, simulation: Simulation) -> _States | None:
    """Return the states at the end as trees, recorded and now."""
    if service.stopped:
        return None
    try:
        blob = service.player.finish(service.reached)
        new = inspect_state(service.player.definition, blob).state
        old = inspect_state(simulation.logs.code(service.name), service.recorded.state).state
    except ReplayError as error:
        simulation.notes.append(str(error))
        return None
    return old, new


def _digest(states: Mapping[str, _States | None], simulation: Simulation) -> str:
    shown = {name: "" if one is None else canonical(one[1]) for name, one in states.items()}
    answers = [(one.kind, one.old, one.new) for one in simulation.differences if _is_client(one, simulation)]
    if not (simulation.differences or simulation.effects) and all(
        one is not None and one[0] == one[1] for one in states.values()
    ):
        return ""
    whole = repr((shown, sorted(answers, key=repr), sorted(one["effect"] for one in simulation.effects)))
    return hashlib.sha256(whole.encode()).hexdigest()[:16]


def _is_client(difference: Difference, simulation: Simulation) -> bool:
    destination = difference.destination
    if destination == CLIENTS:
        return True
    is_call = rpc_of(difference.message).kind == RpcKind.CALL
    return bool(destination) and destination not in simulation.logs.sources and not is_call


def _outcome(
    logs: Logs, simulation: Simulation, states: Mapping[str, _States | None], *, details: bool
) -> FleetOutcome:
    words = _Words(simulation)
    services = []
    by_service: dict[str, dict[tuple[str, str], Calls]] = {}
    clients = ClientAnswers()
    for number, one in enumerate(simulation.differences):
        key = words.kind_of(one)
        calls = by_service.setdefault(one.service, {}).setdefault(key, Calls(*key))
        setattr(calls, one.kind, getattr(calls, one.kind) + 1)
        if _is_client(one, simulation) and one.kind != "moved":
            setattr(clients, one.kind, getattr(clients, one.kind) + 1)
            if len(clients.examples) < SHOWN_MAX:
                clients.examples.append(words.text_of(number))
    for service in simulation.services.values():
        state = states[service.name]
        because = "its input is the same" if service.why is None else words.text_of(service.why)
        found = [] if state is None else list(islice(differences(*state), None if details else SHOWN_MAX + 1))
        services.append(
            ServiceOutcome(
                service.name,
                service.name in logs.changes,
                "its code is changed" if service.name in logs.changes else because,
                service.messages,
                service.equal,
                words.first(service),
                list(by_service.get(service.name, {}).values()),
                _fates(service),
                [one.to_json() for one in found],
                service.stopped,
            )
        )
    return FleetOutcome(
        any([*(one.is_different for one in services), simulation.effects, simulation.unanswered, simulation.broken]),
        services,
        sorted(logs.sources.keys() - simulation.services.keys()),
        _tree(simulation, words),
        clients,
        simulation.effects,
        simulation.unanswered,
        _broken(simulation.broken, words),
        None,
        _broken(simulation.prefix, words),
        Seeds(1),
        simulation.notes,
        _hours(simulation, words) if details else [],
        list(map(words.difference, range(len(simulation.differences)))) if details else [],
    )


def _hours(simulation: Simulation, words: _Words) -> list[Hour]:
    """Count calls by handler and hour: in the record, and those that differ."""
    hours: dict[tuple[str, str, str, int], Hour] = {}

    def hour(service: str, destination: str, message: bytes, time_ns: int) -> Hour:
        key = service, *words.kind(service, destination, message), time_ns // HOUR_NS * HOUR_NS
        return hours.setdefault(key, Hour(*key))

    for name, service in simulation.services.items():
        for record in service.log.records():
            for made in service.recorded.outputs_by_place(record.sequence_id).values():
                for destination, outputs in made.items():
                    for output in outputs:
                        hour(name, destination, output.message, record.time_ns).recorded += 1
    for one in simulation.differences:
        found = hour(one.service, one.destination, one.message, one.time_ns)
        setattr(found, one.kind, getattr(found, one.kind) + 1)
    return [hours[key] for key in sorted(hours)]


def _broken(found: Broken | None, words: _Words) -> BrokenCheck | None:
    if found is None:
        return None
    where = found.service, *_place(found.place), time_text(found.time_ns)
    given = words.call(found.service, found.message) if found.message else "the initial message"
    return BrokenCheck(*where, found.text, given, found.inputs, found.cut)


def _place(place: Place) -> tuple[int | None, int | None]:
    return (None, None) if place[0] >= FIRST_OTHER_SEQUENCE_ID else place


def _fates(service: Service) -> list[Fate]:
    fates = []
    for group in changed_fates(service.recorded.verdicts.values(), service.verdicts.values()):
        record, message = _place(group.first.key[:2])
        where = "a call that the log does not have" if record is None else f"record {record}, message {message}"
        example = f"{where}: {format_failure(group.first)}"
        fates.append(Fate(group.method or "a message", group.fate.would_be, group.count, example))
    return fates


def _known(text: str) -> str:
    """Leave out the number of a call that the log's code did not make."""
    return _NEW_CALL.sub(r"\1 a new call", text)


def call_text(message: bytes, destination: str, methods: Methods) -> str:
    return _known(format_call(message, destination, methods))


def kind_of_call(service: str, destination: str, message: bytes, methods: Methods) -> tuple[str, str]:
    """Return the receiver and the handler of a call of ``service``."""
    rpc = rpc_of(message)
    name = method_name(rpc.method_id, rpc.kind, destination, methods)
    handler = f"{'' if rpc.kind == RpcKind.CALL else 'the answer of '}{name or f'method {rpc.method_id}'}"
    return "clients" if destination == CLIENTS else destination or service, handler


def difference_text(kind: str, old: str | None, new: str | None) -> str:
    """Describe a difference of ``kind``. ``old``, ``new``: the call in words, None where it was or would be none."""
    return {
        "changed": f"was {old}; would be {new}",
        "added": f"would be {new}",
        "missing": f"was {old}; would not be",
        "moved": f"moved: {new or old}",
    }[kind]


class _Words:
    """Descriptions in words of one simulation's differences."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._methods = cache(self._methods_of)

    def _methods_of(self, service: str) -> Methods:
        one = self._simulation.services[service]
        return {**one.recorded.methods, **one.player.methods}

    def kind_of(self, difference: Difference) -> tuple[str, str]:
        return self.kind(difference.service, difference.destination, difference.message)

    def kind(self, service: str, destination: str, message: bytes) -> tuple[str, str]:
        return kind_of_call(service, destination, message, self._methods(service))

    def text_of(self, number: int) -> str:
        """Describe a difference: the message that caused it, the call then and now."""
        one = self._simulation.differences[number]
        record, message = _place(one.place)
        where = f"record {record}, message {message}" if record is not None else "a message that the log does not have"
        place = f"{one.service}, {where}{self._input(one)}"
        return f"{place} -> {self.kind_of(one)[0]}: {difference_text(one.kind, *self._sides(one))}"

    def difference(self, number: int) -> CallDifference:
        one = self._simulation.differences[number]
        place, sides = _place(one.place), self._sides(one)
        return CallDifference(number, one.service, one.kind, *self.kind_of(one), *place, one.time_ns, *sides, one.cause)

    def _sides(self, difference: Difference) -> tuple[str | None, str | None]:
        """Return the call in the record and the call under the change."""
        methods = self._methods(difference.service)
        old, new = (
            None if call is None else call_text(call, difference.destination, methods)
            for call in (difference.old, difference.new)
        )
        return old, new

    def _input(self, difference: Difference) -> str:
        """Describe the message that caused it, and the message that began its execution if that is another one."""
        service = self._simulation.services[difference.service]
        made = self._message(service, difference.place)
        began = None if difference.began in (None, difference.place) else self._message(service, difference.began)
        return "".join((f": {made}" if made else "", f", in {began}" if began else ""))

    def _message(self, service: Service, place: Place | None) -> str | None:
        if place is None or (record := service.log.read(place[0])) is None:
            return None
        message = message_at(record_of(record.value).content, place[1])
        return None if message is None else self.call(service.name, message)

    def call(self, service: str, message: bytes) -> str:
        """A message that came to a service."""
        return call_text(message, "", self._methods(service))

    def first(self, service: Service) -> First | None:
        for number, one in enumerate(self._simulation.differences):
            if one.service == service.name:
                return First(*_place(one.place), time_text(one.time_ns), self.text_of(number))
        return None


def _tree(simulation: Simulation, words: _Words) -> list[Consequence]:
    nodes: dict[tuple[Any, ...], Consequence] = {}
    roots: list[Consequence] = []
    paths: list[tuple[Any, ...]] = []
    for number, one in enumerate(simulation.differences):
        above = () if one.cause is None or one.cause >= number else paths[one.cause]
        key = (one.service, one.kind, *words.kind_of(one))
        path = (*above[: DEPTH_MAX - 1], key) if above[-1:] != (key,) else above
        paths.append(path)
        if path not in nodes:
            nodes[path] = Consequence(*key, 0, words.text_of(number), [])
            (nodes[path[:-1]].then if path[:-1] else roots).append(nodes[path])
        nodes[path].count += 1
    return roots
