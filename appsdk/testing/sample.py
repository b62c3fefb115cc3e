"""Sample of a fleet: its services handle some of its recorded inputs again, in a new home with small logs.

Messages cut out of a log would leave one that no replay repeats. Here the services' own code makes new logs:
coordinators in memory get the chosen inputs at their recorded times; timers, messages and the results of effects come
as late as then. See docs/decisions/0094-samples-are-executed.md.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import shutil
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from pathlib import Path

import msgspec
from msgspec import Struct

from immortal.appsdk.calls.codec import encoder
from immortal.appsdk.effects.effect import EffectRequest
from immortal.appsdk.handlers.definition import Definition
from immortal.appsdk.running.local_app import LocalApp
from immortal.appsdk.running.user_modules import sources_of
from immortal.appsdk.testing.instance import MemorySource, as_thread
from immortal.appsdk.testing.outside import OutsideApp
from immortal.appsdk.testing.recorded_inputs import Fleet, Given, Input, Inputs, Redact, Redaction, Results, Times
from immortal.appsdk.testing.world import CrashPlan, Network, Node, World
from immortal.appsdk.waiting.impulses import earlier
from immortal.coordinator.core import effects as ef
from immortal.coordinator.core import events as ev
from immortal.coordinator.core.formatting import time_text
from immortal.coordinator.core.interfaces import ONESELF
from immortal.coordinator.core.limits import Limits
from immortal.coordinator.instances.registry import Registry
from immortal.coordinator.log.open import place_of
from immortal.protocol import decoding, kept_code
from immortal.protocol.client_frames import CLIENTS, ClientCode, ClientFrame, ClientFrameType, encode_request
from immortal.protocol.messages import IncomingRpc, RpcKind, RpcType, encode_incoming_rpc
from immortal.protocol.personal_keys import without_new_keys
from immortal.replay.fleet.opening import load_definition, opened_fleet, what_if
from immortal.replay.fleet.player import LoggedRecord, first_checkpoint, logged, sealed
from immortal.replay.fleet.recorded import Recorded
from immortal.replay.fleet.report import outcome_lines
from immortal.replay.plan import ReplayError

_NO_LIMIT = 1 << 62
_WORD_SIZE_MIN = 4  # characters: shorter texts that were replaced can be there by chance


class SampledService(Struct):
    """Service of a sample: numbers of the sample, and of the logs that it was made of (``..._then``)."""

    name: str
    inputs: int
    inputs_then: int
    messages: int
    messages_then: int
    size_bytes: int
    size_bytes_then: int


class Sample(Struct):
    """Sample that was made. ``notes``: what it does not have; ``left``: texts by service that were to be replaced."""

    services: list[SampledService]
    begin_ns: int
    end_ns: int
    notes: list[str]
    left: list[str]


@without_new_keys()
def sample_fleet(
    home: Path | str,
    folder: Path | str,
    *,
    keep: Callable[[Input], object] | None = None,
    share: float = 1.0,
    keys: Collection[str] = (),
    redact: Redact | None = None,
    begin_ns: int | None = None,
    to_ns: int | None = None,
    trust_pickle: bool = False,
) -> Sample:
    """Make a small fleet of a recorded one: its services handle some of the inputs from outside again.

    ``home``: the registry folder; ``folder``: a new one, for :func:`assert_fleet_unchanged`. ``keep``: returns True for
    an :class:`Input` to be kept. ``share``: of the values of the arguments named in ``keys`` so many are kept, with all
    their inputs, from 0 to 1; inputs without such an argument all are. Without ``keys``: so many inputs. ``redact``:
    returns the arguments in place of those of an input or a result. ``begin_ns``, ``to_ns``: times in ns since the
    Unix epoch.

    Raises ReplayError if it can't be made, LogError, OSError.
    """
    folder = Path(folder)
    if folder.exists():
        raise ReplayError(f"{folder} is there already: give another name, or remove it first")
    redaction = Redaction(redact)
    with opened_fleet(home, trust_pickle=trust_pickle) as opened:
        fleet: dict[str, Recorded] = {}
        notes = [*opened.notes, *(f"{name} has no app in its settings" for name in opened.readers.keys() - opened.apps)]
        for name in opened.apps:
            route = first_checkpoint(opened.readers[name], None)
            recorded = Recorded(opened.readers[name], route, opened.code_of(name), frozenset(), to_ns)
            if len(recorded.log):
                fleet[name] = recorded
            if route.versions:
                notes.append(f"{name}: earlier versions handled a part then; today's class handles all of the sample")
        if not fleet:
            raise ReplayError("no log has a record up to that time: give a later one")
        trimmed = [one.log.begin_ns for one in fleet.values() if one.log.checkpoint.sequence_id >= 0]
        begin_ns = max([begin_ns or 0, min(map(_first_ns, fleet.values())), *trimmed])
        if trimmed:
            notes.append(f"logs were trimmed: it has nothing of before {time_text(max(trimmed))}")
        codes = {name: load_definition(opened.apps[name]) for name in fleet}
        inputs = Inputs(fleet, codes, redaction, begin_ns)
        sizes = {name: _sizes(recorded.log.records()) for name, recorded in fleet.items()}
    arguments = sorted({name for one in inputs.given for name in one.input.arguments})
    if strange := [key for key in keys if key not in arguments]:
        raise ReplayError(
            f"--key {strange[0]}: no input has such an argument; there are {', '.join(arguments) or 'none'}"
        )
    kept = [one for one in inputs.given if _is_kept(one.input, keep) and _is_in_share(one, share, keys)]
    if not inputs.given:
        raise ReplayError("the logs have no input from outside in that time: there is nothing to keep")
    if not kept:
        raise ReplayError(
            f"none of {len(inputs.given):,} inputs is kept: give a larger --share, or another --keep or --key"
        )
    for one in kept:
        one.arguments = redaction.encoded(one.input, one.arguments)
    world = _SampleWorld(fleet, inputs)
    with sealed():
        world.handle(codes, kept, begin_ns, hides_clients=redact is not None)
    notes += world.notes(inputs)
    services = [_counts(world.nodes[name], sizes[name], inputs.given, kept) for name in fleet]
    try:
        _write(world, Registry(Path(home)), folder, codes)
        outcome = what_if(folder, None)
        if outcome.is_different:
            raise ReplayError("\n".join(("a replay of the sample does other things", *outcome_lines(outcome))))
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return Sample(services, begin_ns, inputs.end_ns, notes, _left(world, codes, redaction))


def _is_kept(one: Input, keep: Callable[[Input], object] | None) -> bool:
    try:
        return keep is None or bool(keep(one))
    except Exception as error:  # of the user's function
        text = f"--keep fails for {one.kind} {one.method} of {one.service}: {type(error).__name__}: {error}"
        raise ReplayError(text) from None


def _is_in_share(one: Given, share: float, keys: Collection[str]) -> bool:
    """Return True if an input is kept: by the hash of one of its keys, which is the same in each process."""
    if share >= 1:
        return True
    values = [one.input.arguments[key] for key in keys if key in one.input.arguments]
    if keys and not values:
        return True
    marks = [[value] for value in values] or [[one.input.service, one.rpc.arguments, one.input.time_ns]]
    hashes = (hashlib.blake2b(encoder.encode(mark), digest_size=8).digest() for mark in marks)
    return any(int.from_bytes(digest, "big") < share * 2**64 for digest in hashes)


def _write(world: World, old: Registry, folder: Path, codes: Mapping[str, Definition]) -> None:
    """Write the new home, with the code that ran: a test compares it with that of its day."""
    registry = Registry(folder)
    for name, definition in codes.items():
        then = old.load(name)
        app = then.app or definition.label
        settings = registry.register(name, "tcp://127.0.0.1:*", app=app, keep_code=then.keep_code)
        sources = {path: (path, source) for path, (_, source) in sources_of(definition.cls).items()}
        if then.keep_code:
            kept_code.store(settings.folder / kept_code.FOLDER_NAME, app, sources, 0)
        backend = world.nodes[name].store.backend
        with backend.view() as view:
            place_of(settings.log).copy(view, backend.identity, None)


def _counts(node: Node, then: tuple[int, int], given: list[Given], kept: list[Given]) -> SampledService:
    own = logged(MemorySource(node.name, node.store), node.store.summary().checkpoints[0], None)
    pairs = zip(_sizes(own), then, strict=True)
    counts = (sum(one.input.service == node.name for one in inputs) for inputs in (kept, given))
    return SampledService(node.name, *counts, *itertools.chain.from_iterable(pairs))


def _first_ns(recorded: Recorded) -> int:
    return recorded.log.time_of(recorded.log.checkpoint.sequence_id + 1)


def _sizes(records: Iterable[LoggedRecord]) -> tuple[int, int]:
    """Return how many messages records have, and how many bytes."""
    messages = size_bytes = 0
    for record in records:
        messages += sum(batch.count for batch in record.trailer.batches)
        size_bytes += len(record.value)
    return messages, size_bytes


def _left(world: World, codes: Collection[str], redaction: Redaction) -> list[str]:
    """Return which texts that were to be replaced are in the new logs all the same, and where."""
    words = [(word, word.encode()) for word in sorted(redaction.replaced) if len(word) >= _WORD_SIZE_MIN]
    found = []
    for name in codes if words else ():
        tables = world.nodes[name].store.backend.durable.tables.values()
        data = b"\0".join(itertools.chain.from_iterable(itertools.chain(*table.rows.items()) for table in tables))
        found += [f"{name}: {word}" for word, encoded in words if encoded in data]
    return found


# --- the run ----------------------------------------------------------------------------------------------------------


class _RecordedEffects:
    """EffectRunner that runs nothing: each effect gets a recorded result, as long after the request as then."""

    def __init__(self, name: str, results: Results, now_ns: Callable[[], int]) -> None:
        self._name = name
        self._results = results
        self._now_ns = now_ns
        self._due: list[tuple[int, int, EffectRequest, bool, bytes]] = []
        self._numbers = itertools.count()

    def start(self, request: EffectRequest) -> None:
        now_ns = self._now_ns()
        result = self._results.match((self._name, request.name), request.encoded, now_ns)
        if result is not None:
            due = now_ns + result.delay_ns, next(self._numbers), request, result.raised, bytes(result.values[0])
            heapq.heappush(self._due, due)

    def cancel(self, request: EffectRequest) -> None:
        """Do nothing: an answer to a cancelled request is dropped."""

    @property
    def next_due_ns(self) -> int | None:
        return self._due[0][0] if self._due else None

    def run(self) -> None:
        while self._due and self._due[0][0] <= self._now_ns():
            _, _, request, raised, value = heapq.heappop(self._due)
            request.answer(raised, value)


class _SampledApp(LocalApp):
    """App that is told the time when its log told it."""

    def __init__(
        self, times: Times, effects: _RecordedEffects, definition: Definition, seed: bytes, now_ns: int
    ) -> None:
        super().__init__(definition, seed, now_ns, effects)
        self._times = times
        self._recorded_effects = effects

    @property
    def _fires_at_ns(self) -> int | None:
        due_ns = self.dispatcher.next_due_ns
        return None if due_ns is None else self._times.fires_at_ns(due_ns)

    @property
    def next_due_ns(self) -> int | None:
        return earlier(self._fires_at_ns, self._recorded_effects.next_due_ns)

    def log_time(self, time_ns: int) -> None:
        fires_at_ns = self._fires_at_ns
        if fires_at_ns is not None and fires_at_ns <= time_ns:
            self.dispatcher.log_time(time_ns)
        self._recorded_effects.run()
        self.take_output()


class _StandIn(OutsideApp):
    """App in place of a service without a log: it makes its recorded calls, and gives its recorded answers."""

    def __init__(self, name: str, results: Results, world: World) -> None:
        super().__init__()
        self._name = name
        self._results = results
        self._world = world
        self._due: list[tuple[int, int, str, bytes]] = []
        self._numbers = itertools.count()

    def handle_call(self, rpc: IncomingRpc) -> None:
        if rpc.rpc_type != RpcType.ASYNC:
            return
        caller, number, *rest = decoding.decode(rpc.arguments)
        now_ns = self._world.now_ns
        result = self._results.match((self._name, caller, rpc.method_id), encoder.encode(rest), now_ns)
        if result is not None:
            kind = RpcKind.RETURNED_VALUE if result.values else RpcKind.RETURNED_NOTHING
            kind = RpcKind.RAISED if result.raised else kind
            arguments = encoder.encode([number, *result.values])
            answer = encode_incoming_rpc(rpc.method_id, RpcType.ASYNC, arguments, kind)
            heapq.heappush(self._due, (now_ns + result.delay_ns, next(self._numbers), caller, answer))
            self.next_due_ns = self._due[0][0]

    def log_time(self, time_ns: int) -> None:
        while self._due and self._due[0][0] <= time_ns:
            self.put(*heapq.heappop(self._due)[2:])
        self.next_due_ns = self._due[0][0] if self._due else None


class _DelayedNetwork(Network):
    """Network in which messages take as long as in the recorded fleet."""

    def __init__(self, world: World, inputs: Inputs) -> None:
        super().__init__(world.nodes)
        self._world = world
        self._inputs = inputs
        self._late: list[tuple[int, int, Node, ef.SendToPeer]] = []
        self._last_ns: dict[tuple[str, str], int] = {}
        self._numbers = itertools.count()

    @property
    def next_due_ns(self) -> int | None:
        return self._late[0][0] if self._late else None

    def send(self, sender: Node, effect: ef.SendToPeer) -> None:
        stream, now_ns = (sender.name, effect.destination), self._world.now_ns
        due_ns = max(now_ns, self._last_ns.get(stream, 0))
        if effect.frame.count and stream in self._inputs.delays:
            due_ns = max(due_ns, now_ns + self._inputs.delays[stream].at(now_ns))
        self._last_ns[stream] = due_ns
        if due_ns <= now_ns:
            super().send(sender, effect)
        else:
            heapq.heappush(self._late, (due_ns, next(self._numbers), sender, effect))

    def step(self) -> bool:
        while self._late and self._late[0][0] <= self._world.now_ns:
            super().send(*heapq.heappop(self._late)[2:])
        return super().step()


class _SampleWorld(World):
    """World of the sample's services, from their first start on."""

    outside_name = CLIENTS  # no service can have this name
    limits = Limits(
        hold_off_ns_min=0,
        client_span_max=_NO_LIMIT,
        requests_open_max=_NO_LIMIT,
        checkpoint_trigger_bytes=_NO_LIMIT,
        clients_max=_NO_LIMIT,
        client_keep_ns=_NO_LIMIT,
    )

    def __init__(self, fleet: Fleet, inputs: Inputs) -> None:
        super().__init__(0, 0, None, CrashPlan(), fail_alone=True)
        self._fleet = fleet
        self._inputs = inputs
        self._late = self.network = _DelayedNetwork(self, inputs)
        self._clients: dict[str, str] = {}
        self._numbers: dict[tuple[str, str], int] = {}
        self._calls = itertools.count(1)
        self._refused: list[str] = []

    def reply_to_client(self, effect: ef.ReplyToClient) -> None:
        if effect.frame.code:
            self._refused.append(effect.frame.reason or ClientCode(effect.frame.code).name)

    def make_app(self, node: Node, definition: Definition, seed: bytes) -> LocalApp:
        effects = _RecordedEffects(node.name, self._inputs.results, lambda: self.now_ns)
        return _SampledApp(self._inputs.times[node.name], effects, definition, seed, self.now_ns)

    def make_outside(self, node: Node) -> OutsideApp:
        return OutsideApp() if node.name == CLIENTS else _StandIn(node.name, self._inputs.results, self)

    def next_due_ns(self) -> int | None:
        return earlier(super().next_due_ns(), self._late.next_due_ns)

    def handle(self, codes: Mapping[str, Definition], kept: list[Given], begin_ns: int, *, hides_clients: bool) -> None:
        """Start the services, give them the inputs, each at its time, and take a checkpoint at the end."""
        peers = {peer.name for one in codes.values() for peer in one.peers.values()}
        outsiders = sorted((peers | {one.sender for one in kept if one.input.kind == "call"}) - codes.keys())
        actions: list[tuple[int, Callable[[], None]]] = []
        for name in [*outsiders, *codes]:
            node = self.add(name, codes.get(name))
            first = _first_ns(self._fleet[name]) if name in codes else 0
            actions.append((max(begin_ns, first), node.start))
        together = itertools.groupby(kept, key=lambda one: (one.at_ns, one.input.service, one.record, one.input.kind))
        for (time_ns, *_), inputs in together:
            actions.append((time_ns, partial(self._send_inputs, list(inputs), hides_clients=hides_clients)))
        actions.sort(key=lambda one: one[0])  # of one time, starts come first
        try:
            for time_ns, action in actions:
                self.advance_to(time_ns)
                self.do(action)
                self.run()
            self.advance_to(self._inputs.end_ns)
            while (due_ns := earlier(self._late.next_due_ns, self._apps_due_ns())) is not None:
                self.advance_to(due_ns)  # what is under way, and what follows from it
            for name in codes:
                self.nodes[name].handle(ev.CheckpointRequested())
            self.run()
            if self._refused:
                raise ReplayError(f"{len(self._refused):,} requests were refused: {self._refused[0]}")
        except Exception as error:  # also of a handler that stops its service
            where = f" at {time_text(self.now_ns)}" if self.now_ns else ""
            text = f"the sample stops{where}: {type(error).__name__}: {error}"
            raise ReplayError(f"{text}: keep other inputs, or give an earlier --to") from error
        finally:
            self.discard_tasks()

    def _apps_due_ns(self) -> int | None:
        due = [node.app.next_due_ns for node in self.nodes.values() if node.app is not None]
        return min((one for one in due if one is not None), default=None)

    def _send_inputs(self, inputs: Iterable[Given], *, hides_clients: bool) -> None:
        """Give inputs that came together then, in one record."""
        requests: dict[str, list[ev.Event]] = defaultdict(list)
        for one in inputs:
            name, rpc, raws = one.input.service, one.rpc, one.arguments
            if one.input.kind == "request":
                payload = encode_request(rpc.method_id, encoder.encode(raws))
                requests[name].append(self._request(name, one.sender, payload, hides_clients=hides_clients))
                continue
            if rpc.rpc_type == RpcType.ASYNC:
                front = one.sender, next(self._calls)
                raws = [*(msgspec.Raw(encoder.encode(each)) for each in front), *raws]
            message = encode_incoming_rpc(rpc.method_id, RpcType(rpc.rpc_type), encoder.encode(raws))
            node = self.nodes[one.sender]
            if isinstance(node.app, LocalApp):
                dispatcher, to = node.app.dispatcher, ONESELF if node.name == name else name
                with as_thread(dispatcher.context):
                    dispatcher.outbox.impulses.append(to, one.input.method, _put_raw, (message,))
            elif isinstance(node.app, OutsideApp):
                node.app.put(name, message)
        for name, events in requests.items():
            self.nodes[name].handle(*events)

    def _request(self, name: str, sender: str, payload: bytes, *, hides_clients: bool) -> ev.Event:
        client = sender.removeprefix(CLIENTS)
        if hides_clients:
            client = self._clients.setdefault(client, f"client-{len(self._clients) + 1}")
        self._numbers[name, client] = number = self._numbers.get((name, client), 0) + 1
        request, now_ns = ClientFrameType.REQUEST, self.now_ns
        frame = ClientFrame(request, client, name, number=number, count=1, time_ns=now_ns, payload=payload)
        return ev.ClientFrameReceived(None, frame)

    def notes(self, inputs: Inputs) -> list[str]:
        """Return what the sample does not have of the recorded fleet, or has otherwise."""
        guessed, missing = inputs.results.guessed, inputs.results.missing
        found = [
            f"not in it: {n:,} messages of the SDK to {name}, such as orders" for name, n in inputs.unknown.items()
        ]
        if guessed:
            found.append(f"{guessed:,} effects or calls have the result that others had at that time")
        if missing:
            found.append(f"{missing:,} effects or calls have no result up to the end: their handlers wait")
        return found


def _put_raw(parts: list[bytes], arguments: tuple[bytes]) -> int:
    parts += (arguments[0], b"")
    return len(arguments[0])
