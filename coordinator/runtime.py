"""The loop: events to the machine, its effects to the app's socket, the log and the messenger.

One thread. ZeroMQ is drained through the messenger's descriptor; commits run inline when small, else on the log
writer's thread. A turn takes all that has come in, hands it to the machine once, and carries out what it asks for;
small commits come last, so that everything else is under way before the disk is waited for. What they bring is handled
in the same turn: the app gets its record before anything else is worked out, and what can wait is looked at last.
"""

from __future__ import annotations

import functools
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from coordinator import control, descriptors, operator_verbs, own_logs, upgrade_mark
from coordinator.app_endpoint import AppEndpoint
from coordinator.audit import AuditLog
from coordinator.auditor import Auditor
from coordinator.clock import LOOK_NS, InstanceClock
from coordinator.config import InstanceSettings
from coordinator.control_server import Asked, ControlServer
from coordinator.core import effects as ef
from coordinator.core import events as ev
from coordinator.core.errors import DamagedLogError, DivergenceError, LogError, LogFormatError, LogIdentityError
from coordinator.core.interfaces import CheckpointHeader, LogStore
from coordinator.core.limits import MIB, Limits
from coordinator.core.machine import Machine
from coordinator.discovery import Discovery, Routes
from coordinator.fault_points import FaultPoint, reach
from coordinator.foreign_state import PickleRefusedError
from coordinator.limited_log import LimitedLog
from coordinator.log.authentication import LogKeyError
from coordinator.log.modes import tighten_log
from coordinator.log_writer import LogWriter
from coordinator.logs import Events
from coordinator.messenger import ClientRoute, Messenger, Received
from coordinator.operator_verbs import VerbError
from coordinator.peer_retries import PeerRetries
from coordinator.peer_security import PeerSecurity, insecurity
from coordinator.registry import Registry
from coordinator.stop_requests import StopRequests
from protocol import compiled
from protocol.allocator import keep_freed_memory
from protocol.checksum import crc64
from protocol.client import decode_client_frame, encode_client_frame
from protocol.errors import ImmortalError, RemoteProtocolError
from protocol.peer import FrameType, PeerFrame, decode_frame, encode_frame

STOP_TIMEOUT_S = 25.0  # for the last checkpoint; the supervisor waits 30
FAREWELL_TIMEOUT_S = 1.0  # for the last bytes to the app
SWITCH_INTERVAL_S = 0.0005  # the commit thread gets the interpreter back this soon: 5 ms would be 5 ms per commit
STATUS_NO_RECOVERY = 3  # the log can't be replayed as it is: the next start would find the same
MEASURE_INTERVAL_NS = 500_000_000  # of the log's room: it takes some 20 µs
MEASURE_SIZE_BYTES = 4 << 20  # ... and after so much was written
DAY_NS = 24 * 3600 * 10**9


