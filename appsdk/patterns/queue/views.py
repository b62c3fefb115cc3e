"""What operators are shown of a queue."""

from __future__ import annotations

from collections import Counter, defaultdict

from immortal.appsdk.patterns.queue import limits
from immortal.appsdk.patterns.queue.records import (
    FunctionView,
    Overview,
    Records,
    State,
    Task,
    TaskDetail,
    TaskView,
    Worker,
    WorkerView,
)


def _overview(records: Records, state: State, now_ns: int) -> Overview:
    """With the first tasks of that state: dead letters the last ones first, others the oldest."""
    counts: Counter[str] = Counter()
    by_function: dict[str, Counter[str]] = defaultdict(Counter)
    for task in records.tasks.values():
        counts[task.state] += 1
        if not task.ended:
            by_function[task.name][task.state] += 1
    for worker in records.workers.values():
        for name in worker.names:
            by_function[name]["workers"] += not worker.disabled
    for name in records.limits:
        by_function[name]["workers"] += 0
    tasks = [task for task in records.tasks.values() if task.state == state]
    tasks.sort(key=lambda task: (-task.ended, task.id))
    return Overview(
        now_ns=now_ns,
        counts={kind: counts[kind] for kind in ("waiting", "delayed", "running", "done", "dead", "dropped")},
        functions=[
            FunctionView(
                name,
                one["waiting"],
                one["delayed"],
                one["running"],
                one["workers"],
                records.limits.get(name),
            )
            for name, one in sorted(by_function.items())
        ],
        workers=[_worker_view(worker) for _, worker in sorted(records.workers.items())],
        tasks=[_task_view(task) for task in tasks[: limits.SHOWN_MAX]],
        late_replies=records.late_replies,
        dead_forgotten=records.dead_forgotten,
    )


def _detail(task: Task) -> TaskDetail:
    return TaskDetail(
        task=_task_view(task),
        arguments=task.arguments,
        result=task.result,
        failures=task.failures,
        tries=task.tries,
        tries_left=task.tries_left,
        timeout_ns=task.timeout_ns,
    )


def _task_view(task: Task) -> TaskView:
    return TaskView(
        id=task.id,
        function=task.name,
        state=task.state,
        key=task.key,
        priority=task.priority,
        dedup=task.dedup,
        attempts=task.attempt,
        worker=task.worker,
        reason=task.reason,
        submitted_ns=task.submitted_ns,
        due_ns=task.due_ns,
        ended_ns=task.ended_ns,
    )


def _worker_view(worker: Worker) -> WorkerView:
    state = "disabled" if worker.disabled else "idle" if worker.call else "busy"
    return WorkerView(
        id=worker.id,
        state=state,
        why=worker.disabled,
        functions=worker.names,
        task=worker.task,
        done=worker.done,
        disabled_count=worker.disabled_count,
        heard_ns=worker.heard_ns,
    )
