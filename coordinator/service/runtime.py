"""Runtime of a coordinator: creates and connects its parts, and runs the loop that feeds its driver.

One thread waits for ready sockets and due times, and turns them into events; the driver does the rest (driver/turn.py).
The messenger's descriptor stands for all of ZeroMQ; small commits run inline, others on the log writer's thread.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec.structs import replace

from immortal.coordinator.app.endpoint import AppEndpoint, AppInterface
from immortal.coordinator.audit import AuditLog, Auditor
from immortal.coordinator.clock import TICK_NS, InstanceClock, earliest
from immortal.coordinator.config import Checkpoints, InstanceSettings
from immortal.coordinator.config.schema import KEEP_ALL_VARIABLE
from immortal.coordinator.core import effects as ef
from immortal.coordinator.core import events as ev
from immortal.coordinator.core.components import Components
from immortal.coordinator.core.errors import (
    DamagedLogError,
    DivergenceError,
    FencedError,
    LogFormatError,
    LogIdentityError,
    LogLockedError,
    LogLostError,
)
from immortal.coordinator.core.limits import MIB, Limits
from immortal.coordinator.core.machine import Machine
from immortal.coordinator.driver.turn import Driver
from immortal.coordinator.fault_points import FaultPoint, reach
from immortal.coordinator.instances import upgrade_mark
from immortal.coordinator.instances.own_logs import InstanceLog, PickleRefusedError
from immortal.coordinator.instances.registry import Registry
from immortal.coordinator.log.authentication import LogKeyError
from immortal.coordinator.log.store import RowLogStore
from immortal.coordinator.log_port.endpoint import LogEndpoint
from immortal.coordinator.log_port.writer import LogWriter
from immortal.coordinator.notices import Notices, Sink
from immortal.coordinator.notices.sinks import RateLimitedSink, ReadinessSink, SyncTimed
from immortal.coordinator.operator import control
from immortal.coordinator.operator.control_server import ControlServer
from immortal.coordinator.operator.verbs import OperatorEndpoint
from immortal.coordinator.peers.endpoint import PeerEndpoint
from immortal.coordinator.peers.keys import ensure_machine_keys
from immortal.coordinator.peers.security import insecurity_warning
from immortal.coordinator.service import process
from immortal.coordinator.service.process import STATUS_FENCED, STATUS_NO_RECOVERY, StopRequests
from immortal.protocol import compiled, distribution, kept_code
from immortal.protocol.errors import ImmortalError
from immortal.protocol.process import retain_freed_memory, trim_heap

if TYPE_CHECKING:
    from immortal.coordinator.log_port.follower import LogFollower
    from immortal.coordinator.service.timing_notes import TimingRecorder

STOP_TIMEOUT_S = 25.0  # for the last checkpoint; the supervisor waits 30
FAREWELL_TIMEOUT_S = 1.0  # for the last bytes to the app
SWITCH_INTERVAL_S = 0.0005  # how soon the commit thread gets the interpreter back; the default adds 5 ms per commit
_NO_RECOVERY = (
    DivergenceError,
    DamagedLogError,
    LogFormatError,
    LogIdentityError,
    LogKeyError,
    LogLostError,
    PickleRefusedError,
)
DAY_NS = 24 * 3600 * 10**9

MakeApp = Callable[["Coordinator", InstanceSettings, Notices, select.epoll], AppInterface]


class Coordinator:
    """Coordinator of one instance. :meth:`run` returns when it has stopped.

    ``store``: the log, open for writing; None: ``follow`` gives access to it, and another process can write it.
    ``lines``: sink for its lines. ``follower_settings``: settings with the addresses where the app and operators find
    it while it follows; None: those of the instance. ``make_app``: makes the app's side; by default sockets for another
    process.
    """

    def __init__(
        self,
        settings: InstanceSettings,
        registry: Registry,
        store: RowLogStore | None,
        lines: Sink,
        upgrade_to: int | None = None,
        *,
        promote: bool = False,
        follow: InstanceLog | None = None,
        follower_settings: InstanceSettings | None = None,
        make_app: MakeApp | None = None,
    ) -> None:
        if settings.sets_no_retention and os.environ.get(KEEP_ALL_VARIABLE):
            settings = replace(settings, keep_checkpoints=None)
        self._settings = settings
        self._local_settings = local_settings = follower_settings or settings
        self._registry = registry
        self._line_sink = RateLimitedSink(lines)
        self._metrics = None if settings.metrics is None else Metrics(settings)
        sinks: list[Sink] = [self._line_sink, ReadinessSink(self._on_ready)]
        if self._metrics is not None:
            sinks.insert(0, self._metrics.sink)  # a notice is counted before its line is written
        self._log = log = Notices(settings.name, *sinks)
        self._clock = InstanceClock(
            settings.folder,
            None if store is None else store.summary(),
            settings.tuning.clock_hold_s * 10**9,
            log,
            is_ours=store is not None,
        )
        self._machine = machine = Machine(
            Components(
                settings.name,
                limits_of(settings),
                upgrade_to,
                promote=promote,
                follow=follow is not None,
                permissions=settings.permissions,
                running=self._clock.running,
            )
        )
        if store is not None:
            with contextlib.suppress(OSError):
                kept_code.forget(settings.folder / kept_code.FOLDER_NAME, store.summary().first_sequence_id)
        self._is_the_instance = False  # this process listens at the instance's addresses
        self._was_ready = False  # an app was recovered, or started for the first time, in this process
        self._error: ImmortalError | None = None
        self._stop_requests = StopRequests()
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_fileno = self._wake_receiver.fileno()
        self._has_signals = False  # this object handles the process's signals
        self._stop_deadline_ns: int | None = None  # on the monotonic clock, as all that follows
        self._clock_due_ns = 0
        self._line_sink_due_ns: int | None = None
        self._control_due_ns: int | None = None
        self._peers_due_ns: int | None = None
        self._inbox: list[ev.Event] = []
        post = self._inbox.append
        self._timings = self._make_timings()
        self._epoll = select.epoll()
        self._app: AppInterface = (
            AppEndpoint(local_settings, log, self._epoll)
            if make_app is None
            else make_app(self, local_settings, log, self._epoll)
        )
        self._peers = PeerEndpoint(settings, registry, log, post if self._timings is None else self._post_timed)
        keep_ns = None if settings.log_days is None else settings.log_days * DAY_NS
        self._log_endpoint = LogEndpoint(
            store,
            self._make_writer,
            self._clock,
            log,
            keep_ns,
            self._inbox,
            None if follow is None else _follower(follow),
            self._log_granted,
        )
        self._auditor = Auditor(AuditLog(settings.folder, log.warning))
        self._control = ControlServer(local_settings.folder)
        self._operator = OperatorEndpoint(
            machine, self._app, self._peers, self._log_endpoint, self._clock, self._auditor, post, self.request_stop
        )
        self.peer_reset_done, self.operator_answered = self._operator.peer_reset_done, self._operator.operator_answered
        self._driver = Driver(
            machine,
            self._inbox,
            self._app,
            self._peers,
            self._log_endpoint,
            self._clock,
            self,
            None if self._timings is None else self._timings.observe,
        )
        self._peers_fileno, self._log_fileno = self._peers.fileno(), self._log_endpoint.fileno()
        self._control_fileno = self._control.fileno()
        self._epoll.register(self._control_fileno, select.EPOLLIN)

    def run(self) -> int:
        """Serve until stopped; return 0 after a clean stop, or log the error and return its exit status."""
        try:
            self._catch_signals()
            for descriptor in (self._peers_fileno, self._log_fileno, self._wake_fileno):
                self._epoll.register(descriptor, select.EPOLLIN)
            self._driver.start()
            self._app.listen()
            if self._machine.state.write_lease.writes:
                self._become_instance()
            else:
                control.announce(self._local_settings.folder, self._control.listen())
                self._log.info("coordinator started, to follow", **self._app.addresses)
            while not self._machine.stopped:
                self._poll()
                self._driver.turn()
                if not self._is_the_instance and self._machine.state.write_lease.writes:
                    self._become_instance()
            if not isinstance(self._error, FencedError):
                self._peers.flush(patient=False)  # the last answers, unless another process has the log
        finally:
            self._close()
        if self._error is not None:
            self._log.error(str(self._error))
            return status_of(self._error)
        if self._log_endpoint.successor:
            self._log.info("handed over", to=self._log_endpoint.successor)
            return STATUS_FENCED
        self._log.info("stopped")
        return 0

    def _become_instance(self) -> None:
        """Listen and announce at the instance's addresses, since this process writes the log now."""
        self._is_the_instance = True
        settings = self._settings
        self._peers.listen()
        if self._local_settings is not settings:
            self._epoll.unregister(self._control_fileno)
            control.withdraw(self._local_settings.folder)
            self._control.close()
            self._control = ControlServer(settings.folder)
            self._control_fileno = self._control.fileno()
            self._epoll.register(self._control_fileno, select.EPOLLIN)
            self._app.become_instance(settings)
        control.announce(settings.folder, self._control.listen())
        reach(FaultPoint.ANNOUNCED)
        if self._metrics is not None:
            self._metrics.serve(self._log)
        self._auditor.started(process=os.getpid(), user=os.geteuid(), insecure=settings.insecure)
        security = self._peers.security.security
        self._log.info(
            "coordinator started",
            peer=settings.peer,
            **self._app.addresses,
            encrypted=security is not None,
            runs=compiled.describe(),
            **{key: self._machine.view.status(self._clock.now_ns())[key] for key in ("committer_id", "sequence_id")},
        )
        if (warning := insecurity_warning(settings, security)) is not None:
            self._log.warning(warning)
        if self._was_ready:  # it became ready as a follower
            control.notify_ready()

    def _make_timings(self) -> TimingRecorder | None:
        limit_mb = self._settings.timings_limit_mb
        if not limit_mb:
            return None
        from immortal.coordinator.service.timing_notes import TimingRecorder

        return TimingRecorder(self._settings.folder, limit_mb * MIB // 2, self._log.warning)

    def _post_timed(self, event: ev.Event) -> None:
        if self._timings is not None:
            self._timings.on_event(event)
        self._inbox.append(event)

    def _make_writer(self, store: RowLogStore) -> LogWriter:
        times = None if self._metrics is None else self._metrics.sink
        if times is not None:
            store.backend.synced = lambda seconds: times.emit(SyncTimed(seconds))
        return LogWriter(
            store,
            keep_checkpoints=self._settings.keep_checkpoints,
            keep_bytes=None if self._settings.log_mib is None else self._settings.log_mib * MIB,
            inline_size_bytes_max=self._settings.tuning.commit_inline_kib_max << 10,
            times=times,
            on_committed=None if self._timings is None else self._timings.on_durable,
        )

    def _log_granted(self, store: RowLogStore) -> None:
        if self._local_settings is not self._settings:
            summary = store.summary()
            self._clock.take_over(summary)
            if summary.versions:  # another process may have done the requested upgrade
                complete_upgrade(self._settings, self._registry, summary.versions[-1].version)

    def _poll(self) -> None:
        """Wait until something is ready or due, and put the resulting events into the driver's inbox."""
        ready = dict(self._epoll.poll(self._timeout_s()))
        now_ns = time.monotonic_ns()
        inbox, app, peers = self._inbox, self._app, self._peers
        if self._log_fileno in ready:
            self._log_endpoint.collect()
        if self._wake_fileno in ready:
            self._wake_receiver.recv(64)
            self._check_stop()
        peers_ready = self._peers_fileno in ready
        if not (peers_ready and len(ready) == 1) or app.is_due(now_ns):
            inbox += app.process(ready)
        if self._machine.waits_for_app:
            inbox += app.pop_sent_events()
        peers_due = peers_ready or (self._peers_due_ns is not None and now_ns >= self._peers_due_ns)
        if peers_due and peers.process(now_ns, ready=peers_ready):
            peers.audit(self._auditor, self._machine.view.refusals, now_ns)
        if self._control_fileno in ready or (self._control_due_ns is not None and now_ns >= self._control_due_ns):
            self._operator.handle(self._control.process())
        self._log_endpoint.measure(now_ns)
        if self._line_sink_due_ns is not None and now_ns >= self._line_sink_due_ns:
            self._line_sink.process()
        if now_ns >= self._clock_due_ns:
            self._clock_due_ns = now_ns + TICK_NS
            self._clock.tick()
            self._log_endpoint.poll()
            inbox += self._clock.pop_events()
        inbox += self._clock.due_events(now_ns)
        if self._stop_deadline_ns is not None and now_ns > self._stop_deadline_ns:
            self._stop_without_checkpoint()

    def _timeout_s(self) -> float | None:
        if self._inbox:
            return 0
        self._peers_due_ns = self._peers.next_deadline_ns()
        self._line_sink_due_ns = self._line_sink.next_deadline_ns()
        self._control_due_ns = self._control.next_deadline_ns()
        due_ns = earliest(
            self._peers_due_ns,
            self._control_due_ns,
            self._line_sink_due_ns,
            self._app.next_deadline_ns(),
            self._stop_deadline_ns,
            self._clock.wake_due_ns,
            self._clock_due_ns,
            self._log_endpoint.measure_at_ns if self._machine.state.log_capacity.full_reason else None,
        )
        return None if due_ns is None else max(0, due_ns - time.monotonic_ns()) / 1e9

    # --- the driver's port to the runtime ----------------------------------------------------------------------------

    def upgrade_ended(self, effect: ef.UpgradeEnded) -> None:
        if effect.problem is None:
            complete_upgrade(self._settings, self._registry, effect.version)
        else:
            upgrade_mark.mark_failed(self._settings.folder, effect.problem)

    def report(self, effect: ef.Report) -> None:
        self._log.emit(effect.notice)

    def _on_ready(self) -> None:
        if not self._was_ready:
            trim_heap()
        self._was_ready = True
        if self._is_the_instance:
            control.notify_ready()

    def stop(self, effect: ef.Stop) -> None:
        reach(FaultPoint.STOPPING)
        self._error = effect.error

    # --- the end -----------------------------------------------------------------------------------------------------

    def request_stop(self) -> None:
        """Request a clean stop; a second request stops at once. For any thread and for signal handlers."""
        self._stop_requests.signalled()
        with contextlib.suppress(OSError):  # a full pipe wakes the loop anyway
            self._wake_sender.send(b"\0")

    def _catch_signals(self) -> None:
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self._has_signals = threading.current_thread() is threading.main_thread()
        if self._has_signals:
            signal.set_wakeup_fd(self._wake_sender.fileno(), warn_on_full_buffer=False)
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, self._signalled)

    def _signalled(self, number: int, frame: object) -> None:
        self.request_stop()
        if self._stop_requests.count > 1 and self._app.is_handling:
            os._exit(128 + number)  # a handler in this thread does not return: end as by a crash

    def _check_stop(self) -> None:
        if not self._stop_requests.count:
            return
        if self._stop_deadline_ns is None:
            self._stop_deadline_ns = time.monotonic_ns() + int(STOP_TIMEOUT_S * 1e9)
            hands_over = any(standby.is_ready for standby in self._log_endpoint.standbys)
            self._inbox.append(ev.StopRequested(hands_over))
        if self._stop_requests.count > 1:
            self._stop_deadline_ns = 0  # at once

    def _stop_without_checkpoint(self) -> None:
        at = self._machine.view.long_handler_text(self._clock.now_ns())
        late = f"the app gave no checkpoint in time{f' (it is {at})' if at else ''}"
        self._log.warning(f"{late}; stopping without one: the log has everything")
        self._machine.stopped = True

    def _close(self) -> None:
        """Close everything. A successor's needs are first: the address, then the files, then the log."""
        if self._has_signals:
            signal.set_wakeup_fd(-1)
        if self._is_the_instance:
            self._auditor.close(error=None if self._error is None else str(self._error))
        for number in (signal.SIGTERM, signal.SIGINT) if self._has_signals else ():
            signal.signal(number, signal.SIG_IGN)  # one more signal must not change the exit status
        self._peers.close()
        # Withdraw the files before the socket closes: a client that loses its connection reads them
        for each in (self._settings, self._local_settings):
            control.withdraw(each.folder)
        self._control.close()
        self._clock.close()
        self._log_endpoint.close()
        if self._local_settings is not self._settings and self._log_endpoint.store is not None:
            self._log_endpoint.store.close()
        if self._timings is not None:
            self._timings.close()
        if self._machine.stopped:
            self._app.drain(FAREWELL_TIMEOUT_S)
        self._app.close()
        self._epoll.close()
        self._wake_receiver.close()
        self._wake_sender.close()


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
        checkpoints_on_standby=settings.checkpoints is Checkpoints.ON_STANDBY,
        kills_max=settings.kills_before_verdict,
        replay_check=settings.replay_check,
        arguments_bytes_max=settings.rpc_limit_mb * MIB,
        nesting_max=settings.nesting_max,
    )


