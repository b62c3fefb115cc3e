"""Replay with a real app: its process, its socket and the log, each read only as fast as the others keep up.

:class:`LocalRun` replays with the app in this process.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

from msgspec import structs

from immortal.appsdk.calls.context import SEED_SIZE_BYTES, Context
from immortal.appsdk.dispatch.delivery import Delivery
from immortal.appsdk.handlers.definition import Definition
from immortal.appsdk.running.local_app import LocalApp
from immortal.coordinator.app import secret as app_secret
from immortal.coordinator.app.authenticator import AppAuthenticator
from immortal.coordinator.app.sockets import AppConnection, AppListener, listen_unix, prepare
from immortal.coordinator.config import AppAuth, AppSendMode, InstanceSettings
from immortal.coordinator.config.socket_addresses import IPV4_LOOPBACK, SHORT_FOLDERS, SOCKET_FILE_NAME, UNIX, host_port
from immortal.coordinator.core.interfaces import LogSummary
from immortal.coordinator.instances.own_logs import refuse_pickle
from immortal.coordinator.instances.registry import free_port
from immortal.coordinator.log.reader import RecordSource
from immortal.coordinator.notices import warnings_on_stderr
from immortal.protocol import personal_keys
from immortal.protocol.checksum import crc64
from immortal.protocol.record import decode_header
from immortal.protocol.trailer import decode_trailer
from immortal.protocol.verdicts import Verdict
from immortal.replay.app_process import (
    LEAVE_S,
    AppCommand,
    AppProcess,
    exit_text,
    forgotten_file,
    forgotten_notes,
    read_code,
)
from immortal.replay.plan import AppExitedError, ReplayError, ReplayPlan, Route, plan_route, route_until
from immortal.replay.result import ReplayResult, Sink
from immortal.replay.session import BlobPiece, Ended, Event, ReplaySession, VerdictFilter, VerdictGiven

APP_WINDOW_SIZE_BYTES = 4 << 20  # handed over for the app and not yet accepted by its socket
CONNECT_TIMEOUT_S = 60.0  # for an app that was started, at least: its module can load much
FOLLOW_DELAY_S = 0.05  # between two checks for more at the end of the log
PROGRESS_DELAY_S = 0.1
SILENCE_S = 2.0  # of an app that has received all and does not report when it has handled it


def run_replay(
    source: RecordSource,
    plan: ReplayPlan | Route,
    app: AppCommand,
    sink: Sink,
    *,
    blob_path: Path | None = None,
    progress: Callable[[int, int | None], None] | None = None,
    stop: Callable[[], bool] = lambda: False,
    announce: Callable[[str], None] = lambda address: None,
    numbers: Callable[[int], Sequence[bytes] | None] | None = None,
    sends_verdict: VerdictFilter = lambda verdict: True,
) -> ReplayResult:
    """Replay ``plan`` of the log ``source`` with ``app``, and pass its outputs to ``sink``.

    ``plan`` can be the route that :func:`plan_route` returned for this log. One thread runs a replay; other threads can
    run others (share the reader with :class:`SharedSource`). ``blob_path``: a file for the state at the end.
    ``progress(records, total)`` is called regularly; ``total`` is None if there is no end. ``stop()`` is called
    regularly; True ends the replay at the record reached.
    ``announce(where)``: receives where, and how, an app started by hand must connect. ``numbers(sequence_id)``: returns
    messages for the app before that record, with numbers that another run drew; None: not known yet.
    ``sends_verdict(verdict)``: True if the app gets this verdict of the log and skips the message; else it handles the
    message again.

    A handler that raises is no error: the result's ``news`` or ``failure`` has it. Raises ReplayError (this log does
    not allow the plan), AppExitedError, UpgradeFailedError, RemoteProtocolError (the app breaks the protocol), LogError
    (damage, or records that were trimmed meanwhile), and the sink's errors. The app's process is ended in any case.
    """
    summary = source.summary()
    route = plan_route(plan, source, summary) if isinstance(plan, ReplayPlan) else plan
    refuse_pickle(source, [route.checkpoint.checkpoint_id])
    with ExitStack() as stack:
        code_notes = Path(stack.enter_context(TemporaryDirectory(prefix="immortal-code-"))) / "notes"
        if app.settings is not None and app.settings.app_send_port is not None:
            process, connection, said = None, accept_two_ports(app.settings, app.ports, announce, stop, stack), b""
        else:
            process, connection, said = _start_app(source, app, announce, stop, stack, code_notes)
        stack.callback(connection.close)
        sink.forgotten = partial(personal_keys.read_notes, forgotten_file(code_notes))
        sink.code(read_code(app.name, code_notes))
        blob_file = stack.enter_context(blob_path.open("wb")) if blob_path is not None else None
        host = _Host(source, summary, route, app, process, connection, said, sink, blob_file, numbers, sends_verdict)
        try:
            host.run(progress or (lambda records, total: None), stop)
        except AppExitedError as error:
            error.fed_sequence_id, error.sequence_id = host.fed_sequence_id, host.hangs_at
            raise
        host.result.code = read_code(app.name, code_notes)
        host.result.forgotten = forgotten_notes(sink.forgotten())
    result = host.result
    result.find_new_failures(source)
    if process is not None:
        result.exit_status = process.exit_status
        result.stderr_head, result.stderr_tail = process.head, process.tail
    result.blob_path = blob_path if result.blob_check is not None else None
    return result


def find_end(
    source: RecordSource,
    route: Route,
    app: AppCommand,
    error: AppExitedError,
    announce: Callable[[str], None] = lambda address: None,
    sends_verdict: VerdictFilter = lambda verdict: True,
) -> AppExitedError:
    """Find the record at which ``app`` ends, after it ended on ``route`` with ``error``, by shorter replays.

    The app receives records before it has handled earlier ones, and reports no progress. An app started by hand is
    requested only once more, for a replay without the last record.
    """

    def survives(sequence_id: int) -> bool:
        nonlocal error
        try:
            run_replay(
                source, route_until(route, sequence_id), app, Sink(), announce=announce, sends_verdict=sends_verdict
            )
        except AppExitedError as found:
            error = found
            return False
        return True

    begin = route.checkpoint.sequence_id
    alive, ended = begin - 1, error.fed_sequence_id
    tried = ended - 1  # then the checkpoint itself, since most apps that can't start end at it
    if error.sequence_id is not None:  # the app has told where it hangs
        alive, ended = error.sequence_id - 1, error.sequence_id
    while alive < tried < ended:
        if survives(tried):
            alive = tried
        else:
            ended = tried
        tried = ended if app.by_hand else begin if alive < begin else (alive + ended) // 2
    if ended > begin:
        error.sequence_id = ended if alive == ended - 1 else None
        until = "" if alive == ended - 1 else ", or one before it"
        front, said, rest = str(error).partition("; it said:")
        error.args = (f"{front} (at record {ended}{until}; --to {ended - 1} ends before it){said}{rest}",)
    return error


def _start_app(
    source: RecordSource,
    app: AppCommand,
    announce: Callable[[str], None],
    stop: Callable[[], bool],
    stack: ExitStack,
    code_notes: Path,
) -> tuple[AppProcess | None, AppConnection, bytes]:
    """Return the app's process (None if it was started by hand), its connection, and the bytes received so far."""
    auth = AppAuth.CHALLENGE if app.settings is None else app.settings.app_auth
    process = gate = None
    epoll = stack.enter_context(select.epoll())
    # As in service, an app that can't answer a challenge can know only ports.
    is_port_known = app.settings is not None and app.settings.app_port is not None and auth is not AppAuth.CHALLENGE
    port, send_port = app.ports or (0, None)
    if send_port is not None:
        raise ReplayError(f"port {send_port} is a send port, and the app of this instance has one port for both ways")
    folder = Path(stack.enter_context(TemporaryDirectory(prefix="immortal-replay-", dir=SHORT_FOLDERS)))  # for us alone
    if is_port_known or port:
        try:
            listener = stack.enter_context(socket.create_server((IPV4_LOOPBACK, port)))
        except OSError as error:
            raise ReplayError(
                f"can't wait for the app at {host_port(IPV4_LOOPBACK, port)}: {error.strerror}; stop what uses this"
                " port (the instance's own coordinator, say), or give another one"
            ) from None
        address = host_port(*listener.getsockname())
    else:
        path = folder / SOCKET_FILE_NAME
        listener = stack.enter_context(listen_unix(path, source.identity.instance_name))
        address = f"{UNIX}{path}"
    how = address
    if auth is not AppAuth.NONE:
        secret_file = app_secret.path(folder)
        allow_secret = auth is AppAuth.SECRET
        secret = app_secret.create(folder)
        gate = AppAuthenticator(
            source.identity.instance_name, secret, warnings_on_stderr("replay"), epoll, allow_secret=allow_secret
        )
        stack.callback(gate.close)
        how += f" (IMMORTAL_APP_ADDRESS={address} {app_secret.SECRET_FILE_VARIABLE}={secret_file})"
        if not app.by_hand:
            process = AppProcess(app, address, secret_file, code_notes)
            stack.callback(process.close)
    if app.by_hand:
        announce(how)
    connection, said = _accept(listener, gate, epoll, process, app, stop)
    return process, connection, said