class Coordinator:
    """One running coordinator over an open log. :meth:`run` returns when it has stopped."""

    def __init__(
        self,
        settings: InstanceSettings,
        registry: Registry,
        store: LogStore,
        log: Events,
        upgrade_to: int | None = None,
        *,
        promote: bool = False,
    ) -> None:
        self._settings = settings
        self._registry = registry
        self._store = store
        self._log = log
        summary = store.summary()
        self._clock = InstanceClock(settings.folder, summary, settings.tuning.clock_hold_s * 10**9, log)
        self._machine = Machine(
            settings.name,
            summary,
            limits_of(settings),
            upgrade_to,
            promote=promote,
            clients=store.clients(),
            permissions=settings.permissions,
            running=self._clock.running,
        )
        for problem in store.problems:
            log.error(problem)
        self._events: list[ev.Event] = []
        self._error: ImmortalError | None = None
        self._was_ready = False  # an app was recovered, or begun, in this process
        self._stop_requests = StopRequests()
        self._stop_deadline_ns: int | None = None
        self._wake_due_ns: int | None = None  # on the monotonic clock, as all that follows
        self._clock_due_ns = 0
        self._measure_at_ns = 0
        self._unmeasured_bytes = 0  # handed to the disk since then
        self._routes = Routes(Discovery(settings, registry), log.warning)
        self._writer = LogWriter(
            store,
            keep_checkpoints=settings.keep_checkpoints,
            inline_size_bytes_max=settings.tuning.commit_inline_kib_max << 10,
        )
        self._epoll = select.epoll()
        self._app = AppEndpoint(settings, log, self._epoll)
        self._security = PeerSecurity(settings, registry, self._routes.at, log.warning)
        self._permissions = settings.permissions
        self._auditor = Auditor(AuditLog(settings.folder, log.warning))
        self._limited = LimitedLog(log)  # what others can cause
        self._retries = PeerRetries()
        self._barred: dict[str, str] = {}  # destinations that must not be connected to, and why
        self._impostors = 0  # frames under another name than that of their key
        self._messenger = Messenger(security=self._security.security)
        self._messenger_fileno, self._writer_fileno = self._messenger.fileno(), self._writer.fileno()
        # When to look although nothing is ready, on the monotonic clock, as of the last wait:
        self._messenger_due_ns: int | None = None
        self._due_ns: int | None = None  # for peers and keys
        self._control_due_ns: int | None = None
        self._control = ControlServer(settings.folder)
        self._control_fileno = self._control.fileno()
        self._epoll.register(self._control_fileno, select.EPOLLIN)
        self._actions: dict[type, Callable[[Any], None]] = {
            ef.SendToApp: self._app.send,
            ef.CloseApp: self._app.close_app,
            ef.PauseApp: self._app.pause,
            ef.ResumeApp: self._app.resume,
            ef.Commit: self._commit,
            ef.WriteCheckpointChunk: self._writer.submit,
            ef.Trim: self._trim,
            ef.LoadLog: self._load_log,
            ef.CheckCheckpoint: self._check_checkpoint,
            ef.ReadCheckpointChunk: self._read_checkpoint_chunk,
            ef.ReadRecords: self._read_records,
            ef.ReadSpilled: self._read_spilled,
            ef.ReadLetters: self._read_letters,
            ef.OpenPeer: self._open_peer,
            ef.SendToPeer: self._send_to_peer,
            ef.ResetPeer: self._reset_peer,
            ef.PeerResetDone: self._peer_reset_done,
            ef.OperatorAnswered: self._operator_answered,
            ef.ReplyToClient: self._reply_to_client,
            ef.WakeAt: self._wake_at,
            ef.UpgradeEnded: self._upgrade_ended,
            ef.Report: self._report,
            ef.Stop: self._stop,
        }

    def run(self) -> int:
        """Serve until stopped: 0 after a clean stop; after an error, which has been logged, 1 or STATUS_NO_RECOVERY."""
        settings = self._settings
        try:
            self._app.listen()
            self._messenger.listen(settings.peer, self._peer_frame_received, client_loop=self._client_frame_received)
            control_path = self._control.listen()
            self._wake_receiver, self._wake_sender = socket.socketpair()
            self._catch_signals()
            self._wake_fileno = self._wake_receiver.fileno()
            for descriptor in (self._messenger_fileno, self._writer_fileno, self._wake_fileno):
                self._epoll.register(descriptor, select.EPOLLIN)
            control.announce(settings.folder, control_path)
            reach(FaultPoint.ANNOUNCED)
            self._auditor.started(process=os.getpid(), user=os.geteuid(), insecure=settings.insecure)
            self._log.info(
                "coordinator started",
                peer=settings.peer,
                app=settings.app_address,
                app_socket=settings.app_unix_address,
                app_send=settings.app_send_address,
                app_send_mode=settings.app_send_mode if settings.app_send_port is not None else None,
                encrypted=self._security.security is not None,
                runs=compiled.describe(),
                **{key: self._machine.status(self._clock.now_ns())[key] for key in ("committer_id", "sequence_id")},
            )
            if (warning := insecurity(settings, self._security.security)) is not None:
                self._log.warning(warning)
            while not self._machine.stopped:
                self._turn()
            self._say_farewell()
        finally:
            self._close()
        if self._error is not None:
            self._log.error(str(self._error))
            return STATUS_NO_RECOVERY if isinstance(self._error, DivergenceError | DamagedLogError) else 1
        self._log.info("stopped")
        return 0

    # --- one turn --------------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        ready = dict(self._epoll.poll(self._timeout_s()))
        now_ns = time.monotonic_ns()
        if self._writer_fileno in ready:
            self._events += self._writer.take_done()
        if self._wake_fileno in ready:
            self._wake_receiver.recv(64)
        only_messages = self._messenger_fileno in ready and len(ready) == 1
        if not only_messages or self._app.is_due(now_ns):
            self._events += self._app.process(ready)
        if self._machine.waits_for_app:
            self._events += self._app.take_sent()
        if self._messenger_due_ns is not None and now_ns >= self._messenger_due_ns:
            self._messenger.process()
        elif self._messenger_fileno in ready:
            self._messenger.receive(replies=False)
        if self._control_fileno in ready or (self._control_due_ns is not None and now_ns >= self._control_due_ns):
            for asked in self._control.process():
                self._asked(asked)
        self._measure_log(now_ns)
        if self._due_ns is not None and now_ns >= self._due_ns:
            self._look_for_peers()
            self._look_for_keys()
            self._note_news()
        for effect, attempt in self._retries.take_due(now_ns):
            self._send_to_peer(effect, attempt)
        if self._wake_due_ns is not None and now_ns >= self._wake_due_ns:
            self._wake_due_ns = None
            self._events.append(ev.Tick())
        if now_ns >= self._clock_due_ns:
            self._clock_due_ns = now_ns + LOOK_NS
            self._clock.look()
            self._events += self._clock.take_events()
        if self._stop_deadline_ns is not None and time.monotonic_ns() > self._stop_deadline_ns:
            at = self._machine.handling_in_words(self._clock.now_ns())
            late = f"the app gave no checkpoint in time{f' (it is {at})' if at else ''}"
            self._log.warning(f"{late}; stopping without one: the log has everything")
            self._machine.stopped = True
            return
        self._handle_events()
        if self._messenger.replies_wait and not self._machine.stopped:
            self._messenger.receive()
            self._handle_events()

    def _handle_events(self) -> None:
        machine = self._machine
        while self._events and not machine.stopped:
            now_ns = self._clock.now_ns()
            events, self._events = [*self._clock.take_events(), *self._app.take_sent(), *self._events], []
            self._messenger.hold()
            # The app works on its record while the rest is worked out; nobody waits like that for a reply to a peer.
            replies = [*self._carry_out(machine.take(events, now_ns)), *self._carry_out(machine.advance())]
            for reply in replies:
                self._reply_to_peer(reply)
            if self._messenger.has_new or not self._writer.has_inline:
                self._flush_messenger()
            self._events += self._writer.run_inline()
            if not self._events:
                self._carry_out(machine.settle())
        self._flush_messenger()

    def _carry_out(self, effects: Sequence[ef.Effect]) -> list[ef.ReplyToPeer]:
        """All but the replies to peers, which are returned."""
        replies: list[ef.ReplyToPeer] = []
        for effect in effects:
            if type(effect) is ef.ReplyToPeer:
                replies.append(effect)
            else:
                self._actions[type(effect)](effect)
        self._events += self._app.flush()
        if self._machine.waits_for_app:
            self._events += self._app.take_sent()
        return replies

    def _flush_messenger(self) -> None:
        self._messenger.patient = not self._machine.waits_for_peers
        self._messenger.flush()

    def _timeout_s(self) -> float | None:
        if self._events:
            return 0
        self._messenger_due_ns = self._messenger.next_deadline_ns()
        self._due_ns = _earliest(
            self._routes.next_deadline_ns(),
            self._security.next_deadline_ns(),
            self._limited.next_deadline_ns(),
        )
        self._control_due_ns = self._control.next_deadline_ns()
        due_ns = _earliest(
            self._messenger_due_ns,
            self._control_due_ns,
            self._app.next_deadline_ns(),
            self._due_ns,
            self._retries.next_deadline_ns(),
            self._stop_deadline_ns,
            self._wake_due_ns,
            self._clock_due_ns,
            self._measure_at_ns if self._machine.waits_for_room else None,
        )
        return None if due_ns is None else max(0, due_ns - time.monotonic_ns()) / 1e9

    # --- the log ---------------------------------------------------------------------------------------------------

    def _commit(self, effect: ef.Commit) -> None:
        self._unmeasured_bytes += effect.size_bytes
        self._writer.submit(effect)

    def _trim(self, effect: ef.Trim) -> None:
        days = self._settings.keep_log_days
        self._writer.trim(None if days is None else self._clock.running.before(days * DAY_NS))

    def _answer(self, read: Callable[[], ev.Event]) -> None:
        try:
            self._events.append(read())
        except LogError as error:
            self._events.append(ev.LogFailed(error))

    def _load_log(self, effect: ef.LoadLog) -> None:
        reach(FaultPoint.LOG_LOADED)
        self._answer(lambda: ev.LogLoaded(self._store.summary()))
        for problem in self._store.problems:
            self._log.error(problem)

    def _read_records(self, effect: ef.ReadRecords) -> None:
        reach(FaultPoint.RECORDS_READ)
        self._answer(lambda: ev.RecordsRead(self._store.read(effect.first_sequence_id, effect.size_bytes_max)))

    def _read_spilled(self, effect: ef.ReadSpilled) -> None:
        reach(FaultPoint.SPILL_READ)
        first_position, limits = effect.first_position, (effect.last_position, effect.size_bytes_max)
        self._answer(
            lambda: ev.SpilledRead(
                effect.destination,
                first_position,
                self._store.read_spilled(effect.destination, first_position, *limits),
            )
        )

    def _read_letters(self, effect: ef.ReadLetters) -> None:
        letters = []
        for key in effect.keys:
            try:
                letters.append(self._store.letter(key))
            except DamagedLogError as error:
                self._log.error(f"{error}: it is not retried")
        self._events.append(ev.LettersRead([letter for letter in letters if letter is not None]))

    def _measure_log(self, now_ns: int) -> None:
        """Now and then while the log changes, and while it has too little room: a trim makes some."""
        if now_ns < self._measure_at_ns and self._unmeasured_bytes < MEASURE_SIZE_BYTES:
            return
        self._unmeasured_bytes = 0
        self._measure_at_ns = now_ns + MEASURE_INTERVAL_NS
        self._answer(lambda: ev.LogMeasured(self._store.space()))

    def _read_checkpoint_chunk(self, effect: ef.ReadCheckpointChunk) -> None:
        reach(FaultPoint.CHECKPOINT_READ)
        self._answer(
            lambda: ev.CheckpointChunkRead(self._store.read_checkpoint_chunk(effect.checkpoint_id, effect.index))
        )

    def _check_checkpoint(self, effect: ef.CheckCheckpoint) -> None:
        header = effect.header
        try:
            problem = check_checkpoint(self._store, header)
        except LogError as error:
            problem = str(error)
        self._events.append(ev.CheckpointChecked(header.checkpoint_id, problem))

    # --- peers -----------------------------------------------------------------------------------------------------

    def _open_peer(self, effect: ef.OpenPeer) -> None:
        self._routes.add(effect.destination, time.monotonic_ns())

    def _look_for_peers(self) -> None:
        for name, endpoint_before in self._routes.look(time.monotonic_ns(), self._messenger.connected):
            endpoint = self._routes.endpoint(name)
            self._log.info("peer found" if endpoint_before is None else "peer moved", peer=name, endpoint=endpoint)
            if endpoint_before is not None:
                self._drop(endpoint_before, name)
            self._events.append(ev.PeerMoved(name))

    def _look_for_keys(self) -> None:
        self._limited.process()
        changed = self._security.look(time.monotonic_ns())
        if self._security.permissions != self._permissions:
            self._permissions = self._security.permissions
            self._events.append(ev.PermissionsChanged(self._permissions))
            self._log.info("permissions changed", limited=sorted(self._permissions))
        if not changed:
            return
        security = self._security.security
        if security is not None:
            self._messenger.secure(security)
            self._log.info(
                "keys or callers changed", key=security.own.public, callers=sorted(security.callers.values())
            )
        for name in list(self._barred):
            endpoint = self._routes.endpoint(name)
            if endpoint is None or self._security.barrier(endpoint) is None:
                del self._barred[name]
                self._events.append(ev.PeerMoved(name))

    def _note_news(self) -> None:
        self._auditor.look(
            self._messenger.counters(),
            self._security.security,
            self._permissions,
            self._machine.forbidden,
            self._machine.held_back,
            self._impostors,
            time.monotonic_ns(),
        )

    def _is_barred(self, name: str, endpoint: str) -> bool:
        problem = self._security.barrier(endpoint)
        if problem is None:
            self._barred.pop(name, None)
            return False
        if self._barred.get(name) != problem:
            self._barred[name] = problem
            self._log.warning(f"nothing is sent to {name!r}, its calls wait: {problem}")
        return True

    def _drop(self, endpoint: str, destination: str) -> None:
        """Forget what is on its way there. What was for others than ``destination`` is sent again."""
        self._messenger.drop(endpoint)
        self._events += [ev.PeerMoved(name) for name in self._routes.at(endpoint) if name != destination]

    def _send_to_peer(self, effect: ef.SendToPeer, attempt: int = 1) -> None:
        endpoint = self._routes.endpoint(effect.destination)
        if endpoint is not None and not self._is_barred(effect.destination, endpoint):
            reach(FaultPoint.BEFORE_SEND)
            reply = functools.partial(self._peer_replied, effect, attempt)
            self._messenger.send_message(endpoint, encode_frame(effect.frame), reply)

    def _peer_replied(self, effect: ef.SendToPeer, attempt: int, parts: list[bytes]) -> None:
        # Without parts: acknowledged, but the answer is not kept any more. The receiver knows it: ask again, as for
        # an answer that was damaged on its way, or that a later build makes.
        frame = self._decode(effect.destination, parts) if parts else None
        if frame is not None and frame.frame_type is FrameType.UNKNOWN:
            self._limited.warning(
                f"an answer of {effect.destination!r} was dropped: {frame.reason} is not known here",
                kind=("answer", effect.destination),
            )
            frame = None
        if frame is None:
            self._retries.add(effect, attempt, time.monotonic_ns())
        else:
            self._events.append(ev.PeerReplied(effect.destination, effect.tag, frame))

    def _decode(self, origin: str, parts: list[bytes]) -> PeerFrame | None:
        try:
            return decode_frame(parts)
        except RemoteProtocolError as error:
            self._limited.warning("a frame was dropped", kind="frame", origin=origin, reason=str(error))
            return None

    def _peer_frame_received(self, received: Received) -> None:
        reach(FaultPoint.FRAME_RECEIVED)
        frame = self._decode(f"{received.sender:016x}", received.parts)
        if frame is None:
            received.reply()  # its sender sends it again
        elif frame.frame_type is FrameType.UNKNOWN:  # nobody's name is believed: it is only told what is known here
            sender = received.peer or frame.sender
            self._limited.warning(
                f"a frame of {sender!r} was refused: {frame.reason} is not known here", kind=("unknown", sender)
            )
            self._events.append(ev.PeerFrameReceived(received, frame))
        elif received.peer is not None and received.peer != frame.sender:
            self._impostors += 1
            self._limited.warning(
                f"a frame was dropped: it says that {frame.sender!r} sends it, its key {received.peer!r}",
                kind=("sender", received.peer),
            )
        else:
            if frame.frame_type is FrameType.HELLO and (endpoint := self._routes.endpoint(frame.sender)) is not None:
                self._messenger.reconnect(endpoint)  # it has just been started
            self._events.append(ev.PeerFrameReceived(received, frame))

    def _reply_to_peer(self, effect: ef.ReplyToPeer) -> None:
        token = effect.token
        if isinstance(token, Received):
            reach(FaultPoint.BEFORE_ANSWER)
            token.reply(*encode_frame(effect.frame))

    def _client_frame_received(self, route: ClientRoute, data: bytes) -> None:
        try:
            frame = decode_client_frame(data)
        except RemoteProtocolError as error:
            self._limited.warning(f"a client's frame was dropped: {error}", kind="client")
        else:
            self._events.append(ev.ClientFrameReceived(route, frame, route.peer or ""))

    def _reply_to_client(self, effect: ef.ReplyToClient) -> None:
        token = effect.token
        if isinstance(token, ClientRoute):
            token.say(encode_client_frame(effect.frame))

    def _reset_peer(self, effect: ef.ResetPeer) -> None:
        self._retries.forget(effect.destination)
        endpoint = self._routes.endpoint(effect.destination)
        if endpoint is not None:
            self._drop(endpoint, effect.destination)

    def _peer_reset_done(self, effect: ef.PeerResetDone) -> None:
        if isinstance(effect.token, Asked):
            effect.token.answer({"found": effect.found})

    def _operator_answered(self, effect: ef.OperatorAnswered) -> None:
        if isinstance(effect.token, Asked):
            effect.token.answer(effect.answer)

    # --- the operator ----------------------------------------------------------------------------------------------

    def _asked(self, asked: Asked) -> None:
        """Whatever an operator asks for comes through here; ``asked`` says who it is."""
        reach(FaultPoint.CONTROL)
        self._auditor.operator(f"uid {asked.uid}", asked.verb, asked.argument.decode(errors="replace"))
        if asked.verb == "status":
            asked.answer(self._status())
        elif asked.verb == "clock":
            asked.answer(self._clock.status())
        elif asked.verb == "accept-clock":
            self._clock.now_ns(accept=True)
            asked.answer(self._clock.status())
        elif asked.verb == "checkpoint":
            self._events.append(ev.CheckpointRequested())
            asked.answer({"asked": True})
        elif asked.verb == "peers":
            asked.answer({"peers": self._peers_status()})
        elif asked.verb == "reclaim":
            self._events.append(ev.Reclaimed(asked))  # answered once it is durable
        elif asked.verb in operator_verbs.VERBS:
            try:
                event = operator_verbs.event_of(asked.verb, asked.argument, asked, self._store, self._machine.letters)
            except (VerbError, LogError) as error:
                asked.answer({"error": str(error)})
            else:
                self._events.append(event)  # answered once it is durable
        else:
            verbs = ("status", "checkpoint", "clock", "accept-clock", "peers", "reclaim", *operator_verbs.VERBS)
            asked.answer({"error": f"unknown verb {asked.verb!r}; known: {', '.join(verbs)}"})

    def _status(self) -> dict[str, object]:
        status = {**self._machine.status(self._clock.now_ns()), "pid": os.getpid(), "clock": self._clock.status()}
        unsent_bytes = status["unsent_bytes"]
        if isinstance(unsent_bytes, int):
            status["unsent_bytes"] = unsent_bytes - self._app.sent_bytes  # of which the machine has not heard
        behind = bool(status["backlog_records"] or status["unsent_bytes"])
        silent_s = (time.monotonic_ns() - self._app.moved_ns) / 1e9
        status["app_silent_s"] = round(silent_s, 3) if behind and status["app_connected"] else 0.0
        status["commit_ms"] = round(self._writer.commit_s * 1000, 3)
        counters = self._messenger.counters()
        security = self._security.security
        status["security"] = {
            "key": None if security is None else security.own.public,
            "strangers_refused": counters.strangers_refused,
            "strangers_dropped": counters.strangers_dropped + self._impostors,
            "roles_refused": counters.roles_refused,
        }
        outputs = status["outputs"]
        if isinstance(outputs, dict):
            for destination, output in outputs.items():
                if destination == self._settings.name:
                    output |= {"endpoint": "", "connected": True}
                    continue
                route = self._routes.describe(destination)
                endpoint = route["endpoint"] or ""
                output["endpoint"] = endpoint
                output["error"] = output["error"] or route["problem"] or self._barred.get(destination)
                output["connected"] = bool(endpoint) and self._messenger.connected(endpoint)
        return status

    def _peers_status(self) -> dict[str, dict[str, object]]:
        """What the machine knows of each peer, and how it is reached."""
        peers = self._machine.peers_status()
        for name, peer in peers.items():
            route = self._routes.describe(name)
            endpoint = route["endpoint"]
            since_ns = self._messenger.connected_since_ns(endpoint) if endpoint else None
            peer |= {
                "endpoint": endpoint,
                "origin": route["origin"],
                "connected_s": None if since_ns is None else round((time.monotonic_ns() - since_ns) / 1e9, 3),
                "error": peer["error"] or route["problem"] or self._barred.get(name),
            }
        return peers

    def _wake_at(self, effect: ef.WakeAt) -> None:
        self._wake_due_ns = time.monotonic_ns() + effect.time_ns - self._clock.now_ns()

    def _upgrade_ended(self, effect: ef.UpgradeEnded) -> None:
        if effect.problem is None:
            complete_upgrade(self._settings, self._registry, effect.version)
        else:
            upgrade_mark.give_up(self._settings.folder, effect.problem)

    def _report(self, effect: ef.Report) -> None:
        if effect.kind or effect.level in ("warning", "error"):
            kind = (effect.kind or effect.message, effect.fields.get("peer"))
            self._limited.log(effect.level, effect.message, kind=kind, **effect.fields)
        else:
            getattr(self._log, effect.level)(effect.message, **effect.fields)
        began = effect.message == "checkpoint taken" and effect.level == "info" and not self._was_ready
        if effect.message == "recovered" or began:
            self._was_ready = True
            control.report_ready()

    # --- the end ---------------------------------------------------------------------------------------------------

    def _catch_signals(self) -> None:
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        signal.set_wakeup_fd(self._wake_sender.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._signalled)

    def _signalled(self, number: int, frame: object) -> None:
        self._stop_requests.signalled()
        if self._stop_deadline_ns is None:
            self._stop_deadline_ns = time.monotonic_ns() + int(STOP_TIMEOUT_S * 1e9)
            self._events.append(ev.StopRequested())
        elif self._stop_requests.count > 1:
            self._stop_deadline_ns = 0  # at once

    def _stop(self, effect: ef.Stop) -> None:
        reach(FaultPoint.STOPPING)
        self._error = effect.error

    def _say_farewell(self) -> None:
        """Let the last bytes reach the app and the last answers the peers."""
        self._app.drain(FAREWELL_TIMEOUT_S)
        self._messenger.flush()

    def _close(self) -> None:
        signal.set_wakeup_fd(-1)
        self._auditor.close(error=None if self._error is None else str(self._error))
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)  # stopped already: one more wish must not spoil the exit status
        self._writer.close()
        self._clock.close()
        self._app.close()
        self._messenger.close()
        control.withdraw(self._settings.folder)  # first: who is waiting for an answer looks there when it is cut off
        self._control.close()
        self._epoll.close()


