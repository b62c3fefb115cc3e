"""Logging of a coordinator that runs in the process of the tests."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def kept_logging() -> Iterator[None]:
    """Restore the coordinator's logger at the end: other tests check what is logged."""
    logger = logging.getLogger("immortal.coordinator")
    handlers, propagate, level = logger.handlers[:], logger.propagate, logger.level
    try:
        yield
    finally:
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)