def _accept(
    listener: socket.socket,
    gate: AppAuthenticator | None,
    epoll: select.epoll,
    process: AppProcess | None,
    app: AppCommand,
    stop: Callable[[], bool],
) -> tuple[AppConnection, bytes]:
    """Return the app's connection and the bytes received so far: with a ``gate``, a Hello. ``epoll`` has its sockets.

    Raises AppExitedError, ReplayError.
    """
    limit_s = max(CONNECT_TIMEOUT_S, app.handler_limit_s)
    deadline_s = None if process is None or app.foreground else time.monotonic() + limit_s
    while True:
        if deadline_s is not None and time.monotonic() > deadline_s:
            raise ReplayError(
                f"the app {app.name} did not connect within {limit_s:g} s: its module hangs when it is imported, or"
                " needs more time (--handler-limit)"
            )
        if stop():
            raise ReplayError("stopped before an app had connected")
        ready = _poll({listener.fileno(): select.POLLIN, epoll.fileno(): select.POLLIN}, process, PROGRESS_DELAY_S)
        if listener.fileno() in ready:
            accepted, _ = listener.accept()
            prepare(accepted)
            connection = AppConnection(accepted)
            if gate is None:
                return connection, b""
            gate.admit(connection)
        if gate is not None and (admitted := gate.process(dict(epoll.poll(0)))) is not None:
            return admitted
        if process is not None and process.exit_status is not None:
            raise _died(process, app)


