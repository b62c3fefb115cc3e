"""Replicated table of keys and values, with live copies at any number of clients: `docs/patterns/clone.md`.

The table is an instance, ``immortal run prices immortal.patterns.clone:Table``; clients (``connect``) and forwarders
(``python -m immortal.appsdk.patterns.clone forward prices``) are plain processes.
"""

from __future__ import annotations

from immortal.appsdk.patterns.clone.copies import (
    AsyncChanges,
    AsyncClone,
    Changed,
    Changes,
    Clone,
    CloneConnector,
    connect,
)
from immortal.appsdk.patterns.clone.forwarder import Forwarder
from immortal.appsdk.patterns.clone.model import (
    Change,
    CloneError,
    Ended,
    Entitlement,
    NotEntitled,
    Place,
    Presence,
    Status,
    TableFull,
    Written,
)
from immortal.appsdk.patterns.clone.subscriber import Counts
from immortal.appsdk.patterns.clone.table import Table

__all__ = [
    "AsyncChanges",
    "AsyncClone",
    "Change",
    "Changed",
    "Changes",
    "Clone",
    "CloneConnector",
    "CloneError",
    "Counts",
    "Ended",
    "Entitlement",
    "Forwarder",
    "NotEntitled",
    "Place",
    "Presence",
    "Status",
    "Table",
    "TableFull",
    "Written",
    "connect",
]
