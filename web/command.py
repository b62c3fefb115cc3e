"""Commands web, serve and openapi: the page of a fleet, HTTP in front of instances, and its description."""

from __future__ import annotations

import functools
import ipaddress
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from msgspec import Struct

from immortal.cli.options import Function, pass_registry
from immortal.coordinator.instances.registry import Registry
from immortal.protocol import distribution, redaction
from immortal.protocol.command_line import FailedError, echo, echo_json

if TYPE_CHECKING:
    from immortal.appsdk.handlers.definition import Definition

CONNECTIONS_MAX = 1_000
STOP_S = 5  # for answers that are not complete

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_targets = click.argument("targets", nargs=-1, metavar="[NAME[=MODULE:CLASS]]...")


class _Address(Struct, frozen=True):
    """Address that a server listens at. ``tls``: its certificate and key."""

    host: str
    port: int
    tls: tuple[Path, Path] | None
    token_file: Path | None


def _address_options(port: int, token_help: str, or_else: str) -> Callable[[Function], Function]:
    """Return a decorator with the options of an ``address``. ``or_else``: the way without TLS, for an error."""

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def with_address(
            *arguments: Any,
            port: int,
            host: str,
            tls_cert: Path | None,
            tls_key: Path | None,
            token_file: Path | None,
            **options: Any,
        ) -> Any:
            if (tls_cert is None) != (tls_key is None):
                raise click.UsageError("--tls-cert and --tls-key go together")
            if not is_loopback(host) and (tls_cert is None or token_file is None):
                raise click.UsageError(
                    f"--host {host} can be reached from other machines: --tls-cert, --tls-key and --token-file are"
                    f" needed{or_else}"
                )
            tls = None if tls_cert is None or tls_key is None else (tls_cert, tls_key)
            return function(*arguments, address=_Address(host, port, tls, token_file), **options)

        for option in (
            click.option("--token-file", type=click.Path(dir_okay=False, path_type=Path), help=token_help),
            click.option("--tls-key", type=_FILE, help="Private key of the certificate (PEM)."),
            click.option("--tls-cert", type=_FILE, help="TLS certificate (PEM)."),
            click.option(
                "--host", default="127.0.0.1", show_default=True, help="Address; a public one needs TLS and a token."
            ),
            click.option(
                "--port",
                type=click.IntRange(0, 65535),
                default=port,
                show_default=True,
                help="Port to listen at; 0 takes a free one.",
            ),
        ):
            with_address = option(with_address)
        return with_address  # type: ignore[return-value]

    return decorate


@click.command()
@_address_options(
    0,
    "File of mode 0600 with the token for the page.  [default: a new token at each start]",
    " (or leave --host out and use a tunnel, such as 'ssh -L')",
)
@click.option(
    "--reader-token-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File of mode 0600 with a second token, which can only read.",
)
@click.option("--allow-actions", is_flag=True, help="Allow actions that change instances; the audit log records each.")
@pass_registry
def web(registry: Registry, address: _Address, reader_token_file: Path | None, allow_actions: bool) -> None:
    """Serve a web page of all instances: states, waits, logs and time travel.

    The command prints the address with the token, and serves until Ctrl-C. Start it in the folder of the apps' modules,
    like 'immortal replay'. Anybody with the token sees all states, and can run code as you, in a copy of an app.
    """
    try:
        import jinja2  # noqa: F401
        import sse_starlette  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise FailedError(f"the page needs {error.name}: {distribution.add_extra('web')}") from None
    from immortal.web.auth import new_token, read_token
    from immortal.web.server import serve

    token = new_token() if address.token_file is None else read_token(address.token_file)
    reader = None if reader_token_file is None else read_token(reader_token_file)
    shown = token if address.token_file is None else None

    def ready(url: str) -> None:
        echo(f"{url}/login?token={shown}" if shown else f"{url}/")

    os.environ.update(redaction.environment())  # for the processes of its answers
    with registry.synchronized():
        serve(
            registry, address.host, address.port, address.tls, token, reader, allow_actions=allow_actions, ready=ready
        )