def _poll(interest: dict[int, int], process: AppProcess | None, timeout_s: float) -> dict[int, int]:
    """Wait for one of the descriptors, or for output (which is read) or death of the process."""
    poller = select.poll()
    for descriptor, events in interest.items():
        poller.register(descriptor, events)
    if process is not None:
        for descriptor in process.descriptors:
            poller.register(descriptor, select.POLLIN)
    ready = dict(poller.poll(timeout_s * 1000 + 1))
    if process is not None:
        process.read_output()
    return ready


def _died(process: AppProcess, app: AppCommand) -> AppExitedError:
    exit_status = process.wait(LEAVE_S)
    process.read_output()
    ended = "closed its connection" if exit_status is None else f"ended with {exit_text(exit_status)}"
    said = "".join(f"\n  {line}" for line in process.tail.rstrip("\n").split("\n") if line)
    return AppExitedError(
        f"the app {app.name} {ended} before the replay was complete{'; it said:' if said else ''}{said}", exit_status
    )


@dataclass(eq=False)
class _Host:
    _source: RecordSource
    _summary: LogSummary
    _route: Route
    _app: AppCommand
    _process: AppProcess | None
    _connection: AppConnection
    _first_data: bytes  # received from the app so far
    _sink: Sink
    _blob_file: BinaryIO | None
    _numbers: Callable[[int], Sequence[bytes] | None] | None
    _sends_verdict: VerdictFilter

    def __post_init__(self) -> None:
        source, route = self._source, self._route
        self._blob_size_bytes = self._blob_check = 0
        self._session = ReplaySession(
            source.identity.instance_name,
            self._summary,
            route,
            self._sends_verdict,
            rpc_limit_mib=self._app.rpc_limit_mib,
        )
        self._known_sequence_id = self._summary.last_sequence_id  # the verdicts up to this record are known
        self._blob = source.checkpoint_chunks(route.checkpoint.checkpoint_id)
        self._values: Iterator[bytes] | None = None
        self._unsent_size_bytes = 0
        self._ended: Ended | None = None
        self._next_read_s = self._last_received_s = 0.0
        self._is_stateless = False  # True: the app was not asked for its state
        first = route.checkpoint.sequence_id + 1
        self.result = ReplayResult(route.checkpoint, first, first - 1, notes=route.notes)

    @property
    def fed_sequence_id(self) -> int:
        return self._session.fed_sequence_id

    @property
    def hangs_at(self) -> int | None:
        """Record with the handler that has reached the app's limit; None: none has."""
        handling, limit_s = self._session.handling, self._app.handler_limit_s
        return handling.sequence_id if handling.for_s >= limit_s > 0 and handling.sequence_id >= 0 else None

    def run(self, progress: Callable[[int, int | None], None], stop: Callable[[], bool]) -> None:
        started_s = time.monotonic()
        for event in (*self._session.start(), *self._session.receive(self._first_data)):
            self._handle_event(event)
        progress_s = started_s
        while self._ended is None:
            if stop():
                self._session.end_here()
            waits = self._feed()
            self._poll_app(waits)
            now_s = time.monotonic()
            if self._unsent_size_bytes or not self._session.ends_by_silence:
                self._last_received_s = now_s
            elif now_s - self._last_received_s >= SILENCE_S:
                self._is_stateless = True
                self._handle_event(self._session.was_silent())
            if now_s - progress_s >= PROGRESS_DELAY_S:
                progress_s = now_s
                progress(self._session.records, self._route.record_count)
        progress(self._session.records, self._route.record_count)
        self._fill_result(time.monotonic() - started_s)
        self._close_app()

    def _fill_result(self, duration_s: float) -> None:
        session, result = self._session, self.result
        result.last_sequence_id = session.fed_sequence_id
        result.records, result.messages = session.records, session.messages
        result.duration_s = duration_s
        result.flushed = session.app_flushes
        result.description, result.label = session.description, session.label
        result.failure = self._ended.failure if self._ended else None
        if result.failure is None and not self._is_stateless:
            result.blob_size_bytes, result.blob_check = self._blob_size_bytes, self._blob_check

    # --- the log to the app -----------------------------------------------------------------------------------------

    def _feed(self) -> bool:
        """Send the app all that it wants and has room for; return True if it waits for a record not logged yet."""
        session = self._session
        waits = False
        while True:
            for data in session.data_to_send():
                self._unsent_size_bytes += len(data)
                self._connection.send(data)
            if self._unsent_size_bytes >= APP_WINDOW_SIZE_BYTES:
                break
            if session.wants_blob:
                if (chunk := next(self._blob, None)) is None:
                    session.blob_is_complete()
                else:
                    session.give_blob(chunk)
            elif session.wants_records and not waits:
                waits = not self._give_record()
            else:
                break
        self._unsent_size_bytes -= self._connection.flush()
        return waits

    def _give_record(self) -> bool:
        """Give the app the next record; return False if there is none yet, or its numbers are not known yet."""
        if self._numbers is not None:
            numbers = self._numbers(self._session.fed_sequence_id + 1)
            if numbers is None:
                return False
            self._session.give_numbers(numbers)
        value = self._next_value()
        if value is None:
            return False
        header = decode_header(value)
        trailer = decode_trailer(value[header.size_bytes :], header.check)
        if header.sequence_id > self._known_sequence_id:
            summary = self._source.summary()
            self._known_sequence_id = summary.last_sequence_id
            self._session.give_verdicts(summary.verdicts)
        self._sink.record(header.sequence_id, value, trailer)
        self._session.give_record(value, trailer)
        return True

    def _next_value(self) -> bytes | None:
        if self._values is None:
            if time.monotonic() < self._next_read_s:
                return None
            self._values = self._source.values(self._session.fed_sequence_id + 1, self._route.last_sequence_id)
        value = next(self._values, None)
        if value is None:
            self._values = None
            self._next_read_s = time.monotonic() + FOLLOW_DELAY_S
        return value

    # --- the app to the sink ----------------------------------------------------------------------------------------

    def _poll_app(self, waits: bool) -> None:
        """Wait until something can be done, and process what arrived."""
        connection, process = self._connection, self._process
        interest = select.POLLIN | (select.POLLOUT if connection.has_waiting else 0)
        timeout_s = FOLLOW_DELAY_S if waits else PROGRESS_DELAY_S
        happened = _poll({connection.receiver_fileno: interest}, process, timeout_s).get(connection.receiver_fileno, 0)
        if happened & select.POLLOUT:
            self._unsent_size_bytes -= connection.flush()
        if happened & ~select.POLLOUT:  # also the last output of a dead app
            self._receive()
        elif process is not None and process.exit_status is not None:
            raise _died(process, self._app)

    def _receive(self) -> None:
        data = self._connection.receive()
        if data is None:
            return
        if not data:
            if self._process is None:
                raise AppExitedError("the app closed its connection before the replay was complete", None)
            raise _died(self._process, self._app)
        self._last_received_s = time.monotonic()
        for event in self._session.receive(data):
            self._handle_event(event)

    def _handle_event(self, event: Event) -> None:
        self._sink.handle(event)
        if isinstance(event, BlobPiece):
            self._blob_size_bytes += len(event.data)
            self._blob_check = crc64(event.data, self._blob_check)
            if self._blob_file is not None:
                self._blob_file.write(event.data)
        elif isinstance(event, VerdictGiven):
            self.result.add(event.verdict)
        elif isinstance(event, Ended):
            self._ended = event

    # --- the end ----------------------------------------------------------------------------------------------------

    def _close_app(self) -> None:
        """Let the app end by itself; closing its process stops an app that does not."""
        connection, process = self._connection, self._process
        deadline_s = time.monotonic() + LEAVE_S
        for data in self._session.data_to_send():
            connection.send(data)
        connection.flush()
        while connection.has_waiting and (rest_s := deadline_s - time.monotonic()) > 0:
            _poll({connection.receiver_fileno: select.POLLOUT}, process, rest_s)
            connection.flush()
        if not self._session.app_leaves:
            connection.close()
        while process is not None and process.exit_status is None and (rest_s := deadline_s - time.monotonic()) > 0:
            _poll({}, process, rest_s)


