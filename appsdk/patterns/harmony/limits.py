"""All limits of the pipeline, with their reasons."""

from __future__ import annotations

RUN_TASKS_MAX = 4096  # of one message: what a message costs vanishes beside so many tasks
RUN_SIZE_BYTES_MAX = 512 << 10  # of one message, so that none holds up the others; one larger task goes alone
TASK_SIZE_BYTES_MAX = 15 << 20  # a client's call takes 16 MiB; of a task, and of a result
FLUSH_S = 0.1  # a task that was put leaves with the next one after so long, however few there are

WAITING_TASKS_MAX = 16 * RUN_TASKS_MAX  # of one batch, given to nobody yet: then its ventilator waits
JOINED_TASKS_MAX = (
    256  # what waits is joined up to so many: a ventilator that puts one now and then makes no small runs
)
JOINED_SIZE_BYTES_MAX = 16 << 10  # ... of so few bytes that nobody feels it
WAITING_SIZE_BYTES_MAX = 8 << 20
BATCHES_OPEN_MAX = 1000  # of one cluster
BATCHES_ENDED_MAX = 10_000  # whose last progress a cluster keeps; the oldest go
NAME_SIZE_BYTES_MAX = 128  # of a batch, a function, a worker
REASON_SIZE_CHARS_MAX = 500  # of what a failed task says

RUN_S = 0.5  # of work that a worker takes at a time: what its death can cost, and how often it speaks
BEAT_S = 1.0  # a worker says a word so often while it works
IDLE_S = 5.0  # one without work asks again so often, unless it is called
SILENCE_S = 5.0  # a worker without a word for so long is lost
DEATHS_MAX = 3  # so many workers were lost with this one task in hand: it is set aside
LOST_PARTS = 16  # what was lost goes on in so many parts, so that a task that kills is found among the others
