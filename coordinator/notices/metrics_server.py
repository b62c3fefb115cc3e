"""HTTP server for the metrics. Beyond loopback it needs TLS, a token, or the setting ``insecure``."""

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
from collections.abc import Iterable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from msgspec import Struct
from prometheus_client import CollectorRegistry, make_wsgi_app

from immortal.coordinator.config import split_tcp
from immortal.coordinator.config.socket_addresses import IPV4_LOOPBACK, LOCALHOST, host_port, is_loopback
from immortal.coordinator.notices.sinks import Notices
from immortal.protocol.errors import ImmortalError

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

CONNECTIONS_MAX = 8  # open connections, each with a thread; one more is closed at once
CONNECTION_TIMEOUT_S = 10.0  # limit on the time of a connection; the coordinator may take 5 s of it to answer
TOKEN_SIZE_BYTES_MIN = 16
_TOKEN = re.compile(rb"[A-Za-z0-9\-._~+/=]{%d,512}" % TOKEN_SIZE_BYTES_MIN)


class MetricsError(ImmortalError):
    """Raised if the metrics can't be served."""


class Access(Struct, frozen=True):
    """Access control of the metrics. ``insecure``: the operator wants no control, also beyond this machine."""

    token_file: Path | None = None
    certificate_file: Path | None = None
    key_file: Path | None = None
    insecure: bool = False

    def is_open(self, host: str) -> bool:
        """Return True if other machines reach ``host`` and neither token nor TLS protects it."""
        return not is_loopback(host) and self.token_file is None and self.certificate_file is None

    def token(self) -> bytes | None:
        """Read the token that requests must carry; None if there is none. Raises MetricsError."""
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
        """Make the TLS context; None without a certificate. Raises MetricsError."""
        if self.certificate_file is None:
            return None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(self.certificate_file, self.key_file, password=_refuse_password)
        except (OSError, MetricsError) as error:  # an SSLError is an OSError
            raise MetricsError(
                f"the certificate of the metrics can't be used ({self.certificate_file}, key {self.key_file}): {error}"
            ) from None
        return context


def _refuse_password() -> str:
    raise MetricsError("the key needs a password, and nobody is there to give it")


class _Handler(WSGIRequestHandler):
    """Handler of a connection, which has one request."""

    def setup(self) -> None:
        if isinstance(self.request, ssl.SSLSocket):
            self.request.do_handshake()
        super().setup()

    def log_message(self, *args: object) -> None:
        """Log nothing: each scrape would be a line."""

    def get_stderr(self) -> IO[str]:
        return io.StringIO()  # errors of one request are of no interest


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    """Server with a thread for each connection; number and duration of connections are limited."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64  # connections that wait to be refused

    def __init__(self, address: tuple[str, int], app: WSGIApplication, tls: ssl.SSLContext | None) -> None:
        self._tls = tls
        self._lock = threading.Lock()
        self._closes_s: dict[socket.socket, float] = {}  # of each connection, on the monotonic clock
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, _Handler)
        self.set_app(app)

    def server_bind(self) -> None:
        """Bind without the name server lookup that WSGIServer makes."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]
        self.setup_environ()

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Return True if there is room for one more connection."""
        with self._lock:
            if len(self._closes_s) >= CONNECTIONS_MAX:
                return False
            self._closes_s[request] = time.monotonic() + CONNECTION_TIMEOUT_S
        return True

    def get_request(self) -> tuple[Any, Any]:
        request, address = super().get_request()
        request.settimeout(CONNECTION_TIMEOUT_S)
        if self._tls is not None:  # the connection's thread makes the handshake
            request = self._tls.wrap_socket(request, server_side=True, do_handshake_on_connect=False)
        return request, address

    def service_actions(self) -> None:
        """End connections whose time is up, even those that send a byte now and then. Called twice a second."""
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
        """Ignore errors of a connection: the client is gone, or does not speak HTTP."""


def _with_token(app: WSGIApplication, access: Access) -> WSGIApplication:
    """Wrap ``app`` so that it demands the token. The token's file is read each time: a new token needs no restart."""

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


def serve_metrics(log: Notices, address: str, metrics: CollectorRegistry, access: Access | None = None) -> str:
    """Serve ``metrics`` at ``address`` ("HOST:PORT"; HOST:* takes a free port) from a thread; return the URL.

    Raises MetricsError, also if other machines could read them and nothing protects them.
    """
    name = log.instance
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
    try:
        app = _with_token(make_wsgi_app(metrics), access)
        server = _Server((IPV4_LOOPBACK if host == LOCALHOST else host, port), app, access.tls())
    except OSError as error:
        raise MetricsError(
            f"can't serve the metrics of {name!r} at {address}: {error.strerror}; choose another address (--metrics)"
        ) from None
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    scheme = "http" if access.certificate_file is None else "https"
    url = f"{scheme}://{host_port(host, server.server_port)}/metrics"
    log.info("metrics are served", at=url)
    if access.is_open(host):
        log.warning(f"INSECURE, as asked for: whoever reaches {address} can read the metrics")
    return url
