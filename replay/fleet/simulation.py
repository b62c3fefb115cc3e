"""Simulation of the services of the cone side by side, in the order and at the times of their logs.

Each service runs the records of its own log (:mod:`immortal.replay.fleet.player`). Messages that other services of the
cone send now replace their old messages at the same places. docs/decisions/0092 has the model of order and time.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Mapping, Sequence

from immortal.coordinator.core.formatting import time_text
from immortal.coordinator.core.interfaces import ONESELF
from immortal.coordinator.log.reader import RecordSource
from immortal.protocol.record import decode_header
from immortal.protocol.trailer import BatchKind, BatchSource, decode_trailer
from immortal.replay.fleet.calls import CallComparison
from immortal.replay.fleet.model import DELAY_NS, Broken, Difference, Logs, Row, Rules, Service
from immortal.replay.fleet.player import (
    FIRST_OTHER_NUMBER,
    NOTHING,
    LoggedRecord,
    Place,
    Player,
    Slot,
    Turn,
    first_checkpoint,
    limited,
)
from immortal.replay.fleet.recorded import Recorded
from immortal.replay.fleet.streams import Sent, Streams
from immortal.replay.plan import ReplayError
from immortal.replay.result import Sink

OTHER_MESSAGES_MAX = 100_000  # without a place in a log: stops services that call each other for ever
FIRST_OTHER_SEQUENCE_ID = 1 << 40  # of records that no log has


class JoinedLateError(Exception):
    """Raised if a service handled a logged message of ``name`` that differs now: ``name`` must join at the beginning.

    This happens if clocks of machines differ, or many messages have one time.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def simulate(logs: Logs, rules: Rules, seed: int, recorded: dict[str, Recorded]) -> Simulation:
    """Run a simulation to its end. ``recorded``: known runs of the logs' code; this adds to them.

    Raises ReplayError.
    """
    early: list[str] = []
    while True:
        simulation = Simulation(logs, rules, seed, recorded, early)
        try:
            simulation.run()
        except JoinedLateError as late:
            simulation.close()
            early.append(late.name)
        except BaseException:
            simulation.close()
            raise
        else:
            return simulation


