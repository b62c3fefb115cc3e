"""Consumer of a Redis stream: each message is handled exactly once, in order.

Use it to take work from a queue that others fill. The state has the ID of the last message that was handled, and it is
changed in the same step as the rest: so there is nothing to acknowledge, and a crash between "handled" and
"acknowledged" cannot be. After each recovery the hook reads on behind that ID. The producer may trim what is behind.

REDIS_URL=redis://localhost:6379 immortal dev queue_consumer.py
redis-cli XADD orders '*' item tea count 2
"""

import os
from typing import Any

from redis import Redis
from redis.backoff import ExponentialBackoff
from redis.retry import Retry

from immortal import Immortal, Impulses, impulse, on_primary, query

STREAM = "orders"


class Stock(Immortal):
    sold: dict[str, int]
    last: str  # the ID of the message that was handled last

    def __init__(self) -> None:
        self.sold, self.last = {}, "0"

    @impulse
    def take(self, id_: str, fields: dict[str, str]) -> None:
        self.last = id_
        try:
            item, count = fields["item"], int(fields["count"])
        except (KeyError, ValueError):
            return  # no order: a message that nobody can read must not come again and again
        self.sold[item] = self.sold.get(item, 0) + count

    @on_primary
    def consume(self, impulses: Impulses) -> None:
        last = self.last
        without_end = Retry(ExponentialBackoff(cap=10), retries=-1)  # the server may be away
        redis: Any = Redis.from_url(os.environ["REDIS_URL"], decode_responses=True, protocol=2, retry=without_end)
        while True:
            for _, messages in redis.xread({STREAM: last}, count=100, block=2000):
                for last, fields in messages:
                    impulses.take(last, fields)

    @query
    def total(self, item: str) -> int:
        return self.sold.get(item, 0)
