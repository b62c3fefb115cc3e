"""immortal.testing: functions of the test's in place of effects."""

from __future__ import annotations

from datetime import timedelta

import pytest

import immortal
from immortal import EffectFailed, Immortal, Retry, effect_context, impulse, rpc
from immortal.errors import UsageError
from immortal.testing import Environment, NoAnswerError, crash_everywhere


class NotFoundError(Exception):
    pass


def fetch(url: str, limit: int = 3) -> str:
    raise AssertionError("the outside world")


async def ping(host: str) -> float:
    raise AssertionError("the outside world")


class Crawler(Immortal):
    pages: dict[str, str]

    def __init__(self) -> None:
        self.pages = {}

    @rpc
    def keep(self, url: str, text: str) -> int:
        self.pages[url] = text
        return len(self.pages)

    @impulse
    async def crawl(self, url: str) -> str:
        careful = immortal.effect.options(
            retry=Retry(attempts=3, first_wait=timedelta(minutes=1), on=(OSError,)), raises=[NotFoundError]
        )
        try:
            text = await careful(fetch, url, limit=5)
        except NotFoundError:
            text = "not found"
        except EffectFailed as failed:
            text = failed.type_name
        await immortal.step(self.keep, url, text)  # type: ignore[misc] # a step: mypy needs the plugin
        return text

    @impulse
    async def reach(self, host: str) -> float:
        return await immortal.effect(ping, host)


def test_a_stand_in_gets_the_arguments_and_gives_the_result() -> None:
    asked: list[object] = []

    def stand_in(url: str, limit: int) -> str:
        asked.append((url, limit, effect_context().attempt))
        return url.upper()

    with Environment() as env:
        crawler = env.start(Crawler, "crawler", effects={fetch: stand_in})
        assert crawler.call(Crawler.crawl, "x") == "X"
        crawler.crash()
        crawler.recover()
        assert crawler.state.pages == {"x": "X"}
    assert asked == [("x", 5, 1)]


def test_attempts_wait_by_the_tests_clock() -> None:
    attempts = []

    def stand_in(url: str, limit: int) -> str:
        attempts.append((effect_context().attempt, env.now))
        if len(attempts) < 3 or url == "never":
            raise ConnectionError
        return "late"

    with Environment() as env:
        began = env.now
        crawler = env.start(Crawler, "crawler", effects={fetch: stand_in})
        assert crawler.call(Crawler.crawl, "x") == "late"
        assert attempts == [(n, began + timedelta(minutes=m)) for n, m in [(1, 0), (2, 1), (3, 2)]]
        assert crawler.call(Crawler.crawl, "never") == "ConnectionError"


def test_what_is_declared_is_raised_and_async_stand_ins_are_awaited() -> None:
    def not_there(url: str, limit: int) -> str:
        raise NotFoundError(url)

    async def near(host: str) -> float:
        return 0.5

    with Environment() as env:
        crawler = env.start(Crawler, "crawler", effects={fetch: not_there, ping: near})
        assert crawler.call(Crawler.crawl, "x") == "not found"
        assert crawler.call(Crawler.reach, "x") == 0.5


def test_no_test_reaches_the_outside_world_by_mistake() -> None:
    env = Environment()
    crawler = env.start(Crawler, "crawler")
    with pytest.raises(UsageError, match=r"the effect fetch\('x', 5\).*effects=\{fetch: \.\.\.\}"):
        crawler.call(Crawler.crawl, "x")


def test_a_stand_in_that_returns_something_else_is_the_tests_mistake() -> None:
    env = Environment()
    crawler = env.start(Crawler, "crawler", effects={fetch: lambda url, limit: 5})
    with pytest.raises(TypeError, match="fetch"):
        crawler.call(Crawler.crawl, "x")


def test_an_effect_is_done_at_least_once_and_its_result_is_seen_once() -> None:
    most = 0
    for env in crash_everywhere():
        keys = []

        def stand_in(url: str, limit: int, keys: list[str] = keys) -> str:
            keys.append(effect_context().key)
            return f"attempt {len(keys)}"

        with env:
            crawler = env.start(Crawler, "crawler", effects={fetch: stand_in})
            said = crawler.call(Crawler.crawl, "x")
            assert crawler.state.pages == {"x": said}
            assert len(set(keys)) == 1
            most = max(most, len(keys))
    assert most == 2


def test_an_effect_that_never_comes_back_is_named() -> None:
    def ping_in_vain(host: str) -> float:
        raise ConnectionError("no route")

    with Environment() as env:
        crawler = env.start(Crawler, "crawler", effects={ping: ping_in_vain})
        with pytest.raises(NoAnswerError, match="the effect ping is tried again: ConnectionError: no route"):
            crawler.call(Crawler.reach, "far")
