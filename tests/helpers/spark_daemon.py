"""Daemon of Spark's workers in tests: the processes that their tasks start are forked, as those of the tests are.

Spark starts it in place of ``pyspark.daemon``, with the same argument.
"""

from __future__ import annotations

import socket

from pyspark import daemon

from tests.helpers import fork_server

_worker = daemon.worker


def worker(connection: socket.socket, authenticated: bool) -> int:
    fork_server.start_at_first_use()
    return _worker(connection, authenticated)


if __name__ == "__main__":
    daemon.worker = worker
    daemon.manager()
