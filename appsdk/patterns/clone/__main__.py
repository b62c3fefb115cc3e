"""Command of the clone pattern: runs forwarders, lists the clients of a publisher, and watches a table."""

from __future__ import annotations

import argparse
import signal
import sys
import threading

import zmq

from immortal.appsdk.client import ClientError
from immortal.appsdk.client import connect as connect_client
from immortal.appsdk.client.transport import Dealer
from immortal.appsdk.patterns.clone.copies import connect
from immortal.appsdk.patterns.clone.forwarder import Forwarder
from immortal.appsdk.patterns.clone.frames import Look, Report, decode_answer, encode
from immortal.appsdk.patterns.clone.model import (
    CONNECT_S,
    CloneError,
    Place,
)
from immortal.appsdk.patterns.clone.subscriber import Access
from immortal.appsdk.patterns.clone.table import Table
from immortal.protocol.errors import RemoteProtocolError
from immortal.protocol.safe_output import printable_message

_SHOWN_MAX = 10  # clients shown of a publisher whose clients are all in step


def _say(text: str) -> None:
    """Print a line for people. Control characters in ``text`` (such as in names from elsewhere) are escaped."""
    print(printable_message(text), flush=True)  # noqa: T201 (for a person)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m immortal.appsdk.patterns.clone", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    forward = commands.add_parser("forward", help="publish a table here as well, until Ctrl-C")
    forward.add_argument("table", help="its name")
    forward.add_argument("--listen", default="tcp://127.0.0.1:*", metavar="ENDPOINT", help="where clients connect to")
    forward.add_argument("--advertise", default="", metavar="ENDPOINT", help="what clients are told instead")
    forward.add_argument(
        "--upstream", action="append", default=[], metavar="[NAME@]ENDPOINT", help="a forwarder, in place of the table"
    )
    forward.add_argument("--identity", help="whose keys it shows; by default those of the table")
    forward.add_argument("--blocking", type=float, default=0.0, metavar="SECONDS", help="clients may hold up writers")
    forward.add_argument("--insecure", action="store_true", help="without keys, for everybody")
    show = commands.add_parser("show", help="the table, where it is published, and the clients there")
    show.add_argument("table", help="its name")
    show.add_argument("--all", action="store_true", help="all clients, not only those that are behind or were slow")
    show.add_argument("--identity", help="whose keys to show")
    watch = commands.add_parser("watch", help="print what changes, until Ctrl-C")
    watch.add_argument("table", help="its name")
    watch.add_argument("subtrees", nargs="*", default=[""], help="those of interest")
    watch.add_argument("--identity", help="whose keys to show")
    return parser


def _forward(options: argparse.Namespace) -> None:
    forwarder = Forwarder(
        options.table,
        options.listen,
        upstream=options.upstream,
        identity=options.identity,
        advertise=options.advertise,
        blocking_s=options.blocking,
        insecure=options.insecure,
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: forwarder.stop())
    _say(f"forwarder {forwarder.id} of {options.table} at {forwarder.endpoint}")
    forwarder.run()


def _show(options: argparse.Namespace) -> None:
    with connect_client(Table, options.table, identity=options.identity) as table:
        status = table.status()
        places = table.places()
    sizes = f"{status.rows} rows, {status.size_bytes} bytes"
    _say(f"{options.table}: update {status.number}, {sizes}, {status.present} clients")
    for held in status.held_by:
        _say(f"  writers wait for {held}")
    for place in places:
        report = _look(options.table, place, options.identity)
        what = "table" if place.is_table else "forwarder"
        if report is None:
            _say(f"{what} at {place.endpoint}: no answer")
            continue
        _say(
            f"{what} at {place.endpoint}: update {report.number}, {len(report.streams)} clients; "
            f"{report.ended_slow} ended for being slow, {report.ended_silent} silent"
        )
        shown = [one for one in report.streams if options.all or one.state != "in step" or one.dropped]
        for one in shown or report.streams[:_SHOWN_MAX]:
            subtrees = ",".join(subtree or "everything" for subtree in one.subtrees)
            who = f"{one.stream} {one.label or one.name or '-'}"
            waiting = f"{one.in_flight_bytes} bytes on their way, {one.waiting_bytes} of {one.mark_bytes} wait"
            _say(f"  {who}: {one.state}, {waiting}, {one.policy}, {one.dropped} changes dropped; {subtrees}")


def _look(table: str, place: Place, identity: str | None) -> Report | None:
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


def _watch(options: argparse.Namespace) -> None:
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    with connect(options.table, subtrees=options.subtrees, label="watch", identity=options.identity) as clone:
        changes = clone.changes(timeout=0.2)
        number, values = clone.snapshot()
        for key, value in sorted(values.items()):
            _say(f"{key} = {value!r}")
        while not stopped.is_set():
            for one in changes:
                if one.number > number:
                    _say(
                        f"{one.number}  {one.key} is gone"
                        if one.is_gone
                        else f"{one.number}  {one.key} = {one.value!r}"
                    )
                if stopped.is_set():
                    return


def main() -> int:
    options = _parser().parse_args()
    commands = {"forward": _forward, "show": _show, "watch": _watch}
    try:
        commands[options.command](options)
    except (ClientError, CloneError, ValueError) as error:
        print(printable_message(f"clone: {error}"), file=sys.stderr)  # noqa: T201
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
