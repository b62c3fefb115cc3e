"""The reliable pipeline: ventilators send batches of tasks to a cluster, plain worker processes do them, a
collector gets each result once. `docs/guide/harmony.md`.
"""

from __future__ import annotations

from appsdk.patterns.harmony.batch import Progress
from appsdk.patterns.harmony.cluster import Cluster
from appsdk.patterns.harmony.collector import BaseCollector, Collector, Received
from appsdk.patterns.harmony.errors import BatchConflict, BatchError
from appsdk.patterns.harmony.runs import Result
from appsdk.patterns.harmony.ventilator import Batch, Ventilator, connect
from appsdk.patterns.harmony.worker import worker

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