def is_loopback(host: str) -> bool:
    """Return True if only this machine reaches an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@click.command()
@_targets
@_address_options(
    8080,
    "File of mode 0600 with the token that each request must have.",
    ", or your own web server in front of --host 127.0.0.1",
)
@click.option("--identity", help="Client name, with a key of its own, that instances see as the caller.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=20.0,
    show_default=True,
    metavar="SECONDS",
    help="Time limit for the answer to a request.",
)
@pass_registry
def serve(
    registry: Registry, targets: tuple[str, ...], address: _Address, identity: str | None, timeout: float
) -> None:
    """Serve instances over HTTP, with JSON requests and answers.

    POST /NAME/HANDLER calls a handler, GET /NAME/QUERY a query; a keyed class has the key in between:
    /NAME/KEY/HANDLER. With the header Idempotency-Key, a call happens once, however often it is sent; ?wait=0 answers
    at once, with the address of the result. /openapi.json describes the interface.

    Without NAME, all instances of this home with a known class are served. Start the command in the folder of the apps'
    modules.
    """
    try:
        import uvicorn

        from immortal.appsdk.integrations.asgi import Service, gateway
    except ImportError as error:
        raise FailedError(f"the gateway needs {error.name}: {distribution.add_extra('http')}") from None
    from immortal.web.auth import read_token
    from immortal.web.connections import listen, make_config, url_of

    found = find_classes(registry, targets)
    options: dict[str, Any] = {"home": registry.home, "timeout": timeout, "identity": identity}
    services: list[Service[Any]] = [Service(one.cls, name, **options) for name, one in found.items()]
    listener = listen(address.host, address.port)
    token = None if address.token_file is None else read_token(address.token_file)
    config = make_config(gateway(services, token=token), address.tls, STOP_S, limit_concurrency=CONNECTIONS_MAX)
    echo(f"{url_of(listener, address.host, address.tls)} serves {', '.join(found)}")
    with registry.synchronized():
        uvicorn.Server(config).run(sockets=[listener])


@click.command("openapi")
@_targets
@pass_registry
def openapi(registry: Registry, targets: tuple[str, ...]) -> None:
    """Print the OpenAPI 3.1 description of 'immortal serve', for client generators."""
    try:
        from immortal.appsdk.integrations.asgi.gateway import openapi as described
    except ImportError as error:
        raise FailedError(str(error)) from None
    echo_json(described(find_classes(registry, targets), "Immortal services"))


def find_classes(registry: Registry, targets: tuple[str, ...]) -> dict[str, Definition]:
    """Return the classes of instances, by name: those of ``targets``, or of all whose class is known.

    Raises FailedError, RegistryError, and the error of a module that can't be imported.
    """
    from immortal.appsdk.errors import LoadError
    from immortal.appsdk.handlers.definition import definition_of
    from immortal.appsdk.running.runner import load

    sys.path.insert(0, os.getcwd())
    apps: dict[str, str | None] = {}
    for target in targets:
        name, _, given = target.partition("=")
        first = f"{name}-1"  # of a keyed class, whose shards are served together
        apps[name] = given or registry.load(first if registry.path(first).exists() else name).app
    if not targets:
        apps = {name: app for name in registry.names() if (app := registry.load(name).app) is not None}
        if not apps:
            raise FailedError(f"no instance of {registry.home} has run yet: give NAME=MODULE:CLASS")
    found = {}
    for name, module in apps.items():
        if module is None:
            raise FailedError(f"{name!r} has not run yet, so its class is not known: give {name}=MODULE:CLASS")
        try:
            definition = definition_of(load(module))
            base, _, number = name.rpartition("-")
            is_shard = number.isdecimal() and registry.path(f"{base}-1").exists() and not registry.path(base).exists()
            found[base if definition.keyed is not None and is_shard else name] = definition
        except LoadError as error:
            raise FailedError(str(error)) from None
    return found
