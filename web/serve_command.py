"""serve and openapi: HTTP in front of instances, and its description."""

from __future__ import annotations

import os
import ssl
import sys
from pathlib import Path
from typing import Any

import click

from immortal.appsdk.errors import LoadError
from immortal.appsdk.handlers.definition import Definition, definition_of
from immortal.appsdk.running.runner import load
from immortal.cli.options import pass_registry
from immortal.coordinator.instances.registry import Registry
from immortal.protocol import distribution
from immortal.protocol.command_line import FailedError, echo, echo_json
from immortal.web.command import LOOPBACK, is_loopback

HEADERS_SIZE_BYTES_MAX = 64 << 10
CONNECTIONS_MAX = 1_000
STOP_S = 5  # for answers that are on their way

targets = click.argument("targets", nargs=-1, metavar="[NAME[=MODULE:CLASS]]...")


@click.command()
@targets
@click.option("--port", type=click.IntRange(0, 65535), default=8080, show_default=True, help="The port; 0: a free one.")
@click.option("--host", default=LOOPBACK, show_default=True, help="The address; another one needs TLS and a token.")
@click.option("--tls-cert", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="The certificate (PEM).")
@click.option("--tls-key", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Its private key (PEM).")
@click.option(
    "--token-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="A file of mode 0600 with the token that each request brings.",
)
@click.option("--identity", help="The client name, with a key of its own, by which instances know the requests.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=20.0,
    show_default=True,
    metavar="SECONDS",
    help="How long a request waits for its answer.",
)
@pass_registry
def serve(
    registry: Registry,
    targets: tuple[str, ...],
    port: int,
    host: str,
    tls_cert: Path | None,
    tls_key: Path | None,
    token_file: Path | None,
    identity: str | None,
    timeout: float,
) -> None:
    """Serve instances over HTTP: POST /NAME/HANDLER calls, GET /NAME/QUERY asks; JSON both ways.

    All instances of this home whose class is known, or those that are named. The header Idempotency-Key makes a call
    happen once, however often it is sent; ?wait=0 answers at once, with the address of the result. /openapi.json
    describes it all. Start it in the folder of the apps' modules.
    """
    if (tls_cert is None) != (tls_key is None):
        raise click.UsageError("--tls-cert and --tls-key go together")
    if not is_loopback(host) and (tls_cert is None or token_file is None):
        raise click.UsageError(
            f"--host {host} can be reached from other machines: --tls-cert, --tls-key and --token-file are needed with"
            " it, or a web server of yours in front of --host 127.0.0.1"
        )
    try:
        import uvicorn

        from immortal.appsdk.integrations.asgi import Service, gateway
    except ImportError as error:
        raise FailedError(f"the gateway needs {error.name}: {distribution.add_extra('http')}") from None
    from immortal.web.auth import read_token
    from immortal.web.server import listen

    found = find_classes(registry, targets)
    options: dict[str, Any] = {"home": registry.home, "timeout": timeout, "identity": identity}
    services: list[Service[Any]] = [Service(one.cls, name, **options) for name, one in found.items()]
    listener = listen(host, port)
    config = uvicorn.Config(
        gateway(services, token=None if token_file is None else read_token(token_file)),
        ws="none",
        proxy_headers=False,
        limit_concurrency=CONNECTIONS_MAX,
        h11_max_incomplete_event_size=HEADERS_SIZE_BYTES_MAX,
        log_level="error",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=STOP_S,
        ssl_certfile=tls_cert,
        ssl_keyfile=tls_key,
    )
    try:
        config.load()
    except (ssl.SSLError, OSError) as error:
        raise FailedError(f"the certificate and its key can't be used: {error}") from None
    shown = f"[{host}]" if ":" in host else host
    scheme = "http" if tls_cert is None else "https"
    echo(f"{scheme}://{shown}:{listener.getsockname()[1]} serves {', '.join(found)}")
    with registry.kept():
        uvicorn.Server(config).run(sockets=[listener])


@click.command("openapi")
@targets
@pass_registry
def openapi(registry: Registry, targets: tuple[str, ...]) -> None:
    """Print the OpenAPI 3.1 description of what 'immortal serve' serves, for generators of clients."""
    try:
        from immortal.appsdk.integrations.asgi.gateway import openapi as described
    except ImportError as error:
        raise FailedError(str(error)) from None
    echo_json(described(find_classes(registry, targets), "Immortal services"))


def find_classes(registry: Registry, targets: tuple[str, ...]) -> dict[str, Definition]:
    """Return the classes of instances, by name: of all whose class is known, or those that are named.

    Raises FailedError, RegistryError; what a module raises as it is imported passes.
    """
    sys.path.insert(0, os.getcwd())
    apps: dict[str, str | None] = {}
    for target in targets:
        name, _, given = target.partition("=")
        apps[name] = given or registry.load(name).app
    if not targets:
        apps = {name: app for name in registry.names() if (app := registry.load(name).app) is not None}
        if not apps:
            raise FailedError(f"no instance of {registry.home} has run yet: name them, as NAME=MODULE:CLASS")
    found = {}
    for name, module in apps.items():
        if module is None:
            raise FailedError(f"the class of {name!r} is not known, as it has not run yet: {name}=MODULE:CLASS")
        try:
            found[name] = definition_of(load(module))
        except LoadError as error:
            raise FailedError(str(error)) from None
    return found
