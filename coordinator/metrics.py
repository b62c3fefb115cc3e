"""What `immortal status` shows, for Prometheus: asked of the coordinator at each scrape.

Beyond loopback it takes TLS, a token, or the word "insecure".
"""

from __future__ import annotations

import contextlib
import hmac
import io
import re
import socket
import socketserver
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.registry import Collector

from coordinator.config import split_tcp
from coordinator.config.app_hosts import IPV4_LOOPBACK, LOCALHOST, host_port, is_loopback
from coordinator.logs import Events
from protocol.errors import ImmortalError

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

CONNECTIONS_MAX = 8  # at once, with a thread each; the next is closed at once
CONNECTION_TIMEOUT_S = 10.0  # for all of a connection; the coordinator has 5 s of it to answer
TOKEN_SIZE_BYTES_MIN = 16
_TOKEN = re.compile(rb"[A-Za-z0-9\-._~+/=]{%d,512}" % TOKEN_SIZE_BYTES_MIN)

Metric = CounterMetricFamily | GaugeMetricFamily | InfoMetricFamily


class MetricsError(ImmortalError):
    """The metrics can't be served."""


class StatusCollector(Collector):
    """``ask``: gives the status of the instance; raises ImmortalError where it can't, which leaves ``up`` at 0."""

    def __init__(self, name: str, ask: Callable[[], Mapping[str, Any]]) -> None:
        self._name = name
        self._ask = ask

    def describe(self) -> Iterable[Metric]:
        """Nothing: a coordinator that has just begun to start can't be asked yet."""
        return []

    def collect(self) -> Iterable[Metric]:
        up = GaugeMetricFamily("immortal_up", "1 if the coordinator answers", labels=["instance_name"])
        try:
            status = self._ask()
        except ImmortalError:
            up.add_metric([self._name], 0)
            return [up]
        up.add_metric([self._name], 1)
        return [up, *metrics_of(self._name, status)]


