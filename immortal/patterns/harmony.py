"""Batches over a cluster of workers. `docs/patterns/harmony.md`."""

from immortal.appsdk.patterns.harmony import (
    BaseCollector,
    Batch,
    BatchConflict,
    BatchError,
    Cluster,
    Collector,
    Progress,
    Received,
    Result,
    Ventilator,
    connect,
    worker,
)

__all__ = [
    "BaseCollector",
    "Batch",
    "BatchConflict",
    "BatchError",
    "Cluster",
    "Collector",
    "Progress",
    "Received",
    "Result",
    "Ventilator",
    "connect",
    "worker",
]

if __name__ == "__main__":
    import sys

    from immortal.appsdk.patterns.harmony.__main__ import main

    sys.exit(main())
