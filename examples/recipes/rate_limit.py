"""Client with a rate limit: an API that allows 50 requests a minute gets them one by one, through crashes too.

Use it where a service that you call counts your requests. Calls wait for their turn, in order. The time of the last one
is part of the state, so no crash opens a second burst; only a request that a crash cut off is made again at once. A
429, a failing server and a failing network hold up all calls.

immortal dev rate_limit.py
immortal call client get /users/17
"""

import urllib.error
import urllib.request
from datetime import datetime, timedelta

import immortal
from immortal import Immortal, Retry, rpc

URL = "https://api.example.org"
INTERVAL = timedelta(minutes=1) / 50


class TryLater(Exception):  # noqa: N818 (what the API says)
    """Raised when the API does not answer now. Argument: in how many seconds to try again."""


def fetch(path: str) -> str:
    try:
        with urllib.request.urlopen(URL + path, timeout=10) as answer:
            text: str = answer.read().decode()
            return text
    except urllib.error.HTTPError as error:
        if error.code != 429 and error.code < 500:
            raise
        after = error.headers.get("Retry-After", "")
        raise TryLater(int(after) if after.isdecimal() else 60) from None
    except OSError:
        raise TryLater(10) from None


class Client(Immortal):
    last: datetime | None = None  # when a request was made

    @rpc(limit=1)  # one run at a time; the others wait for their turn, in order
    async def get(self, path: str) -> str:
        once = immortal.effect.options(raises=[TryLater], retry=Retry(attempts=1))
        while True:
            await immortal.sleep(await immortal.step(self.pause))
            try:
                return await once(fetch, path)
            except TryLater as later:
                await immortal.sleep(timedelta(seconds=later.args[0]))

    def pause(self) -> timedelta:
        """Return how long to wait before the next request: never longer, though a clock was set back."""
        now = immortal.now()
        pause = min(max((self.last or now) + INTERVAL - now, timedelta(0)), INTERVAL)
        self.last = now + pause
        return pause
