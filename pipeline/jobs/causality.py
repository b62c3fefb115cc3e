"""Whether the records of several logs can have been written in any order at all."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping

from immortal.pipeline.jobs.reports import Violation
from immortal.pipeline.jobs.stream_audit import Needs


def impossible_orders(needs: Mapping[tuple[str, str], list[Needs]], known: set[str]) -> list[Violation]:
    """Records that cannot have been written in any order: each waits for another one to come first.

    ``needs``: by (sender, receiver), the receiver's record and the sender's record that lies before it; ``known``: the
    instances whose logs are there. Every log is advanced as far as what its next record needs is there.
    """
    waiting_for: dict[str, list[tuple[int, str, int]]] = defaultdict(list)  # receiver: (record, sender, its record)
    for (sender, receiver), each in needs.items():
        if sender in known and receiver in known:
            waiting_for[receiver] += [(one.record, sender, one.sender_record) for one in each]
    everything = 1 << 63
    done = dict.fromkeys(known, everything)
    next_index: dict[str, int] = {}
    for receiver, records in waiting_for.items():
        records.sort()
        next_index[receiver] = 0
        done[receiver] = records[0][0] - 1
    sleepers: dict[str, list[tuple[int, str]]] = defaultdict(list)  # sender: (record waited for, receiver)
    ready = list(waiting_for)
    while ready:
        receiver = ready.pop()
        records = waiting_for[receiver]
        index = next_index[receiver]
        while True:
            done[receiver] = records[index][0] - 1 if index < len(records) else everything
            if index == len(records):
                break
            _, sender, sender_record = records[index]
            if done[sender] < sender_record:
                heapq.heappush(sleepers[sender], (sender_record, receiver))
                break
            index += 1
        next_index[receiver] = index
        asleep = sleepers[receiver]
        while asleep and asleep[0][0] <= done[receiver]:
            ready.append(heapq.heappop(asleep)[1])
    stuck = []
    for receiver, records in sorted(waiting_for.items()):
        if next_index[receiver] < len(records):
            record, sender, sender_record = records[next_index[receiver]]
            text = (
                f"record {record} of {receiver!r} holds a message made behind record {sender_record} of {sender!r},"
                f" which itself lies behind what follows record {record} of {receiver!r}: an effect before its cause"
            )
            stuck.append(Violation("causality", sender, receiver, 0, 0, record, text))
    return stuck
