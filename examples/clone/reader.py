"""A client that follows a table, and prints its copy on request: python reader.py TABLE [PUBLISHER ...]

On stdin: the number of an update. On stdout, once that update has arrived: a line with JSON, see `main`.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from immortal.patterns.clone import connect


def main(table: str, *publishers: str) -> None:
    with connect(table, int, label="reader", publishers=publishers, timeout=120.0) as clone:
        changes = clone.changes(timeout=120.0)
        start, values = clone.snapshot()
        last, backwards = start, 0
        print(json.dumps({"at": start}), flush=True)
        for line in sys.stdin:
            until = int(line)
            clone.wait(until)
            while last < until or values != clone.snapshot()[1]:
                change = next(changes)  # ends the process if there is no change in time
                backwards += change.number < last
                last = max(last, change.number)
                if change.value is not None:
                    values[change.key] = change.value
                else:
                    values.pop(change.key, None)
            number, copy = clone.snapshot()
            told = {"number": number, "values": copy, "same": values == copy, "backwards": backwards}
            print(json.dumps({**told, **asdict(clone.counts)}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
