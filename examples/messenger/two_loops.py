"""A replica and a model server side by side behind one messenger, and a primary that uses both."""

from __future__ import annotations

import threading

from immortal.messenger import Messenger, Received

RECORDS = 1000


class Replica:
    """Replica that keeps the primary's records, in order."""

    def __init__(self) -> None:
        self.records: list[bytes] = []

    def loop(self, received: Received) -> None:
        self.records += received.parts
        received.reply(b"%d" % len(self.records))  # the acknowledgement: only once it is applied


class ModelServer:
    """Server that fits y = slope * x to the observed points."""

    def __init__(self) -> None:
        self.xy = self.xx = 0.0

    def loop(self, received: Received) -> None:
        verb, *numbers = received.parts
        if verb == b"observe":
            x, y = map(float, numbers)
            self.xy += x * y
            self.xx += x * x
            received.reply()
        elif verb == b"predict":
            received.reply(b"%g" % (self.xy / self.xx * float(numbers[0])))
        else:
            received.reply(b"unknown: " + verb)


def main() -> None:
    replica, model = Replica(), ModelServer()
    answers: dict[str, bytes] = {}
    both = threading.Semaphore(0)

    def answered(name: str, parts: list[bytes]) -> None:
        answers[name] = parts[0]
        both.release()

    with Messenger() as servers, Messenger() as primary:  # each with a thread of its own
        replication = servers.listen("tcp://127.0.0.1:*", replica.loop, ordered=True)
        models = servers.listen("tcp://127.0.0.1:*", model.loop, ordered=True)
        for x in range(1, RECORDS + 1):
            last = x == RECORDS
            record = b"x=%d y=%d" % (x, 3 * x)
            primary.send_message(replication, record, (lambda parts: answered("replica", parts)) if last else None)
            primary.send_message(models, [b"observe", b"%d" % x, b"%d" % (3 * x)])
        primary.send_message(models, [b"predict", b"2000"], lambda parts: answered("model", parts))
        both.acquire()
        both.acquire()
        print(f"the replica has {answers['replica'].decode()} records, the last is {replica.records[-1].decode()}")
        print(f"the model expects {answers['model'].decode()} at 2000")


if __name__ == "__main__":
    main()
