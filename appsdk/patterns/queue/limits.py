"""Limits and times of a queue, each with its reason. Sizes are in bytes, times in nanoseconds unless they say so."""

from __future__ import annotations

SECOND_NS = 1_000_000_000

NAME_LENGTH_MAX = 200  # of functions, keys, deduplication keys and workers: all are in each checkpoint
NAMES_MAX = 100  # functions of one worker
WORKERS_MAX = 2000  # each sends a heartbeat a second, which is logged
LIMITED_MAX = 1000  # functions with limits
PRIORITY_MAX = 1000  # and -PRIORITY_MAX

ARGUMENTS_SIZE_BYTES_MAX = 1 << 20  # of one task; larger things belong in a store, and their name in the task
RESULT_SIZE_BYTES_MAX = 1 << 20
REASON_LENGTH_MAX = 1000  # characters
FAILURES_KEPT = 3  # of one task, the last ones

# Open tasks wait or run. Beyond this a submission is refused, and the client decides what to do.
OPEN_TASKS_MAX = 100_000
OPEN_SIZE_BYTES_MAX = 64 << 20

# Tasks that have ended are kept, and so are their deduplication keys: the oldest go first.
ENDED_TASKS_MAX = 10_000
ENDED_SIZE_BYTES_MAX = 64 << 20
ENDED_AGE_NS = 24 * 3600 * SECOND_NS
# Dead letters wait for a person: no time ends them.
DEAD_TASKS_MAX = 10_000
DEAD_SIZE_BYTES_MAX = 64 << 20

TRIES_DEFAULT = 3
TRIES_MAX = 1000
TIMEOUT_DEFAULT_S = 60.0  # of one try
TIMEOUT_S_MAX = 7 * 24 * 3600.0
DELAY_S_MAX = 366 * 24 * 3600.0
RETRY_DELAY_DEFAULT_S = 1.0  # behind the first exception; doubled behind each further one
RETRY_DELAY_NS_MAX = 3600 * SECOND_NS

HEARTBEAT_DEFAULT_S = 1.0
HEARTBEAT_S_MIN, HEARTBEAT_S_MAX = 0.01, 3600.0
STOP_S = 10.0  # a worker that is to end waits so long for a queue that is away
SILENT_HEARTBEATS = 5  # so many without a word, and a worker is disabled: above what a busy machine holds one up
FORGET_NS = 60 * SECOND_NS  # a disabled worker: its call, which nobody may wait for any more, is ended

STARTS_MAX = 1000  # of a rate: each start in the period is kept
STARTS_KEPT_MAX = 100_000  # of all functions and keys; with more, nothing is submitted
PERIOD_S_MAX = 24 * 3600.0
LATE_NS = SECOND_NS  # what is due happens so late: the queue was away, and holds that against no worker
EXCUSED_NS = 5 * SECOND_NS  # besides: until what was said to it meanwhile has come

WAIT_S_MAX = 20.0  # of one question for a result: a client that died is waited with no longer
ALARMS_MAX = 100  # in one journal of the handler that waits for them
SHOWN_MAX = 1000  # tasks in one answer