def complete_upgrade(settings: InstanceSettings, registry: Registry, version: int) -> None:
    """Clear the upgrade mark if it requests ``version``, which the log has now."""
    mark = upgrade_mark.read(settings.folder)
    if mark is None or mark.to != version:
        return
    if mark.app is not None:
        registry.remember_app(settings.name, mark.app)
    upgrade_mark.clear(settings.folder)


def requested_upgrade(settings: InstanceSettings, registry: Registry, store: RowLogStore) -> int | None:
    """Return the version to which the next recovery must upgrade; None for none. Raises UpgradeMarkError."""
    versions = store.summary().versions
    if versions:
        complete_upgrade(settings, registry, versions[-1].version)
    return _pending_version(settings)


def _pending_version(settings: InstanceSettings) -> int | None:
    mark = upgrade_mark.read(settings.folder)
    return mark.to if mark is not None and mark.pending else None


def _follower(places: InstanceLog) -> LogFollower:
    from immortal.coordinator.log_port.follower import LogFollower  # here: only followers need a reader of logs

    return LogFollower(places)


class Metrics:
    """Prometheus metrics of a coordinator, from its status and the notices of ``sink``. Raises ImmortalError."""

    def __init__(self, settings: InstanceSettings) -> None:
        try:
            from prometheus_client import CollectorRegistry

            from immortal.coordinator.notices.metrics import ExecutionWait, NoticeMetrics, StatusCollector
        except ModuleNotFoundError:
            raise ImmortalError(f"metrics need prometheus-client: {distribution.add_extra('metrics')}") from None
        self._settings = settings
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(StatusCollector(settings.name, lambda: control.query(settings.folder, "status")))
        self.sink: Sink = NoticeMetrics(settings.name, self._registry)
        self._execution_wait = ExecutionWait(
            settings.name,
            self._registry,
            lambda verb, argument, timeout_s: control.query(settings.folder, verb, timeout_s, argument=argument),
        )

    def serve(self, log: Notices) -> None:
        """Serve the metrics at the address of the settings. Raises MetricsError."""
        from immortal.coordinator.notices.metrics_server import Access, serve_metrics

        settings = self._settings
        access = Access(
            settings.metrics_token_file, settings.metrics_certificate_file, settings.metrics_key_file, settings.insecure
        )
        serve_metrics(log, str(settings.metrics), self._registry, access)
        self._execution_wait.start()