def metrics_of(name: str, status: Mapping[str, Any]) -> list[Metric]:
    """The metrics of one status, as `immortal status NAME --json` gives it."""
    phase = InfoMetricFamily("immortal_phase", "What the instance does", labels=["instance_name"])
    phase.add_metric([name], {"phase": str(status["phase"])})
    metrics: list[Metric] = [phase]

    def gauge(metric: str, text: str, value: float | None) -> None:
        if value is not None:
            family = GaugeMetricFamily(f"immortal_{metric}", text, labels=["instance_name"])
            family.add_metric([name], value)
            metrics.append(family)

    checkpoint = status.get("checkpoint") or {}
    gauge("app_connected", "1 if an app is connected", float(status.get("app_connected", False)))
    gauge("version", "Version of the app", status.get("version"))
    gauge("epoch", "Starts of the instance and its apps", status.get("epoch"))
    gauge("log_records", "Records logged since the first start", status.get("sequence_id", -1) + 1)
    gauge("backlog_records", "Logged and not yet given to the app", status.get("backlog_records"))
    gauge("app_unsent_bytes", "Given to the app's socket and not taken", status.get("unsent_bytes"))
    gauge("app_silent_seconds", "For how long the app has taken nothing of what waits", status.get("app_silent_s"))
    commit_ms = status.get("commit_ms")
    gauge("commit_seconds", "What a commit to the log takes", None if commit_ms is None else commit_ms / 1000)
    clients = status.get("clients") or {}
    gauge("clients", "Clients of which the instance knows", clients.get("known"))
    gauge("clients_open_requests", "Requests of clients taken and not answered", clients.get("open_requests"))
    gauge("clients_replies", "Replies kept for clients", clients.get("replies"))
    gauge("clients_replies_bytes", "Size of the replies kept for clients", clients.get("replies_bytes"))
    clock = status.get("clock") or {}
    gauge("clock_ahead_seconds", "By how much a jump of the clock is held back; behind: negative", clock.get("ahead_s"))
    gauge("clock_jumps", "Jumps of the clock since the start", clock.get("jumps"))
    gauge("app_paused", "1 if the app is not read: disk or peers are behind", _flag(status.get("app_paused")))
    log = status.get("log") or {}
    gauge("log_used_bytes", "What the log needs of its file", log.get("used_bytes"))
    gauge("log_limit_bytes", "Above this it takes no input from peers", log.get("limit_bytes"))
    gauge("log_disk_free_bytes", "Left on the log's disk", log.get("free_bytes"))
    gauge("log_full", "1 if input from peers is refused for want of room", _flag(log.get("full")))
    gauge("checkpoint_age_seconds", "Age of the last checkpoint", checkpoint.get("age_s"))
    gauge("checkpoint_size_bytes", "Size of the last checkpoint", checkpoint.get("size_bytes"))

    letters = status.get("letters") or {}
    gauge("dead_letters", "Dead letters that are kept", letters.get("count"))
    gauge("dead_letters_bytes", "Size of the dead letters that are kept", letters.get("bytes"))
    suspect, handling = status.get("suspect") or {}, status.get("handling") or {}
    gauge("suspect_runs", "Runs in a row that one message may have ended", suspect.get("runs", 0))
    gauge("handling_seconds", "What the handler that takes long has taken so far", handling.get("for_s", 0))
    verdicts = CounterMetricFamily(
        "immortal_verdicts", "Messages that failed alone, since the start", labels=["instance_name", "kind"]
    )
    for kind, count in (status.get("verdicts") or {}).items():
        verdicts.add_metric([name, kind], count)
    lost = CounterMetricFamily(
        "immortal_dead_letters_lost", "Dead letters that there was no room for", labels=["instance_name"]
    )
    lost.add_metric([name], letters.get("lost", 0))
    received = CounterMetricFamily(
        "immortal_received_messages", "Messages of a peer in the log", labels=["instance_name", "peer"]
    )
    granted = GaugeMetricFamily(
        "immortal_granted_window_bytes", "What a peer may have on its way here", labels=["instance_name", "peer"]
    )
    for peer, one in status.get("inputs", {}).items():
        received.add_metric([name, peer], one["position"])
        if one.get("window_bytes") is not None:
            granted.add_metric([name, peer], one["window_bytes"])
    labels = ["instance_name", "caller"]
    by_caller: dict[str, CounterMetricFamily | GaugeMetricFamily] = {
        "forbidden": CounterMetricFamily("immortal_refused_calls", "Calls that the caller may not make", labels=labels),
        "held_back": CounterMetricFamily("immortal_held_back", "Times that the caller had to wait", labels=labels),
        "open_calls": GaugeMetricFamily("immortal_open_calls", "Calls of a limited peer not answered", labels=labels),
    }
    for key, counted in by_caller.items():
        for caller, count in (status.get(key) or {}).items():
            counted.add_metric([name, caller], float(count))
    held_up = GaugeMetricFamily(
        "immortal_held_up", "1 if the app is held up for the peer", labels=["instance_name", "peer"]
    )
    for peer in status.get("outputs", {}):
        held_up.add_metric([name, peer], float(peer in status.get("held_up_for", ())))
    families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {
        "position": CounterMetricFamily(
            "immortal_sent_messages", "Messages made for a peer", labels=["instance_name", "peer"]
        ),
        "acknowledged": CounterMetricFamily(
            "immortal_acknowledged_messages", "Messages durable at a peer", labels=["instance_name", "peer"]
        ),
        "waiting_bytes": GaugeMetricFamily(
            "immortal_waiting_bytes", "Not acknowledged by a peer", labels=["instance_name", "peer"]
        ),
        "memory_bytes": GaugeMetricFamily(
            "immortal_memory_bytes", "... and in memory", labels=["instance_name", "peer"]
        ),
        "spilled_bytes": GaugeMetricFamily(
            "immortal_spilled_bytes", "... and on disk alone", labels=["instance_name", "peer"]
        ),
        "window_bytes": GaugeMetricFamily(
            "immortal_window_bytes", "What may be on its way to a peer", labels=["instance_name", "peer"]
        ),
        "connected": GaugeMetricFamily(
            "immortal_peer_connected", "1 if the peer is connected", labels=["instance_name", "peer"]
        ),
    }
    for peer, one in status.get("outputs", {}).items():
        for key, family in families.items():
            if one.get(key) is not None:
                family.add_metric([name, peer], float(one[key]))
    return [*metrics, verdicts, lost, received, granted, held_up, *by_caller.values(), *families.values()]


def _flag(value: object) -> float:
    return float(bool(value))


@dataclass(frozen=True, slots=True)
class Access:
    """How the metrics are reached beyond this machine. ``insecure``: without any of it is meant."""

    token_file: Path | None = None
    certificate_file: Path | None = None
    key_file: Path | None = None
    insecure: bool = False

    def is_open(self, host: str) -> bool:
        """Whether others than this machine reach ``host``, and nothing keeps them from asking there."""
        return not is_loopback(host) and self.token_file is None and self.certificate_file is None

    def token(self) -> bytes | None:
        """What who asks must bring; None where nobody is asked for it. Raises MetricsError."""
        if self.token_file is None:
            return None
        try:
            mode = self.token_file.stat().st_mode & 0o777
            token = self.token_file.read_bytes().strip()
        except OSError as error:
            raise MetricsError(
                f"the token of the metrics, {self.token_file}, can't be read: {error.strerror}"
            ) from None
        if mode & 0o077:
            raise MetricsError(f"{self.token_file} has mode {mode:04o}, expected 0600: 'chmod 600', and another token")
        if not _TOKEN.fullmatch(token):
            raise MetricsError(
                f"{self.token_file} holds no token: {TOKEN_SIZE_BYTES_MIN} or more letters, digits and any of -._~+/="
                " were expected, as 'openssl rand -hex 32' gives them"
            )
        return token

    def tls(self) -> ssl.SSLContext | None:
        """Raises MetricsError."""
        if self.certificate_file is None:
            return None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(self.certificate_file, self.key_file, password=_refuse_password)
        except (OSError, MetricsError) as error:  # what OpenSSL says is an OSError
            raise MetricsError(
                f"the certificate of the metrics can't be used ({self.certificate_file}, key {self.key_file}): {error}"
            ) from None
        return context


