"""Many messages with forced retries through the messenger: how often each was delivered, and the cost of tracking.

    .venv/bin/python -m scripts.benchmarks.messenger [--messages N] [--cut-every N] [--json]
    .venv/bin/python -m scripts.benchmarks.messenger --loss 0.01 [--messages N] [--json]

A proxy between sender and receiver cuts the connection after so many messages, in the middle of the bytes on their way.
Also, some replies are later than the time after which the sender sends again. Status 3: a message was not delivered
exactly once, or not in order.

With ``--loss`` there is a network that loses that share of messages and of replies, and delays one in twenty, in place
of the proxy. It measures how often a message is sent, without order and in order. Status 3: as above.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from immortal.messenger import Messenger, Received, RetryPolicy
from tests.helpers.lossy import LossyNetwork
from tests.helpers.proxy import FaultProxy

WAITING_MAX = 10_000  # sent and not acknowledged
LATE_SHARE = 0.02
LATE_S = 0.02
RETRY = RetryPolicy(delay_ns_min=5_000_000, delay_ns_max=50_000_000)
SAMPLED_EVERY = 50
LOSSY_RETRY = RetryPolicy(delay_ns_min=200_000_000, delay_ns_max=400_000_000)  # far above a round trip
LOSSY_LATE_SHARE = 0.05
DEADLINE_S = 60.0  # without any progress


@dataclass(slots=True)
class Figures:
    """Figures of one run with cut connections."""

    messages: int
    seconds: float = 0.0
    delivered_once: int = 0
    delivered_twice_or_more: int = 0
    lost: int = 0
    out_of_order: int = 0
    called_back: int = 0
    cuts: int = 0
    sent_again: int = 0
    duplicates_dropped: int = 0
    replies_sent_again: int = 0
    early_kept: int = 0  # messages that waited for a missing one before them
    replies_kept_max: int = 0
    memory_grown_mib: float = 0.0  # of this process, from a tenth of the messages to the end

    @property
    def right(self) -> bool:
        once = self.delivered_once == self.called_back == self.messages
        return once and not (self.delivered_twice_or_more or self.lost or self.out_of_order)


class Receiver:
    """Receiver that counts deliveries, and delays some replies."""

    def __init__(self, figures: Figures) -> None:
        self.figures = figures
        self.deliveries = bytearray(figures.messages)
        self.count = 0
        self._last = -1
        self._chance = random.Random(1)
        self._late: list[tuple[float, Received]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._reply_late, daemon=True)
        self._thread.start()

    def loop(self, received: Received) -> None:
        number = int.from_bytes(received.parts[0], "little")
        self.deliveries[number] = min(255, self.deliveries[number] + 1)
        self.figures.out_of_order += number != self._last + 1
        self._last = number
        self.count += 1
        if self.count % SAMPLED_EVERY == 0:
            conversation = received._link
            self.figures.replies_kept_max = max(self.figures.replies_kept_max, len(conversation.replies))
        if self._chance.random() < LATE_SHARE:
            self._late.append((time.monotonic() + LATE_S, received))
        else:
            received.reply(b"done")

    def _reply_late(self) -> None:
        while not self._ended.wait(LATE_S / 4):
            while self._late and self._late[0][0] <= time.monotonic():
                self._late.pop(0)[1].reply(b"done")

    def close(self) -> None:
        self._ended.set()
        self._thread.join()


def send_all(sender: Messenger, endpoint: str, messages: int, sent: Callable[[int], None] = lambda number: None) -> int:
    """Send numbered messages, and wait for all replies; return their number. ``sent``: called after each message.

    Raises TimeoutError if there is no progress any more.
    """
    room, called_back = threading.Semaphore(WAITING_MAX), 0

    def replied(parts: list[bytes]) -> None:
        nonlocal called_back
        called_back += 1
        room.release()

    def wait() -> None:
        if not room.acquire(timeout=DEADLINE_S):
            raise TimeoutError(f"after {called_back} of {messages} messages nothing comes back")

    for number in range(messages):
        wait()
        sender.send_message(endpoint, number.to_bytes(4, "little"), replied)
        sent(number)
    for _ in range(WAITING_MAX):
        wait()
    return called_back


def measure(messages: int, cut_every: int) -> Figures:
    """Send ``messages`` and wait for all replies. Raises TimeoutError if there is no progress any more."""
    figures = Figures(messages)
    receiver = Receiver(figures)
    started_s = time.monotonic()
    memory_kib = 0
    servers, sender = Messenger(), Messenger(retry=RETRY)
    with servers, sender, FaultProxy(servers.listen("tcp://127.0.0.1:*", receiver.loop, ordered=True)) as proxy:

        def sent(number: int) -> None:
            nonlocal memory_kib
            if number % cut_every == cut_every - 1:
                figures.cuts += proxy.cut()
            if number == messages // 10:
                memory_kib = _memory_kib()

        figures.called_back = send_all(sender, proxy.endpoint, messages, sent)
        figures.seconds = time.monotonic() - started_s
        figures.sent_again = sender.counters().retried
        figures.duplicates_dropped = servers.counters().duplicates_dropped
        figures.early_kept = servers.counters().early_kept
        figures.replies_sent_again = servers.counters().replies_resent
    receiver.close()
    figures.memory_grown_mib = (_memory_kib() - memory_kib) / 1024
    figures.delivered_once = receiver.deliveries.count(1)
    figures.lost = receiver.deliveries.count(0)
    figures.delivered_twice_or_more = messages - figures.delivered_once - figures.lost
    return figures


@dataclass(slots=True)
class LossFigures:
    """Figures of a run over a network that loses packets."""

    ordered: bool
    messages: int
    seconds: float = 0.0
    cpu_seconds: float = 0.0  # of this process: both ends and the network
    sends_per_message: float = 0.0
    lost: int = 0  # messages and replies, by the network
    late: int = 0
    early_kept: int = 0
    not_once: int = 0
    out_of_order: int = 0

    @property
    def right(self) -> bool:
        return not (self.not_once or (self.ordered and self.out_of_order))


def measure_loss(messages: int, loss: float, *, ordered: bool) -> LossFigures:
    """Send ``messages`` over a lossy network, and wait for all replies. Raises TimeoutError without progress."""
    figures = LossFigures(ordered, messages)
    deliveries = bytearray(messages)
    last = -1

    def loop(received: Received) -> None:
        nonlocal last
        number = int.from_bytes(received.parts[0], "little")
        deliveries[number] = min(255, deliveries[number] + 1)
        figures.out_of_order += number != last + 1
        last = number
        received.reply(b"done")

    started_s, started_cpu_s = time.monotonic(), time.process_time()
    servers, sender = Messenger(), Messenger(retry=LOSSY_RETRY)
    with (
        servers,
        sender,
        LossyNetwork(
            servers.listen("tcp://127.0.0.1:*", loop, ordered=ordered), loss=loss, reordered=LOSSY_LATE_SHARE
        ) as network,
    ):
        send_all(sender, network.endpoint, messages)
        figures.seconds = time.monotonic() - started_s
        figures.cpu_seconds = time.process_time() - started_cpu_s
        figures.sends_per_message = sender.counters().sent / messages
        figures.early_kept = servers.counters().early_kept
        figures.lost, figures.late = network.lost_count, network.late_count
    figures.not_once = messages - deliveries.count(1)
    return figures


def _memory_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, help="default 1,000,000; with --loss 20,000")
    parser.add_argument("--cut-every", type=int, default=10_000, metavar="N")
    parser.add_argument("--loss", type=float, metavar="SHARE")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.loss is not None and not 0 <= options.loss < 1:
        parser.error(f"--loss {options.loss}; a share from 0 to less than 1 was expected")
    if options.messages is None:
        options.messages = 1_000_000 if options.loss is None else 20_000
    for name in ("messages", "cut_every"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)}; at least 1 was expected")
    if options.loss is not None:
        return _print_loss(options.messages, options.loss, as_json=options.json)
    figures = measure(options.messages, options.cut_every)
    if options.json:
        print(json.dumps(asdict(figures)))
    else:
        print(f"{figures.messages:,} messages in {figures.seconds:.1f} s, {figures.cuts} cuts of the connection")
        print(f"delivered exactly once: {figures.delivered_once:,}; lost {figures.lost}, more than once ", end="")
        print(f"{figures.delivered_twice_or_more}, out of order {figures.out_of_order}; ", end="")
        print(f"callbacks {figures.called_back:,}")
        print(f"sent again {figures.sent_again:,}; duplicates dropped {figures.duplicates_dropped:,}, ", end="")
        print(f"too early {figures.early_kept:,}; replies sent again {figures.replies_sent_again:,}")
        print(f"replies kept at most {figures.replies_kept_max:,}; ", end="")
        print(f"memory grown by {figures.memory_grown_mib:.1f} MiB over the last nine tenths")
    return 0 if figures.right else 3


def _print_loss(messages: int, loss: float, *, as_json: bool) -> int:
    both = [measure_loss(messages, loss, ordered=False), measure_loss(messages, loss, ordered=True)]
    if as_json:
        print(json.dumps([asdict(figures) for figures in both]))
    for figures in both if not as_json else ():
        print(f"{'in order' if figures.ordered else 'without order'}: {figures.messages:,} messages, ", end="")
        print(
            f"each sent {figures.sends_per_message:.3f} times; lost {figures.lost:,}, late {figures.late:,}, ", end=""
        )
        print(f"too early {figures.early_kept:,}; not once {figures.not_once}, ", end="")
        print(f"out of order {figures.out_of_order:,}; {figures.seconds:.1f} s, {figures.cpu_seconds:.1f} s of CPU")
    return 0 if all(figures.right for figures in both) else 3


if __name__ == "__main__":
    sys.exit(main())
