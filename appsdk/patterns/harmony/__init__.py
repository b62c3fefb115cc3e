"""Reliable pipeline: ventilators send batches of tasks to a cluster, plain worker processes do them, a collector gets
each result once. `docs/patterns/harmony.md`.
"""

from __future__ import annotations

from immortal.appsdk.patterns.harmony.batch import BatchConflict, BatchError, Progress, Result
from immortal.appsdk.patterns.harmony.cluster import Cluster
from immortal.appsdk.patterns.harmony.collector import BaseCollector, Collector, Received
from immortal.appsdk.patterns.harmony.ventilator import Batch, Ventilator, connect
from immortal.appsdk.patterns.harmony.worker import worker

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
