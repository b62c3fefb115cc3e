"""web: the page of a fleet."""

from __future__ import annotations

import ipaddress
from pathlib import Path

import click

from immortal.cli.options import pass_registry
from immortal.coordinator.instances.registry import Registry
from immortal.protocol import distribution
from immortal.protocol.command_line import FailedError, echo

LOOPBACK = "127.0.0.1"


@click.command()
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="The port; 0 takes a free one.  [default: 0]")
@click.option("--host", default=LOOPBACK, show_default=True, help="The address; another one needs TLS and a token.")
@click.option("--tls-cert", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="The certificate (PEM).")
@click.option("--tls-key", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Its private key (PEM).")
@click.option(
    "--token-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="A file of mode 0600 with the token that opens the page.  [default: a new one at each start]",
)
@click.option(
    "--reader-token-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="A file of mode 0600 with another token, which lets look and do nothing.",
)
@click.option(
    "--allow-actions", is_flag=True, help="Let who has the token also change things; each is in the audit log."
)
@pass_registry
def web(
    registry: Registry,
    port: int,
    host: str,
    tls_cert: Path | None,
    tls_key: Path | None,
    token_file: Path | None,
    reader_token_file: Path | None,
    allow_actions: bool,
) -> None:
    """Serve a page of all instances: what runs, what waits, the log of each, and any moment of it.

    It prints the address, with the token in it, and serves until Ctrl-C. Start it in the folder of the apps' modules,
    as 'immortal replay'. Who has the token sees all states, and can run code as you, in a copy of an app.
    """
    if (tls_cert is None) != (tls_key is None):
        raise click.UsageError("--tls-cert and --tls-key go together")
    if not is_loopback(host) and (tls_cert is None or token_file is None):
        raise click.UsageError(
            f"--host {host} can be reached from other machines: --tls-cert, --tls-key and --token-file are needed with"
            " it (or leave --host out, and come in by a tunnel, such as 'ssh -L')"
        )
    try:
        import jinja2  # noqa: F401
        import sse_starlette  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise FailedError(f"the page needs {error.name}: {distribution.add_extra('web')}") from None
    from immortal.web.auth import new_token, read_token
    from immortal.web.server import serve

    token = new_token() if token_file is None else read_token(token_file)
    reader = None if reader_token_file is None else read_token(reader_token_file)
    tls = None if tls_cert is None or tls_key is None else (tls_cert, tls_key)
    shown = token if token_file is None else None

    def ready(url: str) -> None:
        echo(f"{url}/login?token={shown}" if shown else f"{url}/")

    with registry.kept():
        serve(registry, host, port, tls, token, reader, allow_actions=allow_actions, ready=ready)


def is_loopback(host: str) -> bool:
    """Tell whether an address is reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