ARENAS_MAX = 2  # of a coordinator alone in its process: by default each thread has one, with free memory of its own


def status_of(error: ImmortalError) -> int:
    """Return the exit status of a coordinator that ended with ``error``."""
    if isinstance(error, FencedError):
        return STATUS_FENCED
    return STATUS_NO_RECOVERY if isinstance(error, _NO_RECOVERY) else 1


def run_coordinator(
    settings: InstanceSettings,
    registry: Registry,
    log: Notices,
    *,
    promote: bool = False,
    trust_pickle: bool = False,
    follower_settings: InstanceSettings | None = None,
    make_app: MakeApp | None = None,
) -> int:
    """Open the log (a new one at the first start) and serve until stopped; return the exit status.

    ``log``: sink for its lines. ``promote``: a recovered app begins to work without a checkpoint first.
    ``trust_pickle``: the log can be of another home, with states that pickle wrote. ``follower_settings``: follow the
    log while another process writes it (coordinator/instances/registry.py). ``make_app``: see :class:`Coordinator`.

    Raises ImmortalError if it can't start; a later start can succeed.
    """
    registry.refuse_open_folder(settings.name)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    retain_freed_memory(ARENAS_MAX if make_app is None else None)
    process.raise_descriptor_limit()
    ensure_machine_keys(settings, registry)
    with registry.synchronized():
        instance_log = InstanceLog(settings, log, trust_pickle=trust_pickle)
        try:
            if follower_settings is not None:
                # Done as it takes over, unless the log has that version by then.
                upgrade_to = _pending_version(settings)
                return Coordinator(
                    settings,
                    registry,
                    None,
                    log,
                    upgrade_to,
                    promote=promote,
                    follow=instance_log,
                    follower_settings=follower_settings,
                ).run()
            store = instance_log.open_store()
            try:
                upgrade_to = requested_upgrade(settings, registry, store)
                return Coordinator(settings, registry, store, log, upgrade_to, promote=promote, make_app=make_app).run()
            finally:
                store.close()
        except _NO_RECOVERY as error:
            log.error(str(error))
            return STATUS_NO_RECOVERY
        except LogLockedError as error:
            if not instance_log.is_shared:
                raise
            log.error(str(error))
            return STATUS_FENCED