def _earliest(*moments_ns: int | None) -> int | None:
    earliest_ns: int | None = None
    for moment_ns in moments_ns:
        if moment_ns is not None and (earliest_ns is None or moment_ns < earliest_ns):
            earliest_ns = moment_ns
    return earliest_ns


def limits_of(settings: InstanceSettings) -> Limits:
    tuning = settings.tuning
    return Limits(
        group_size_bytes=tuning.group_size_kib_max << 10,
        output_memory_bytes=tuning.peer_buffer_mib_max * MIB,
        spill_limit_bytes=settings.spill_limit_mb * MIB,
        peer_window_bytes=tuning.peer_window_kib_max << 10,
        receive_budget_bytes=tuning.receive_buffer_mib_max * MIB,
        log_limit_bytes=None if settings.log_limit_mb is None else settings.log_limit_mb * MIB,
        disk_free_bytes_min=settings.disk_free_mb * MIB,
        checkpoint_trigger_bytes=settings.log_trigger_mb * MIB,
        checkpoint_age_ns=None if settings.checkpoint_age_s is None else settings.checkpoint_age_s * 10**9,
        kills_max=settings.kills_before_verdict,
        replay_check=settings.replay_check,
        arguments_bytes_max=settings.rpc_limit_mb * MIB,
    )


