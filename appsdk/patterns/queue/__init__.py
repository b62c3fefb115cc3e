"""Durable queue: clients submit tasks, workers do them, and no crash of a client, worker or queue loses one.

The queue is an instance, ``immortal run jobs immortal.patterns.queue:Queue``; clients (``connect``) and workers
(``work``) are plain processes. `docs/patterns/queue.md`.
"""

from __future__ import annotations

from immortal.appsdk.patterns.queue.clients import AsyncJob, AsyncJobs, Job, Jobs, JobsConnector, connect
from immortal.appsdk.patterns.queue.model import (
    DedupConflict,
    NotDone,
    NotPossible,
    QueueError,
    QueueFull,
    Reject,
    Superseded,
    TaskFailed,
    UnknownTask,
)
from immortal.appsdk.patterns.queue.service import Queue
from immortal.appsdk.patterns.queue.worker import CurrentTask, Worker, current_task, work

__all__ = [
    "AsyncJob",
    "AsyncJobs",
    "CurrentTask",
    "DedupConflict",
    "Job",
    "Jobs",
    "JobsConnector",
    "NotDone",
    "NotPossible",
    "Queue",
    "QueueError",
    "QueueFull",
    "Reject",
    "Superseded",
    "TaskFailed",
    "UnknownTask",
    "Worker",
    "connect",
    "current_task",
    "work",
]
