"""A table and its live copies. `docs/patterns/clone.md`."""

from immortal.appsdk.patterns.clone import (
    AsyncChanges,
    AsyncClone,
    Change,
    Changed,
    Changes,
    Clone,
    CloneConnector,
    CloneError,
    Counts,
    Ended,
    Entitlement,
    Forwarder,
    NotEntitled,
    Place,
    Presence,
    Status,
    Table,
    TableFull,
    Written,
    connect,
)

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

if __name__ == "__main__":
    import sys

    from immortal.appsdk.patterns.clone.__main__ import main

    sys.exit(main())