# Connection of an app that is started by hand: at one port or two, as in service.
#
# The ports are free ones, so that a replay never conflicts with the running instance.


def accept_two_ports(
    settings: InstanceSettings,
    ports: tuple[int, int | None] | None,
    announce: Callable[[str], None],
    stop: Callable[[], bool],
    stack: ExitStack,
) -> AppConnection:
    """Return the connection of an app that uses two ports in the mode of ``settings``; ``announce`` receives where.

    ``ports``: the app's port and its send port, None for free ones.

    Raises ReplayError if ``stop`` returns True first; AppListenError, RegistryError.
    """
    port, asked_send_port = ports or (free_port((IPV4_LOOPBACK,), set()), None)
    send_port = asked_send_port or free_port((IPV4_LOOPBACK,), {port})
    own = structs.replace(settings, app_host=IPV4_LOOPBACK, app_port=port, app_send_port=send_port, app_socket=None)
    does = "it listens" if own.app_send_mode is AppSendMode.LISTEN else "it connects too"
    epoll = stack.enter_context(select.epoll())
    listener = AppListener(own, warnings_on_stderr("replay"), epoll)
    stack.callback(listener.close)
    listener.listen()
    announce(f"{host_port(IPV4_LOOPBACK, port)}, with its send port {send_port}, where {does}")
    while not stop():
        connection = listener.process(dict(epoll.poll(PROGRESS_DELAY_S)), has_app=False)
        if connection is not None:
            return connection
    raise ReplayError("stopped before an app had connected")


