"""Fixtures that several folders of tests share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


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