def _refuse_password() -> str:
    raise MetricsError("the key needs a password, and nobody is there to give it")


class _Handler(WSGIRequestHandler):
    """One connection, which has one request."""

    def setup(self) -> None:
        if isinstance(self.request, ssl.SSLSocket):
            self.request.do_handshake()
        super().setup()

    def log_message(self, *args: object) -> None:
        """Each scrape would be a line."""

    def get_stderr(self) -> IO[str]:
        return io.StringIO()  # nobody reads what goes wrong with one who asks


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    """A thread for each connection, up to a number, and up to a time."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64  # who waits to be turned away

    def __init__(self, address: tuple[str, int], app: WSGIApplication, tls: ssl.SSLContext | None) -> None:
        self._tls = tls
        self._lock = threading.Lock()
        self._closes_s: dict[socket.socket, float] = {}  # of each connection, on the monotonic clock
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, _Handler)
        self.set_app(app)

    def server_bind(self) -> None:
        """Without the question to a name server that WSGIServer has."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]
        self.setup_environ()

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Whether there is room for one more."""
        with self._lock:
            if len(self._closes_s) >= CONNECTIONS_MAX:
                return False
            self._closes_s[request] = time.monotonic() + CONNECTION_TIMEOUT_S
        return True

    def get_request(self) -> tuple[Any, Any]:
        request, address = super().get_request()
        request.settimeout(CONNECTION_TIMEOUT_S)
        if self._tls is not None:  # the handshake is its thread's
            request = self._tls.wrap_socket(request, server_side=True, do_handshake_on_connect=False)
        return request, address

    def service_actions(self) -> None:
        """Twice a second: cut off whoever has had the time, also who sends a byte now and then."""
        now_s = time.monotonic()
        with self._lock:
            for request in [one for one, closes_s in self._closes_s.items() if now_s >= closes_s]:
                with contextlib.suppress(OSError):
                    socket.socket.shutdown(request, socket.SHUT_RDWR)  # beneath TLS: its thread is in the midst of that

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._closes_s.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Who asks goes away, or speaks something else: nothing to be told of."""


def _with_token(app: WSGIApplication, access: Access) -> WSGIApplication:
    """``app`` for who brings the token; its file is read each time, so that another one needs no restart."""

    def checked(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        try:
            token = access.token()
        except MetricsError:
            start_response("503 Service Unavailable", [])
            return [b"the token can't be read here\n"]
        brought = environ.get("HTTP_AUTHORIZATION", "").encode("latin-1", "replace")
        if token is None or hmac.compare_digest(brought, b"Bearer " + token):
            return app(environ, start_response)
        start_response("401 Unauthorized", [("WWW-Authenticate", "Bearer")])
        return [b"a token is needed\n"]

    return checked


def serve_metrics(
    name: str,
    address: str,
    ask: Callable[[], Mapping[str, Any]],
    access: Access | None = None,
) -> str:
    """Serve at ``address`` ("HOST:PORT"; HOST:* takes a free one), from a thread of its own; the URL.

    Raises MetricsError, also where others than this machine could ask and nothing keeps them from it.
    """
    access = access or Access()
    found = split_tcp(f"tcp://{address}")
    if found is None:
        raise MetricsError(f'the address of the metrics is {address!r}, expected HOST:PORT such as "127.0.0.1:9400"')
    host, port = found
    access.token()
    if access.is_open(host) and not access.insecure:
        raise MetricsError(
            f"the metrics of {name!r} at {address} would be open to whoever reaches that address: give"
            " metrics_token_file, or metrics_certificate_file and metrics_key_file, in its settings, or take a loopback"
            " address; '--insecure' serves them without"
        )
    registry = CollectorRegistry(auto_describe=False)
    registry.register(StatusCollector(name, ask))
    try:
        app = _with_token(make_wsgi_app(registry), access)
        server = _Server((IPV4_LOOPBACK if host == LOCALHOST else host, port), app, access.tls())
    except OSError as error:
        raise MetricsError(
            f"can't serve the metrics of {name!r} at {address}: {error.strerror}; choose another address (--metrics)"
        ) from None
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    scheme = "http" if access.certificate_file is None else "https"
    url = f"{scheme}://{host_port(host, server.server_port)}/metrics"
    Events(name).info("metrics are served", at=url)
    if access.is_open(host):
        Events(name).warning(f"INSECURE, as asked for: whoever reaches {address} can read the metrics")
    return url
