"""One order for all by a row of PostgreSQL: a sender draws numbers from it, receivers read what has come, in order."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from immortal.bench.processes import BenchError
from scripts.benchmarks.rivals.servers import postgres

SEQUENCER = "sequencer (postgresql)"
SCHEMA = """
CREATE TABLE sequencer (last bigint NOT NULL);
INSERT INTO sequencer VALUES (0);
CREATE TABLE messages (number bigint PRIMARY KEY, data bytea NOT NULL)
"""
_POLL_S = 0.001
_WAIT_S = 120.0


class Sequencer:
    """``receivers`` processes that read."""

    def __init__(self, url: str, receivers: int) -> None:
        import psycopg

        self._connection = psycopg.connect(url, autocommit=True)
        self._connection.execute(SCHEMA)
        command = [sys.executable, "-m", "scripts.benchmarks.rivals.sequencer", url]
        self._receivers = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for _ in range(receivers)
        ]

    def send(self, count: int) -> None:
        """So many messages, in one transaction: the row is locked meanwhile, so others wait for their numbers."""
        with self._connection.cursor() as cursor, self._connection.transaction():
            cursor.execute("UPDATE sequencer SET last = last + %s RETURNING last", (count,))
            row = cursor.fetchone()
            assert row is not None
            first = row[0] - count + 1
            with cursor.copy("COPY messages FROM STDIN (FORMAT BINARY)") as copy:
                copy.set_types(["int8", "bytea"])
                for index in range(count):
                    copy.write_row((first + index, index.to_bytes(16, "big")))

    def last(self) -> int:
        row = self._connection.execute("SELECT last FROM sequencer").fetchone()
        assert row is not None
        last: int = row[0]
        return last

    def wait(self) -> None:
        """Wait until all receivers have all messages."""
        last = self.last()
        for receiver in self._receivers:
            assert receiver.stdin is not None
            receiver.stdin.write(f"{last}\n")
            receiver.stdin.flush()
        for receiver in self._receivers:
            assert receiver.stdout is not None
            if receiver.stdout.readline().strip() != "done":
                raise BenchError("a receiver of the sequencer has ended")

    def close(self) -> None:
        for receiver in self._receivers:
            receiver.kill()
            receiver.communicate()
        self._connection.close()


@contextlib.contextmanager
def sequencer(folder: Path, receivers: int) -> Iterator[Sequencer]:
    """Raises BenchError where there is no PostgreSQL."""
    with postgres(folder) as url:
        found = Sequencer(url, receivers)
        try:
            yield found
        finally:
            found.close()


def _receive(url: str) -> None:
    """Read in order; each line of stdin is a number to come to."""
    import psycopg

    have = 0
    with psycopg.connect(url, autocommit=True) as connection:
        for line in sys.stdin:
            until, deadline_s = int(line), time.monotonic() + _WAIT_S
            while have < until and time.monotonic() < deadline_s:
                rows = connection.execute(
                    "SELECT number, data FROM messages WHERE number > %s ORDER BY number LIMIT 5000", (have,)
                ).fetchall()
                for number, _ in rows:
                    have = number
                if not rows:
                    time.sleep(_POLL_S)
            print("done" if have >= until else "late", flush=True)


if __name__ == "__main__":
    _receive(sys.argv[1])