class Simulation:
    """Run of a fleet's services. ``early``: services that are in the cone from the beginning.

    ``seed`` 0: a new message takes as long as the last one of its stream then; other seeds draw one of its delays.
    """

    def __init__(
        self, logs: Logs, rules: Rules, seed: int, recorded: dict[str, Recorded], early: Sequence[str] = ()
    ) -> None:
        self.services: dict[str, Service] = {}
        self.differences: list[Difference] = []
        self._calls = CallComparison(self.differences)
        self.effects: list[Row] = []
        self.unanswered: list[Row] = []
        self.broken: Broken | None = None
        self.prefix: Broken | None = None  # the first break where the record has none
        self.breaks: set[tuple[str, int]] = set()  # records, by service, behind which the check does not hold
        self._broke_then = False  # behind the last record of a log
        self._slots: Callable[[], Sequence[Slot]] = tuple  # that were given last
        self.notes: list[str] = []
        self.logs = logs
        self._rules = rules
        self._seed = seed
        self._recorded = recorded
        self._early = early
        self._streams = Streams(self.services, rules.delays)
        self._events: list[tuple[int, int, Callable[[int], None]]] = []
        self._numbers = itertools.count()
        self._other_records = itertools.count(FIRST_OTHER_SEQUENCE_ID)
        self._other_count = 0
        self._end_ns = max((_end_ns(source, logs.to_ns) for source in logs.sources.values()), default=0)
        self._now_ns = 0

    # --- the order --------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run to the end of the logs and of all consequences. Raises ReplayError."""
        everything = self._rules.check is not None
        for name in self.logs.sources if everything else [*self.logs.changes, *self._early]:
            self._join(name, None)
        while self._step():
            self._rules.progress(self._now_ns, self._end_ns)
            if self._other_count > OTHER_MESSAGES_MAX:
                self.notes.append(
                    f"stopped after {OTHER_MESSAGES_MAX:,} messages that no log has: services call each other without"
                    " an end; this outcome is incomplete"
                )
                break
        for service in self.services.values():
            due_ns = service.player.next_due_ns
            if due_ns is not None and due_ns > self._end_ns and service.recorded.due_ns(service.reached) != due_ns:
                self.notes.append(
                    f"{service.name}: a timer would go off at {time_text(due_ns)}, after the end of the logs"
                )
            for place, cause in sorted(service.open.items()):
                self._calls.miss(service, place, cause)

    def close(self) -> None:
        for service in self.services.values():
            service.player.close()

    def _step(self) -> bool:
        records = [
            (record.time_ns, number, service, record)
            for number, service in enumerate(self.services.values())
            if (record := service.next_record) is not None
        ]
        records.sort(key=lambda one: one[:2])
        if self._events and (not records or self._events[0][0] <= records[0][0]):
            time_ns, _, action = heapq.heappop(self._events)
            self._now_ns = max(self._now_ns, time_ns)
            action(time_ns)
            return True
        for time_ns, _, service, record in records:
            if self._is_ready(service, record):
                self._now_ns = max(self._now_ns, time_ns)
                self._handle(service, record)
                return True
        if records:
            raise ReplayError(
                f"the logs of {', '.join(repr(one[2].name) for one in records)} do not fit together: each has a message"
                " that another one makes later"
            )
        return False

    def _is_ready(self, service: Service, record: LoggedRecord) -> bool:
        """Return True if all senders of messages in ``record`` have reached them."""
        for batch in record.trailer.batches:
            sender = self.services.get(batch.name)
            if batch.kind != BatchKind.STREAM or sender is None or sender.stopped:
                continue
            made_in = sender.recorded.record_up_to(service.name, batch.last_position)
            if made_in is not None and made_in > sender.reached:
                return False
        return True

    def _schedule(self, time_ns: int, action: Callable[[int], None]) -> None:
        heapq.heappush(self._events, (time_ns, next(self._numbers), action))

    # --- the cone ---------------------------------------------------------------------------------------------------

    def _join(self, name: str, why: int | None) -> Service:
        if (service := self.services.get(name)) is not None:
            return service
        source = self.logs.sources[name]
        changed = self.logs.changes.get(name)
        route = first_checkpoint(source, self.logs.begin_ns if changed is not None else None)
        if (recorded := self._recorded.get(name)) is None:
            recorded = Recorded(source, route, self.logs.code(name), self.logs.outsiders, self.logs.to_ns)
            self._recorded[name] = recorded
        definition = changed or self.logs.code(name)
        player = Player(source, route, definition, Sink(), is_new=True, outsiders=self.logs.outsiders)
        service = Service(name, recorded, player, why, time_ns=recorded.log.begin_ns)
        service.state_cause = why
        service.joined_ns = -1 if why is None else self._now_ns
        self.services[name] = service
        if why is not None and recorded.log.begin_ns > self._now_ns and recorded.log.checkpoint.sequence_id >= 0:
            service.refuse_early()
        for other in self.services.values():  # it handled messages of this service as recorded
            if other is not service:
                other.received_positions[name] = other.log.received_position(name, other.reached)
        player.tasks.receive_draws(recorded.draws.waited)
        if changed is not None and any(start.version == changed.version for start in route.versions):
            self.notes.append(
                f"{name}: up to record {route.versions[-1].sequence_id} the log was handled by versions before"
                f" {route.versions[-1].version}, whose code runs it here: differences are looked for after it"
            )
        self._schedule_timer(service)
        self._schedule_effects(service)
        return service

    # --- the records of a log -----------------------------------------------------------------------------------------

    def _handle(self, service: Service, record: LoggedRecord) -> None:
        """Handle the next record of its log, with the present messages at the places of the old ones."""
        was_there = service.has_joined
        if self._streams.pop_as_recorded(service, record):
            service.step()
            service.pass_draws(record.sequence_id)
            self._slots = record.slots
            turn = service.player.give_logged(record)
            if turn.output == service.recorded.output_of_record(record.sequence_id) and not turn.stopped:
                self._apply_recorded_turn(service, record, turn)
            else:
                count = sum(batch.count for batch in record.trailer.batches)
                self._apply_turn(service, turn, record.time_ns, [(record.sequence_id, one) for one in range(count)], {})
        else:
            self._handle_others(service, record)
        senders = {one.name or service.name for one in record.trailer.batches if one.kind == BatchKind.STREAM}
        for name in [name for name in self.services if name in senders or (service.has_joined and not was_there)]:
            self._deliver_due(name, service, record.time_ns)

    def _handle_others(self, service: Service, record: LoggedRecord) -> None:
        """Handle a record of which some messages are others now, are missing, or came before."""
        slots = record.slots()
        causes: dict[int, int | None] = {}
        absent: set[int] = set()
        begun, is_other = 0, False
        for index, slot in enumerate(slots):
            place = (record.sequence_id, index)
            sender = self._sender(service, slot)
            if place in service.done:
                service.done.remove(place)
                absent.add(index)
                continue
            if sender is None:
                continue
            sent, ahead = self._pop_message(sender, service, place)
            if ahead:
                if index > begun:
                    self._give_part(service, record, slots, range(begun, index), causes, absent, is_last=False)
                    begun, is_other = index, True
                for one in ahead:
                    self._deliver(sender.name, service, one, record.time_ns)
            if sent is None:
                absent.add(index)
                service.open[place] = why = self._why_absent(sender, service.name, slot.position)
                for destination, outputs in service.recorded.outputs_of(place).items():
                    self._require_not_handled(service, destination, outputs[0].position)
                    if service.receiver(destination) in self.logs.sources:
                        self._join(service.receiver(destination), why)
            else:
                causes[index] = sent.difference
                if sent.message != slot.message:
                    slots[index] = Slot(slot.batch, slot.source, slot.position, sent.message)
                    is_other = True
        service.step()
        if absent or is_other:
            self._give_part(service, record, slots, range(begun, len(slots)), causes, absent, is_last=True)
        else:
            service.pass_draws(record.sequence_id)
            self._slots = record.slots
            turn = service.player.give_logged(record)
            self._apply_turn(
                service, turn, record.time_ns, [(record.sequence_id, one) for one in range(len(slots))], causes
            )

    def _give_part(
        self,
        service: Service,
        record: LoggedRecord,
        slots: Sequence[Slot],
        part: range,
        causes: Mapping[int, int | None],
        absent: set[int],
        *,
        is_last: bool,
    ) -> None:
        """Give the service the messages of ``part``; all others keep their index."""
        service.pass_draws(record.sequence_id, [index for index in part if index not in absent])
        given = [
            slot if index in part and index not in absent else Slot(slot.batch, slot.source, slot.position, NOTHING)
            for index, slot in enumerate(slots[: part.stop])
        ]
        self._slots = lambda: given
        turn = service.player.give_slots(record.sequence_id, record.time_ns, given, is_logs=is_last)
        places = [(record.sequence_id, index) for index in part if index not in absent]
        self._apply_turn(service, turn, record.time_ns, places, causes)

    def _sender(self, service: Service, slot: Slot) -> Service | None:
        """Return the service of the cone that sends the message at this place; None: the record's message stands."""
        if slot.source is None:
            return None
        sender = self.services.get(slot.source or service.name)
        if sender is None or slot.position <= service.received_positions.get(sender.name, 0):
            return None
        destination = ONESELF if sender is service else service.name
        if sender.recorded.runs[destination].find(slot.position) is None:
            return None  # an impulse, or a message from before the run
        return sender if slot.position > self._streams[sender.name, service.name].settled else None

    def _pop_message(self, sender: Service, service: Service, place: Place) -> tuple[Sent | None, list[Sent]]:
        """Take the message for a place, and the messages before it in the same stream."""
        queue = self._streams.queue(sender, service)
        ahead = list(itertools.takewhile(lambda one: one.slot != place, queue))
        if len(ahead) == len(queue) or self._is_held_back(queue[len(ahead)], ahead, service):
            return None, []
        return [queue.popleft() for _ in range(len(ahead) + 1)][-1], ahead

    def _is_held_back(self, sent: Sent, ahead: Sequence[Sent], service: Service) -> bool:
        """Return True if a late message ahead holds this one back, which then comes right behind it."""
        if not self._seed and self._rules.delays != "longest":
            return False
        held = any(not one.is_due and (one.slot is None or one.slot[0] <= service.reached) for one in ahead)
        sent.is_due = sent.is_due or held
        return held

    def _why_absent(self, sender: Service, receiver: str, position: int) -> int | None:
        destination = ONESELF if sender.name == receiver else receiver
        made_at = sender.recorded.origin_of(destination, position)
        if made_at is not None and (number := self._calls.number_at(sender.name, destination, made_at)) is not None:
            return number
        return sender.state_cause if made_at is None else sender.open.get(made_at, sender.state_cause)

    # --- messages without a place -------------------------------------------------------------------------------------

    def _deliver(self, sender: str, service: Service, sent: Sent, time_ns: int) -> None:
        """Deliver a message now, whatever its place was."""
        self._other_count += 1
        if service.stopped:
            return
        name = ONESELF if sender == service.name else sender
        batch = BatchSource(BatchKind.STREAM, name, 0, 1, 0)
        place = sent.slot
        if place is None or place in service.done:
            place = (next(self._other_records), 0)
        else:  # it is the same message at another time: it draws the same numbers
            if place[0] > service.reached:
                service.done.add(place)
            service.open.pop(place, None)
        service.pass_draws(place[0], [place[1]])
        padding = [Slot(batch, name, 0, NOTHING)] * place[1]
        self._give_other(service, place, [*padding, Slot(batch, name, 0, sent.message)], time_ns, sent.difference)

    def _give_other(self, service: Service, place: Place, slots: list[Slot], time_ns: int, cause: int | None) -> None:
        time_ns = max(time_ns, service.time_ns)
        self._slots = lambda: slots
        turn = service.player.give_slots(place[0], time_ns, slots, is_logs=False)
        service.player.dispatcher.expect(service.reached + 1)
        self._apply_turn(service, turn, time_ns, [place], {place[1]: cause}, is_other=True)

    def _give_impulse(self, service: Service, message: bytes, time_ns: int) -> None:
        """Give the service an impulse to itself that its log does not have."""
        if not service.stopped:
            self._other_count += 1
            batch = BatchSource(BatchKind.IMPULSES, ONESELF, 0, 1, 0)
            slots = [Slot(batch, None, 0, message)]
            self._give_other(service, (next(self._other_records), 0), slots, time_ns, service.state_cause)

    def _deliver_due(self, sender: str, service: Service, time_ns: int) -> None:
        """Deliver the messages at the front of a stream that are due."""
        stream = self._streams[sender, service.name]
        if not service.has_joined:
            return
        while stream.queue and stream.queue[0].is_due and self._streams.is_past_settled(sender, service):
            self._deliver(sender, service, stream.queue.popleft(), time_ns)

    # --- the outputs of a record --------------------------------------------------------------------------------------

    def _apply_turn(
        self,
        service: Service,
        turn: Turn,
        time_ns: int,
        places: Sequence[Place],
        causes: Mapping[int, int | None],
        *,
        is_other: bool = False,
    ) -> None:
        service.time_ns = max(service.time_ns, time_ns)
        service.messages += len(places)
        for place in places:
            if (cause := causes.get(place[1])) is not None:
                service.state_cause = cause
                if service.why is None and service.name not in self.logs.changes:
                    service.why = cause
        made: dict[tuple[str, Place], list[bytes]] = {}
        for output in turn.outputs:
            made.setdefault((output.destination, output.place), []).append(output.message)
        service.verdicts |= {verdict.key: verdict for verdict in turn.verdicts}
        if turn.stopped:
            service.stopped = turn.stopped
            self.notes.append(f"{service.name} stops at {turn.stopped}; its outcome here ends there")
        was = {
            (destination, place): outputs
            for place in places
            for destination, outputs in service.recorded.outputs_of(place).items()
        }
        for destination, place in {**made, **was}:
            cause = causes.get(place[1])
            if cause is None and service.name not in self.logs.changes:
                cause = service.state_cause
            old, new = was.get((destination, place), []), made.get((destination, place), [])
            calls = self._calls.compare(service, destination, place, old, new, cause, time_ns, is_other=is_other)
            for position, message, number in calls:
                if message is not None:
                    self._send(service, destination, message, position, number, time_ns, in_time=not is_other)
                elif service.receiver(destination) in self.logs.sources:
                    self._require_not_handled(service, destination, position or 0)
                    self._join(service.receiver(destination), number)
        self._schedule_and_check(service, places[-1] if places else (service.reached, 0), time_ns, is_other=is_other)

    def _schedule_and_check(self, service: Service, place: Place, time_ns: int, *, is_other: bool = False) -> None:
        self._schedule_timer(service)
        self._schedule_effects(service)
        self._check(service, place, time_ns, is_other=is_other)

    def _apply_recorded_turn(self, service: Service, record: LoggedRecord, turn: Turn) -> None:
        """Take the outputs of a record that are those of the log, without a look at each."""
        service.time_ns = max(service.time_ns, record.time_ns)
        count = sum(batch.count for batch in record.trailer.batches)
        service.messages += count
        service.equal += sum(made.count for made in turn.made)
        service.verdicts |= {verdict.key: verdict for verdict in turn.verdicts}
        for destination in dict.fromkeys(made.destination for made in turn.made):
            if (name := service.receiver(destination)) not in self.logs.sources:
                continue
            for run in service.recorded.runs[destination].of_record(record.sequence_id):
                if self._streams.add_as_recorded(service, destination, self.services.get(name), run):
                    continue
                for one in service.recorded.sent(destination, run):
                    self._send(service, destination, one.message, one.position, None, record.time_ns, in_time=True)
        self._schedule_and_check(service, (record.sequence_id, max(0, count - 1)), record.time_ns)

    def _require_not_handled(self, service: Service, destination: str, position: int) -> None:
        """Raise JoinedLateError if the receiver has handled that message of ``service`` as recorded."""
        receiver = self.services.get(service.receiver(destination))
        if receiver is not None and position <= receiver.received_positions.get(service.name, 0):
            raise JoinedLateError(service.name)

    def _send(
        self,
        service: Service,
        destination: str,
        message: bytes,
        position: int | None,
        number: int | None,
        time_ns: int,
        *,
        in_time: bool,
    ) -> None:
        name = service.receiver(destination)
        if name not in self.logs.sources:
            if number is not None:
                self._answer(service, destination, message, time_ns)
            return
        receiver = self.services.get(name)
        stream = self._streams[service.name, name]
        if receiver is None:
            following = service.recorded.runs[destination].next_after(stream.settled)
            if number is None and in_time and position is not None and following == position:
                stream.settled = position
                return
            receiver = self._join(name, number)
        if position is not None and position <= receiver.received_positions.get(service.name, 0):
            if number is not None or not in_time:
                raise JoinedLateError(service.name)
            return  # it handled this one as recorded
        slot = None
        if position is not None:
            from_name = ONESELF if receiver is service else service.name
            slot = receiver.log.place_of(from_name, position)
            if slot is None and receiver.log.was_before(from_name, position):
                if number is None:
                    return
                receiver.refuse_early()
        sent = Sent(message, slot, number)
        self._streams.queue(service, receiver).append(sent)
        if slot is None or slot[0] <= receiver.reached:
            if slot is None and number is None:
                return  # it was in flight at the end of the log, and still is
            stream.last_ns = max(stream.last_ns, time_ns + stream.delay_ns(service, receiver, self._seed, time_ns))
            self._schedule(stream.last_ns, lambda now_ns: self._is_due(service.name, receiver, sent, now_ns))

    def _is_due(self, sender: str, receiver: Service, sent: Sent, now_ns: int) -> None:
        sent.is_due = True
        stream = self._streams[sender, receiver.name]
        for one in stream.queue:  # messages before it that no longer have a place of their own
            if one is sent:
                break
            if one.slot is None or one.slot[0] <= receiver.reached:
                one.is_due = True
        self._deliver_due(sender, receiver, now_ns)

    # --- services without a log ---------------------------------------------------------------------------------------

    def _answer(self, service: Service, destination: str, message: bytes, time_ns: int) -> None:
        """Answer a call to a service without a log, if its caller waits."""
        if destination in self.logs.outsiders:
            return
        answered = self._rules.answered(service, destination, message, time_ns)
        if answered is None:
            return
        answer, unanswered = answered
        self.unanswered.append(unanswered)
        batch = BatchSource(BatchKind.STREAM, destination, 0, 1, 0)

        def give(now_ns: int) -> None:
            if not service.stopped:
                self._other_count += 1
                slots = [Slot(batch, destination, 0, answer)]
                self._give_other(service, (next(self._other_records), 0), slots, now_ns, None)

        self._schedule(time_ns + DELAY_NS, give)

    # --- time and effects ---------------------------------------------------------------------------------------------

    def _schedule_timer(self, service: Service) -> None:
        """Schedule a timer that the log's code did not set; the log's own messages of the clock trigger the others."""
        due_ns = service.player.next_due_ns
        was_ns = service.recorded.due_ns(service.reached)
        if due_ns is None or service.stopped or (was_ns is not None and due_ns >= was_ns):
            return
        if due_ns == service.timer_ns:
            return
        service.timer_ns = due_ns
        if due_ns > self._end_ns:
            return

        def fire(now_ns: int) -> None:
            if not service.stopped and service.player.next_due_ns == due_ns:
                now_ns = max(now_ns, service.time_ns)
                self._give_impulse(service, service.player.time_message(now_ns), now_ns)

        self._schedule(max(due_ns, service.time_ns), fire)

    def _schedule_effects(self, service: Service) -> None:
        """Schedule the results of new effects: the log's result if it has one, else one by the rules."""
        if service.stopped:
            return
        for number, effect in service.player.waiting_effects().items():
            if number in service.effects:
                continue
            service.effects[number] = effect.function.name
            known = service.recorded.effects.get(number)
            if number < FIRST_OTHER_NUMBER and (known is None or known.done is None or known.done[0] > service.reached):
                continue
            self._schedule(
                service.time_ns + (DELAY_NS if known is None else known.done_ns - known.begun_ns),
                lambda now_ns, number=number: self._give_result(service, number, now_ns),  # type: ignore[misc]
            )

    def _give_result(self, service: Service, number: int, now_ns: int) -> None:
        effect = service.player.waiting_effects().get(number)
        if effect is None or service.stopped:
            return
        message, asked = self._rules.result(service, number, effect, now_ns)
        self.effects.append(asked)
        if message:
            self._give_impulse(service, message, now_ns)

    # --- failures and checks ------------------------------------------------------------------------------------------

    def _check(self, service: Service, place: Place, time_ns: int, *, is_other: bool) -> None:
        if self._rules.check is None or self.prefix is not None:
            return
        states = {name: one.player.instance for name, one in self.services.items()}
        if len(states) < len(self.logs.sources) or any(one is None for one in states.values()):
            return
        try:
            with limited():
                text = "it returned False" if self._rules.check(states) is False else ""
        except AssertionError as error:
            text = str(error) or "AssertionError"
        except Exception as error:  # of the user's function
            where = f"after {service.name!r} at {time_text(time_ns)}"
            raise ReplayError(f"the check can't be made {where}: {type(error).__name__}: {error}") from None
        record, then = (service.name, place[0]), self._rules.then
        (self.breaks.add if text else self.breaks.discard)(record)
        if then is not None and not is_other:
            self._broke_then = record in then
        is_new = then is not None and not self._broke_then
        if text and (is_new or self.broken is None):
            inputs = sum(one.log.count_inputs(one.reached) for one in self.services.values())
            cut = {name: one.reached for name, one in self.services.items()}
            slot = next(iter(self._slots()[place[1] :]), None)
            message = b"" if slot is None or slot.batch.kind == BatchKind.INITIAL else slot.message
            broken = Broken(service.name, place, time_ns, text, message, inputs, cut)
            self.broken = self.broken or broken
            self.prefix = broken if is_new else None


def _end_ns(source: RecordSource, to_ns: int | None) -> int:
    last = source.summary().last_sequence_id
    value = next(source.values(last, last), None)
    if value is None:
        return 0
    header = decode_header(value)
    end_ns = decode_trailer(value[header.size_bytes :], header.check).time_ns
    return end_ns if to_ns is None else min(end_ns, to_ns)
