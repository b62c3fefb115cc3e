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

import json
import random
import resource
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial

import click

from immortal.messenger import Messenger, Received, RetryPolicy
from immortal.protocol.command_line import echo, json_option
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

Network = FaultProxy | LossyNetwork


@dataclass(slots=True)
class Figures:
    """Figures of one run."""

    ordered: bool
    messages: int
    seconds: float = 0.0
    cpu_seconds: float = 0.0  # of this process: both ends and the network
    delivered_once: int = 0
    delivered_twice_or_more: int = 0
    lost: int = 0
    out_of_order: int = 0
    called_back: int = 0
    cuts: int = 0
    lost_by_network: int = 0  # messages and replies
    late_by_network: int = 0
    sends_per_message: float = 0.0
    sent_again: int = 0
    duplicates_dropped: int = 0
    replies_sent_again: int = 0
    early_kept: int = 0  # messages that waited for a missing one before them
    replies_kept_max: int = 0
    memory_grown_mib: float = 0.0  # of this process, from a tenth of the messages to the end

    @property
    def right(self) -> bool:
        once = self.delivered_once == self.called_back == self.messages
        return once and not (self.ordered and self.out_of_order)


class Receiver:
    """Receiver that counts deliveries, and delays a share of the replies."""

    def __init__(self, figures: Figures, late_share: float) -> None:
        self.deliveries = bytearray(figures.messages)
        self._figures = figures
        self._late_share = late_share
        self._count, self._last = 0, -1
        self._chance = random.Random(1)
        self._late: list[tuple[float, Received]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._reply_late, daemon=True)
        self._thread.start()

    def loop(self, received: Received) -> None:
        number = int.from_bytes(received.parts[0], "little")
        self.deliveries[number] = min(255, self.deliveries[number] + 1)
        self._figures.out_of_order += number != self._last + 1
        self._last = number
        self._count += 1
        if self._count % SAMPLED_EVERY == 0:
            replies = len(received._link.replies)
            self._figures.replies_kept_max = max(self._figures.replies_kept_max, replies)
        if self._chance.random() < self._late_share:
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


def send_all(sender: Messenger, endpoint: str, messages: int, sent: Callable[[int], None]) -> int:
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


def measure(
    messages: int,
    network_to: Callable[[str], AbstractContextManager[Network]],
    retry: RetryPolicy,
    *,
    ordered: bool = True,
    cut_every: int = 0,
) -> Figures:
    """Send ``messages`` through a network and wait for all replies. Raises TimeoutError without progress."""
    figures = Figures(ordered, messages)
    receiver = Receiver(figures, LATE_SHARE if cut_every else 0)
    started_s, started_cpu_s, memory_kib = time.monotonic(), time.process_time(), 0
    servers, sender = Messenger(), Messenger(retry=retry)
    with servers, sender, network_to(servers.listen("tcp://127.0.0.1:*", receiver.loop, ordered=ordered)) as network:

        def sent(number: int) -> None:
            nonlocal memory_kib
            if cut_every and number % cut_every == cut_every - 1 and isinstance(network, FaultProxy):
                figures.cuts += network.cut()
            if number == messages // 10:
                memory_kib = _memory_kib()

        figures.called_back = send_all(sender, network.endpoint, messages, sent)
        figures.seconds = time.monotonic() - started_s
        figures.cpu_seconds = time.process_time() - started_cpu_s
        ours, theirs = sender.counters(), servers.counters()
        figures.sent_again, figures.sends_per_message = ours.retried, ours.sent / messages
        figures.duplicates_dropped, figures.early_kept = theirs.duplicates_dropped, theirs.early_kept
        figures.replies_sent_again = theirs.replies_resent
        if isinstance(network, LossyNetwork):
            figures.lost_by_network, figures.late_by_network = network.lost_count, network.late_count
    receiver.close()
    figures.memory_grown_mib = (_memory_kib() - memory_kib) / 1024
    figures.delivered_once = receiver.deliveries.count(1)
    figures.lost = receiver.deliveries.count(0)
    figures.delivered_twice_or_more = messages - figures.delivered_once - figures.lost
    return figures


def _memory_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@click.command()
@click.option("--messages", type=click.IntRange(1), help="[default: 1,000,000; with --loss 20,000]")
@click.option("--cut-every", type=click.IntRange(1), default=10_000, show_default=True, metavar="N")
@click.option("--loss", type=click.FloatRange(0, 1, max_open=True), metavar="SHARE")
@json_option
def main(messages: int | None, cut_every: int, loss: float | None, as_json: bool) -> None:
    """Send many messages with forced retries, and count how often each is delivered."""
    if loss is None:
        runs = [measure(messages or 1_000_000, FaultProxy, RETRY, cut_every=cut_every)]
    else:
        lossy = partial(LossyNetwork, loss=loss, reordered=LOSSY_LATE_SHARE)
        runs = [measure(messages or 20_000, lossy, LOSSY_RETRY, ordered=ordered) for ordered in (False, True)]
    if as_json:
        echo(json.dumps(asdict(runs[0]) if loss is None else [asdict(run) for run in runs]))
    for run in () if as_json else runs:
        for name, value in asdict(run).items():
            echo(f"{name.replace('_', ' ')}: {round(value, 3):,}")
    sys.exit(0 if all(run.right for run in runs) else 3)


if __name__ == "__main__":
    main()
