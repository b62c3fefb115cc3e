"""The client's sockets, over real ones."""

from __future__ import annotations

import socket
import time

from appsdk.client.connection import Connection
from appsdk.client.places import Finder
from appsdk.client.transport import Transport

REOPENED = 400  # one in a hundred or so was enough
ACCEPTED_S = 10.0


def test_a_socket_that_is_made_anew_while_nobody_listens_connects_to_who_listens_then() -> None:
    """Found by the soak: ZeroMQ's thread waited for ever for who was to hear of the socket before."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))  # and does not listen yet
        endpoint = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        connection = Connection("shop", "somebody", time.monotonic())
        transport = Transport(connection, Finder("shop", endpoints=[endpoint], insecure=True))
        for count in range(REOPENED):
            time.sleep(0.0004 * (count % 30))  # at each moment of an attempt to connect
            transport._reopen(time.monotonic())
        listener.listen()
        listener.settimeout(ACCEPTED_S)
        listener.accept()[0].close()
        transport.close()
