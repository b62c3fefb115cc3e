"""Command of the clone pattern: runs forwarders, lists the clients of a publisher, and watches a table."""

from __future__ import annotations

import signal
import threading
from contextlib import suppress
from typing import Any

import click
import zmq

from immortal.appsdk.client import connect as connect_client
from immortal.appsdk.client.transport import Dealer
from immortal.appsdk.patterns.clone.copies import connect
from immortal.appsdk.patterns.clone.forwarder import Forwarder
from immortal.appsdk.patterns.clone.frames import Look, Report, decode_answer, encode
from immortal.appsdk.patterns.clone.model import CONNECT_S, Place
from immortal.appsdk.patterns.clone.subscriber import Access
from immortal.appsdk.patterns.clone.table import Table
from immortal.protocol.command_line import Commands, FailedError, echo
from immortal.protocol.errors import RemoteProtocolError

_SHOWN_MAX = 10  # clients shown of a publisher whose clients are all in step


class _Commands(Commands):
    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ValueError as error:  # of an option or argument
            raise FailedError(str(error)) from None


@click.group(cls=_Commands)
def main() -> None:
    """Run forwarders, list the clients of a publisher, and watch a table."""


@main.command()
@click.argument("table")
@click.option("--listen", default="tcp://127.0.0.1:*", metavar="ENDPOINT", help="Where clients connect to.")
@click.option("--advertise", default="", metavar="ENDPOINT", help="What clients are told instead.")
@click.option("--upstream", multiple=True, metavar="[NAME@]ENDPOINT", help="A forwarder, in place of the table.")
@click.option("--identity", help="Whose keys it shows; by default those of the table.")
@click.option(
    "--blocking", "blocking_s", type=float, default=0.0, metavar="SECONDS", help="Clients may hold up writers."
)
@click.option("--insecure", is_flag=True, help="Without keys, for everybody.")
def forward(table: str, **options: Any) -> None:
    """Publish a table here as well, until Ctrl-C."""
    forwarder = Forwarder(table, **options)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: forwarder.stop())
    echo(f"forwarder {forwarder.id} of {table} at {forwarder.endpoint}")
    forwarder.run()


@main.command()
@click.argument("table")
@click.option("--all", "shows_all", is_flag=True, help="All clients, not only those that are behind or were slow.")
@click.option("--identity", help="Whose keys to show.")
def show(table: str, shows_all: bool, identity: str | None) -> None:
    """Show the table, where it is published, and the clients there."""
    with connect_client(Table, table, identity=identity) as proxy:
        status = proxy.status()
        places = proxy.places()
    sizes = f"{status.rows} rows, {status.size_bytes} bytes"
    echo(f"{table}: update {status.number}, {sizes}, {status.present} clients")
    for held in status.held_by:
        echo(f"  writers wait for {held}")
    for place in places:
        report = _query_report(table, place, identity)
        what = "table" if place.is_table else "forwarder"
        if report is None:
            echo(f"{what} at {place.endpoint}: no answer")
            continue
        echo(
            f"{what} at {place.endpoint}: update {report.number}, {len(report.streams)} clients; "
            f"{report.ended_slow} ended for being slow, {report.ended_silent} silent"
        )
        shown = [one for one in report.streams if shows_all or one.state != "in step" or one.dropped]
        for one in shown or report.streams[:_SHOWN_MAX]:
            subtrees = ",".join(subtree or "everything" for subtree in one.subtrees)
            who = f"{one.stream} {one.label or one.name or '-'}"
            waiting = f"{one.in_flight_bytes} bytes on their way, {one.waiting_bytes} of {one.mark_bytes} wait"
            echo(f"  {who}: {one.state}, {waiting}, {one.policy}, {one.dropped} changes dropped; {subtrees}")


def _query_report(table: str, place: Place, identity: str | None) -> Report | None:
    """Ask a publisher for its report; return None if there is no answer in time."""
    found = Access(table, {"identity": identity}).finder(place).find()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = Dealer(context, {})
    try:
        dealer.open(found.endpoints[0], found, 0)
        dealer.send(encode(Look()))
        if not dealer.socket.poll(int(1000 * CONNECT_S)):
            return None
        answer = decode_answer(dealer.socket.recv())
        return answer if isinstance(answer, Report) else None
    except RemoteProtocolError:
        return None
    finally:
        dealer.close()
        context.term()


@main.command()
@click.argument("table")
@click.argument("subtrees", nargs=-1)
@click.option("--identity", help="Whose keys to show.")
def watch(table: str, subtrees: tuple[str, ...], identity: str | None) -> None:
    """Print what changes in subtrees of a table (all of it by default), until Ctrl-C."""
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    with (
        suppress(KeyboardInterrupt),
        connect(table, subtrees=subtrees or ("",), label="watch", identity=identity) as clone,
    ):
        changes = clone.changes(timeout=0.2)
        number, values = clone.snapshot()
        for key, value in sorted(values.items()):
            echo(f"{key} = {value!r}")
        while not stopped.is_set():
            for one in changes:
                if one.number > number:
                    echo(f"{one.number}  {one.key} " + ("is gone" if one.is_gone else f"= {one.value!r}"))
                if stopped.is_set():
                    return


if __name__ == "__main__":
    main(prog_name="python -m immortal.patterns.clone")
