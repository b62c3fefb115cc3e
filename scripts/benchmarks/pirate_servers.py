"""Servers that the pirate is measured with: ``python -m scripts.benchmarks.pirate_servers KIND [STORE]``.

Each prints its endpoint, and gives a request back. KIND: ``bare`` (a REP socket alone), ``pirate``, ``stored``.
"""

from __future__ import annotations

import sys

import zmq

from immortal.patterns.pirate import Request, Server

ENDPOINT = "tcp://127.0.0.1:*"


def echo(request: Request) -> bytes:
    return request.body


def bare() -> None:
    with zmq.Context() as context, context.socket(zmq.REP) as socket:
        socket.bind(ENDPOINT)
        print(socket.getsockopt_string(zmq.LAST_ENDPOINT), flush=True)
        while True:
            socket.send(socket.recv())


def main() -> None:
    kind, *store = sys.argv[1:]
    if kind == "bare":
        bare()
    server = Server(echo, ENDPOINT, store=store[0] if store else None)
    print(server.endpoint, flush=True)
    server.run()


if __name__ == "__main__":
    main()
