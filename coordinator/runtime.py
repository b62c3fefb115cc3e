"""A running coordinator: its parts put together, and the loop that feeds its driver.

One thread. It waits for what is ready or due, and takes all of it in; the driver does the rest (driver/turn.py). ZeroMQ
is drained through the messenger's descriptor; commits run inline when small, else on the log writer's thread.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time

from coordinator import control, descriptors, own_logs, upgrade_mark
from coordinator.app_endpoint import AppEndpoint
from coordinator.audit import AuditLog
from coordinator.auditor import Auditor
from coordinator.clock import LOOK_NS, InstanceClock
from coordinator.config import InstanceSettings
from coordinator.control_server import ControlServer
from coordinator.core import effects as ef
from coordinator.core import events as ev
from coordinator.core.errors import DamagedLogError, DivergenceError, LogFormatError, LogIdentityError
from coordinator.core.interfaces import LogStore
from coordinator.core.limits import MIB, Limits
from coordinator.core.machine import Machine
from coordinator.driver.turn import Driver
from coordinator.earliest import earliest
from coordinator.fault_points import FaultPoint, reach
from coordinator.foreign_state import PickleRefusedError
from coordinator.limited_log import LimitedLog
from coordinator.log.authentication import LogKeyError
from coordinator.log.open import place_of
from coordinator.log_endpoint import LogEndpoint
from coordinator.log_writer import LogWriter
from coordinator.logs import Events
from coordinator.operator_endpoint import OperatorEndpoint
from coordinator.peer_endpoint import PeerEndpoint
from coordinator.peer_security import insecurity
from coordinator.registry import Registry
from coordinator.stop_requests import StopRequests
from protocol import compiled
from protocol.allocator import keep_freed_memory
from protocol.errors import ImmortalError

STOP_TIMEOUT_S = 25.0  # for the last checkpoint; the supervisor waits 30
FAREWELL_TIMEOUT_S = 1.0  # for the last bytes to the app
SWITCH_INTERVAL_S = 0.0005  # the commit thread gets the interpreter back this soon: 5 ms would be 5 ms per commit
STATUS_NO_RECOVERY = 3  # the log can't be replayed as it is: the next start would find the same
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
        self._log = log
        self._limited = LimitedLog(log)  # what others can cause
        summary = store.summary()
        self._clock = InstanceClock(settings.folder, summary, settings.tuning.clock_hold_s * 10**9, log)
        self._machine = machine = Machine(
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
        self._error: ImmortalError | None = None
        self._was_ready = False  # an app was recovered, or begun, in this process
        self._stop_requests = StopRequests()
        self._stop_deadline_ns: int | None = None  # on the monotonic clock, as all that follows
        self._clock_due_ns = 0
        self._limited_due_ns: int | None = None
        self._control_due_ns: int | None = None
        self._peers_due_ns: int | None = None
        self._inbox: list[ev.Event] = []
        post = self._inbox.append
        self._epoll = select.epoll()
        self._app = AppEndpoint(settings, log, self._epoll)
        self._peers = PeerEndpoint(settings, registry, log, self._limited, post)
        writer = LogWriter(
            store,
            keep_checkpoints=settings.keep_checkpoints,
            inline_size_bytes_max=settings.tuning.commit_inline_kib_max << 10,
        )
        keep_ns = None if settings.keep_log_days is None else settings.keep_log_days * DAY_NS
        self._log_endpoint = LogEndpoint(store, writer, self._clock, log, keep_ns, self._inbox)
        self._auditor = Auditor(AuditLog(settings.folder, log.warning))
        self._control = ControlServer(settings.folder)
        self._operator = OperatorEndpoint(
            machine, self._app, self._peers, store, writer, self._clock, self._auditor, post
        )
        self.peer_reset_done, self.operator_answered = self._operator.peer_reset_done, self._operator.operator_answered
        self._driver = Driver(machine, self._inbox, self._app, self._peers, self._log_endpoint, self._clock, self)
        self._peers_fileno, self._log_fileno = self._peers.fileno(), self._log_endpoint.fileno()
        self._control_fileno = self._control.fileno()
        self._epoll.register(self._control_fileno, select.EPOLLIN)

    def run(self) -> int:
        """Serve until stopped: 0 after a clean stop; after an error, which has been logged, 1 or STATUS_NO_RECOVERY."""
        settings = self._settings
        try:
            self._app.listen()
            self._peers.listen()
            control_path = self._control.listen()
            self._wake_receiver, self._wake_sender = socket.socketpair()
            self._catch_signals()
            self._wake_fileno = self._wake_receiver.fileno()
            for descriptor in (self._peers_fileno, self._log_fileno, self._wake_fileno):
                self._epoll.register(descriptor, select.EPOLLIN)
            control.announce(settings.folder, control_path)
            reach(FaultPoint.ANNOUNCED)
            self._auditor.started(process=os.getpid(), user=os.geteuid(), insecure=settings.insecure)
            security = self._peers.security.security
            self._log.info(
                "coordinator started",
                peer=settings.peer,
                app=settings.app_address,
                app_socket=settings.app_unix_address,
                app_send=settings.app_send_address,
                app_send_mode=settings.app_send_mode if settings.app_send_port is not None else None,
                encrypted=security is not None,
                runs=compiled.describe(),
                **{key: self._machine.status(self._clock.now_ns())[key] for key in ("committer_id", "sequence_id")},
            )
            if (warning := insecurity(settings, security)) is not None:
                self._log.warning(warning)
            while not self._machine.stopped:
                self._take_in()
                self._driver.turn()
            self._say_farewell()
        finally:
            self._close()
        if self._error is not None:
            self._log.error(str(self._error))
            return STATUS_NO_RECOVERY if isinstance(self._error, DivergenceError | DamagedLogError) else 1
        self._log.info("stopped")
        return 0

    def _take_in(self) -> None:
        """Wait until something is ready or due, and put what comes of it into the driver's inbox."""
        ready = dict(self._epoll.poll(self._timeout_s()))
        now_ns = time.monotonic_ns()
        inbox, app, peers = self._inbox, self._app, self._peers
        if self._log_fileno in ready:
            self._log_endpoint.collect()
        if self._wake_fileno in ready:
            self._wake_receiver.recv(64)
        peers_ready = self._peers_fileno in ready
        if not (peers_ready and len(ready) == 1) or app.is_due(now_ns):
            inbox += app.process(ready)
        if self._machine.waits_for_app:
            inbox += app.take_sent()
        peers_due = peers_ready or (self._peers_due_ns is not None and now_ns >= self._peers_due_ns)
        if peers_due and peers.process(now_ns, ready=peers_ready):
            peers.audit(self._auditor, self._machine.forbidden, self._machine.held_back, now_ns)
        if self._control_fileno in ready or (self._control_due_ns is not None and now_ns >= self._control_due_ns):
            self._operator.take(self._control.process())
        self._log_endpoint.measure(now_ns)
        if self._limited_due_ns is not None and now_ns >= self._limited_due_ns:
            self._limited.process()
        if now_ns >= self._clock_due_ns:
            self._clock_due_ns = now_ns + LOOK_NS
            self._clock.look()
            inbox += self._clock.take_events()
        inbox += self._clock.take_due(now_ns)
        if self._stop_deadline_ns is not None and now_ns > self._stop_deadline_ns:
            self._stop_late()

    def _timeout_s(self) -> float | None:
        if self._inbox:
            return 0
        self._peers_due_ns = self._peers.next_deadline_ns()
        self._limited_due_ns = self._limited.next_deadline_ns()
        self._control_due_ns = self._control.next_deadline_ns()
        due_ns = earliest(
            self._peers_due_ns,
            self._control_due_ns,
            self._limited_due_ns,
            self._app.next_deadline_ns(),
            self._stop_deadline_ns,
            self._clock.wake_due_ns,
            self._clock_due_ns,
            self._log_endpoint.measure_at_ns if self._machine.waits_for_room else None,
        )
        return None if due_ns is None else max(0, due_ns - time.monotonic_ns()) / 1e9

    # --- what the driver has for who runs the coordinator ------------------------------------------------------------

    def upgrade_ended(self, effect: ef.UpgradeEnded) -> None:
        if effect.problem is None:
            complete_upgrade(self._settings, self._registry, effect.version)
        else:
            upgrade_mark.give_up(self._settings.folder, effect.problem)

    def report(self, effect: ef.Report) -> None:
        if effect.kind or effect.level in ("warning", "error"):
            kind = (effect.kind or effect.message, effect.fields.get("peer"))
            self._limited.log(effect.level, effect.message, kind=kind, **effect.fields)
        else:
            getattr(self._log, effect.level)(effect.message, **effect.fields)
        began = effect.message == "checkpoint taken" and effect.level == "info" and not self._was_ready
        if effect.message == "recovered" or began:
            self._was_ready = True
            control.report_ready()

    def stop(self, effect: ef.Stop) -> None:
        reach(FaultPoint.STOPPING)
        self._error = effect.error

    # --- the end -----------------------------------------------------------------------------------------------------

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
            self._inbox.append(ev.StopRequested())
        elif self._stop_requests.count > 1:
            self._stop_deadline_ns = 0  # at once

    def _stop_late(self) -> None:
        at = self._machine.handling_in_words(self._clock.now_ns())
        late = f"the app gave no checkpoint in time{f' (it is {at})' if at else ''}"
        self._log.warning(f"{late}; stopping without one: the log has everything")
        self._machine.stopped = True

    def _say_farewell(self) -> None:
        """Let the last bytes reach the app and the last answers the peers."""
        self._app.drain(FAREWELL_TIMEOUT_S)
        self._peers.flush(patient=False)

    def _close(self) -> None:
        signal.set_wakeup_fd(-1)
        self._auditor.close(error=None if self._error is None else str(self._error))
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)  # stopped already: one more wish must not spoil the exit status
        self._log_endpoint.close()
        self._clock.close()
        self._app.close()
        self._peers.close()
        control.withdraw(self._settings.folder)  # first: who is waiting for an answer looks there when it is cut off
        self._control.close()
        self._epoll.close()


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
        if (opened := place_of(settings.log).make_private()) is not None:
            Events(settings.name).warning(opened)
        for line in store.rebuilt:
            Events(settings.name).warning(line)
        upgrade_to = upgrade_asked_for(settings, registry, store)
        if settings.metrics is not None:
            _serve_metrics(settings)
        return Coordinator(settings, registry, store, Events(settings.name), upgrade_to, promote=promote).run()
    finally:
        store.close()
