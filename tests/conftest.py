"""Fixtures that several folders of tests share."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def pytest_configure() -> None:
    """Processes that tests start can be interrupted, also where the run is a shell's background job."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as such a shell leaves it, and as children would have it
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def signals_as_they_were() -> Iterator[None]:
    """A coordinator that a test has run in here ignores signals at its end, and so would all that is started later."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        if signal.getsignal(number) != handler:
            signal.signal(number, handler)


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """The one Spark session of a test run: starting it takes seconds."""
    from pipeline.errors import JavaError
    from pipeline.java import find_java
    from tests.helpers.spark import running_session  # pyspark is imported only where a test asks for it

    try:
        find_java()
    except JavaError as error:
        pytest.skip(str(error))
    with running_session() as session:
        yield session
