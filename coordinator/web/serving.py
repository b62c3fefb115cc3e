"""The server: its socket, its threads, and its end."""

from __future__ import annotations

import logging
import os
import socket
import ssl
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import uvicorn

from immortal.coordinator.instances.registry import Registry
from immortal.coordinator.web.app import make_app
from immortal.coordinator.web.connections import HEADERS_SIZE_BYTES_MAX, Connection, Listener
from immortal.coordinator.web.errors import WebError
from immortal.coordinator.web.fleet_pages import warm_up
from immortal.coordinator.web.site import Site
from immortal.coordinator.web.token import Token

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
SWITCH_INTERVAL_S = 0.0005  # an answer is not to wait for all threads that look at instances, 5 ms for each
STOP_S = 2  # for answers that are on their way, and streams that never end


def serve(
    registry: Registry,
    host: str,
    port: int,
    tls: tuple[Path, Path] | None,
    token: str,
    *,
    allow_actions: bool,
    ready: Callable[[str], None],
) -> None:
    """Until SIGINT or SIGTERM. ``ready`` is told the URL, without a path. Raises WebError, RegistryError."""
    registry.names()  # whether it may be read
    listener = _listen(host, port)
    scheme = "http" if tls is None else "https"
    address, taken = listener.getsockname()[:2]
    any_host = address in ("0.0.0.0", "::")  # noqa: S104 (asked, not bound)
    hosts = () if any_host else (*LOOPBACK_NAMES, host.lower(), address)
    site = Site(registry, Token(token), allow_actions=allow_actions)
    config = uvicorn.Config(
        make_app(site, hosts, scheme),
        http=partial(Connection, listener),  # type: ignore[arg-type]  # whatever makes one
        ws="none",
        loop="asyncio",
        proxy_headers=False,
        h11_max_incomplete_event_size=HEADERS_SIZE_BYTES_MAX,
        backlog=1,
        log_level="error",  # a warning tells of each stranger that speaks no HTTP
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=STOP_S,
        ssl_certfile=None if tls is None else tls[0],
        ssl_keyfile=None if tls is None else tls[1],
    )
    try:
        config.load()
    except (ssl.SSLError, OSError) as error:
        raise WebError(f"the certificate and its key can't be used: {error}") from None
    logging.getLogger("uvicorn.error").addFilter(_is_news)
    server = uvicorn.Server(config)
    shown = f"[{host}]" if ":" in host else host
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        warm_up(site)
        ready(f"{scheme}://{shown}:{taken}")
        server.run(sockets=[listener])
    except KeyboardInterrupt:
        pass  # uvicorn has stopped by then
    finally:
        site.close()
        listener.close()


def _listen(host: str, port: int) -> Listener:
    listener = Listener(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen()
    except OSError as error:
        listener.close()
        raise WebError(
            f"{host}:{port} can't be listened at: {error.strerror or os.strerror(error.errno or 0)}"
        ) from None
    return listener


def _is_news(record: logging.LogRecord) -> bool:
    """Streams of events have no end but the server's own."""
    return "without completing response" not in record.getMessage()
