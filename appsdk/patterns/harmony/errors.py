"""What a ventilator can get wrong."""

from __future__ import annotations


class BatchError(Exception):
    """The cluster or the collector can't do that with this batch: what came, and what was expected."""
