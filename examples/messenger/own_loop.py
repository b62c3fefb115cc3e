"""The messenger without a thread of its own: one descriptor in the program's own loop."""

from __future__ import annotations

import select
import time

from immortal.messenger import Messenger, Received

arrived: list[bytes] = []
replies: list[bytes] = []


def loop(received: Received) -> None:
    arrived.append(received.parts[0])
    received.reply(received.parts[0].upper())


def main() -> None:
    messenger = Messenger()
    endpoint = messenger.listen("tcp://127.0.0.1:*", loop)
    for word in (b"to", b"be", b"or", b"not"):
        messenger.send_message(endpoint, word, lambda parts: replies.extend(parts))
    poller = select.poll()
    poller.register(messenger.fileno(), select.POLLIN)  # beside the program's other descriptors
    while len(replies) < 4:
        deadline_ns = messenger.next_deadline_ns()  # the next retry, if no message arrives before
        timeout_ms = None if deadline_ns is None else max(0, (deadline_ns - time.monotonic_ns()) // 1_000_000 + 1)
        poller.poll(timeout_ms)
        messenger.process()
    messenger.close()
    print(b" ".join(replies).decode())


if __name__ == "__main__":
    main()