class LocalRun:
    """Replay of ``route`` through the class ``definition`` in this process. ``blob``: the state, once it has ``ended``.

    ``now_ns``, ``make_delivery``, ``outsiders``: as in :class:`LocalApp`. ``sends_verdict``: as in
    :class:`ReplaySession`.
    """

    def __init__(
        self,
        source: RecordSource,
        route: Route,
        definition: Definition,
        sink: Sink,
        *,
        now_ns: int = 0,
        sends_verdict: VerdictFilter = lambda verdict: True,
        make_delivery: Callable[[Definition, Context], Delivery] = Delivery,
        outsiders: frozenset[str] = frozenset(),
    ) -> None:
        refuse_pickle(source, [route.checkpoint.checkpoint_id])
        self.source = source
        self.route = route
        self.definition = definition
        self.sink = sink
        self.blob = b""
        self.verdicts: list[Verdict] = []
        self.ended: Ended | None = None
        self.app = LocalApp(
            definition,
            bytes(SEED_SIZE_BYTES),
            now_ns,
            trace=True,
            make_delivery=make_delivery,
            outsiders=outsiders,
        )
        self.session = ReplaySession(source.identity.instance_name, source.summary(), route, sends_verdict)

    @property
    def instance(self) -> Any:
        return self.app.instance

    def restore(self) -> None:
        """Give the app the state of the checkpoint. Raises the app's error, or ReplayError if the app just ends."""
        for event in self.session.start():
            self.handle_event(event)
        self.process_output()
        for chunk in self.source.checkpoint_chunks(self.route.checkpoint.checkpoint_id):
            self.session.give_blob(chunk)
            self.exchange()
        if not self.session.wants_blob:
            name, why = self.source.identity.instance_name, self.app.error or "it has ended"
            raise ReplayError(f"{name}: {self.definition.name} does not accept the state: {why}")
        self.session.blob_is_complete()
        self.exchange()

    def give(self, value: bytes) -> None:
        """Give the app the next record, in the log's form. Raises the app's error."""
        header = decode_header(value)
        trailer = decode_trailer(value[header.size_bytes :], header.check)
        self.sink.record(header.sequence_id, value, trailer)
        self.session.give_record(value, trailer)
        self.exchange()

    def exchange(self) -> None:
        """Pass data between the session and the app, both ways, until neither has more."""
        while self.ended is None and (data := b"".join(self.session.data_to_send())):
            self.app.receive(data)
            self.process_output()

    def process_output(self) -> None:
        """Process the app's output. Raises the app's error, except a handler's error, which ends the replay."""
        data = bytes(self.app.output)
        self.app.output.clear()
        for event in self.session.receive(data):
            self.handle_event(event)
        if self.app.error is not None and self.ended is None:
            raise self.app.error

    def handle_event(self, event: Event) -> None:
        self.sink.handle(event)
        if isinstance(event, BlobPiece):
            self.blob += event.data
        elif isinstance(event, VerdictGiven):
            self.verdicts.append(event.verdict)
        elif isinstance(event, Ended):
            self.ended = event