def complete_upgrade(settings: InstanceSettings, registry: Registry, version: int) -> None:
    """The log is of ``version``: if that was asked for, nothing is asked for any more."""
    mark = upgrade_mark.read(settings.folder)
    if mark is None or mark.to != version:
        return
    if mark.app is not None:
        registry.remember_app(settings.name, mark.app)
    upgrade_mark.clear(settings.folder)


def upgrade_asked_for(settings: InstanceSettings, registry: Registry, store: LogStore) -> int | None:
    """The version that the next recovery is to end in. Raises UpgradeMarkError."""
    versions = store.summary().versions
    if versions:
        complete_upgrade(settings, registry, versions[-1].version)
    mark = upgrade_mark.read(settings.folder)
    return mark.to if mark is not None and mark.pending else None


def check_checkpoint(store: LogStore, header: CheckpointHeader) -> str | None:
    """What is wrong with the blob of ``header``'s checkpoint; None if it is what was written. Raises LogError."""
    size_bytes = check = index = 0
    while size_bytes < header.size_bytes:
        chunk = store.read_checkpoint_chunk(header.checkpoint_id, index)
        if not chunk:
            return f"it has {size_bytes} bytes, {header.size_bytes} were written"
        size_bytes += len(chunk)
        check = crc64(chunk, check)
        index += 1
    if size_bytes != header.size_bytes or check != header.check:
        return f"its check is {check:016x} over {size_bytes} bytes, {header.check:016x} was written"
    return None


