"""What a ventilator can get wrong."""

from __future__ import annotations

from immortal.protocol.identity import IdentityConflict


class BatchError(Exception):
    """The cluster or the collector can't do that with this batch: what came, and what was expected."""


class BatchConflict(IdentityConflict, BatchError):  # noqa: N818 (what happened, not what is wrong)
    """The name is that of a batch of another function, collector, or with other tasks. See ``known``, ``given``."""
