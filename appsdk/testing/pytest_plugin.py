"""Pytest plugin with the fixture ``immortal_env``. The package installs this plugin, and only pytest loads it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from immortal.appsdk.testing import Environment

_FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    outcome: Any = yield
    if call.when == "call":
        item.stash[_FAILED] = outcome.get_result().failed


@pytest.fixture
def immortal_env(request: pytest.FixtureRequest) -> Iterator[Environment]:
    """Environment for one test. If the test passes, the log of each instance is replayed and compared at its end."""
    from immortal.appsdk.testing import Environment

    env = Environment()
    yield env
    if not request.node.stash.get(_FAILED, False):
        env.close()