def _serve_metrics(settings: InstanceSettings) -> None:
    """Raises ImmortalError."""
    try:
        from coordinator.metrics import Access, serve_metrics
    except ModuleNotFoundError:
        raise ImmortalError("metrics need prometheus-client: pip install 'immortal[metrics]'") from None
    access = Access(
        settings.metrics_token_file, settings.metrics_certificate_file, settings.metrics_key_file, settings.insecure
    )
    serve_metrics(settings.name, str(settings.metrics), lambda: control.query(settings.folder, "status"), access)


def run_coordinator(
    settings: InstanceSettings, registry: Registry, *, promote: bool = False, trust_pickle: bool = False
) -> int:
    """Open the log (a new one at the first start) and serve until stopped; the exit status.

    ``promote``: a recovered app begins to work without a checkpoint first. ``trust_pickle``: the log may be of another
    home, with states that pickle wrote.

    Raises ImmortalError for what keeps it from starting, and may be otherwise the next time.
    """
    registry.refuse_open_folder(settings.name)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    keep_freed_memory()
    descriptors.raise_limit()
    try:
        return _run_with_log(settings, registry, promote=promote, trust_pickle=trust_pickle)
    except (DamagedLogError, LogFormatError, LogIdentityError, LogKeyError, PickleRefusedError) as error:
        Events(settings.name).error(str(error))
        return STATUS_NO_RECOVERY


def _run_with_log(settings: InstanceSettings, registry: Registry, *, promote: bool, trust_pickle: bool) -> int:
    store = own_logs.open_log(settings)
    try:
        own_logs.take_for_own(settings, store, trust_pickle=trust_pickle)
        if store.macs is not None:
            marker = store.macs.marker
            first = marker.first_sequence_id
            Events(settings.name).info("the log is authenticated", key=marker.key_id, from_record=first or None)
        if (opened := tighten_log(settings.log)) is not None:
            Events(settings.name).warning(opened)
        for line in store.rebuilt:
            Events(settings.name).warning(line)
        upgrade_to = upgrade_asked_for(settings, registry, store)
        if settings.metrics is not None:
            _serve_metrics(settings)
        return Coordinator(settings, registry, store, Events(settings.name), upgrade_to, promote=promote).run()
    finally:
        store.close()
