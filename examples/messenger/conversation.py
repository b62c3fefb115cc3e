"""A conversation of two turns: a desk offers a price, and waits for the answer to exactly this offer."""

from __future__ import annotations

import threading

from immortal.messenger import Answer, Messenger, Received

SEAT_PRICE = 30


class Desk:
    """Desk that sells seats."""

    def __init__(self) -> None:
        self.free_count = 5

    def loop(self, received: Received) -> None:
        if received.replied:  # by offered(), which got the message first
            return
        count = int(received.parts[0])
        price = SEAT_PRICE * count

        def offered(answer: Received) -> None:
            if answer.parts != [b"yes"]:
                answer.reply(b"as you like")
            elif count > self.free_count:
                answer.reply(b"sold out meanwhile")
            else:
                self.free_count -= count
                answer.reply(b"%d seats for %d, %d left" % (count, price, self.free_count))

        received.reply(b"%d" % price, callback=offered)


def main() -> None:
    desk = Desk()
    done = threading.Semaphore(0)
    results: list[bytes] = []

    def booked(answer: Answer) -> None:
        results.append(answer.parts[0])
        done.release()

    with Messenger() as servers, Messenger() as buyer:
        endpoint = servers.listen("tcp://127.0.0.1:*", desk.loop)

        def decide(answer: Answer) -> None:
            word = b"yes" if int(answer.parts[0]) <= 100 else b"no"
            buyer.converse(endpoint, word, booked, answer.callback_id)

        for seats in (b"3", b"4", b"1"):
            buyer.converse(endpoint, seats, decide)
        for _ in range(3):
            done.acquire()
    print(b"; ".join(results).decode())


if __name__ == "__main__":
    main()
