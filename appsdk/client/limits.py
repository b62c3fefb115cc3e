"""Limits and pauses of a client, each with its reason. Times are in seconds."""

from __future__ import annotations

TIMEOUT_DEFAULT_S = 30.0  # of a call: above what a crash and recovery of a usual service takes

OUTSTANDING_MAX = 4096  # of one client ID: sent and not answered; later calls wait here. The replies are all kept there
OUTSTANDING_SIZE_BYTES_MAX = 8 << 20
REQUEST_SIZE_BYTES_MAX = 256 << 10  # calls that wait are joined into frames of about this size
REQUEST_COUNT_MAX = 256
ARGUMENTS_SIZE_BYTES_MAX = (16 << 20) - 1024  # of one call: the coordinator takes no larger frame

# A reply that does not come is asked for, less and less often: it may have been lost with a connection.
POLL_MIN_S = 0.1
POLL_MAX_S = 1.0
RESENT_BYTES_PER_S = 4 << 20  # ... and with an ID or key that others may have, sent again: large ones less often
QUERIES_SENT_MAX = 64  # queries that are not logged, sent and not answered: as many as a coordinator takes of a caller
QUERY_POLL_S = 1.0  # one that is not answered is asked again: it may have been lost with a connection
IDLE_POLL_S = 5.0  # with nothing outstanding: whether there is still somebody
HELLO_MIN_S = 0.05  # until somebody answers
HELLO_MAX_S = 1.0
METHODS_POLL_S = 0.2  # for the names of the methods, while the app is not up yet

# Nothing was heard for so long although there were questions: the next endpoint, or the same anew, with what the
# registry says by then. Above the pauses of a busy coordinator.
SILENCE_S = 2.5
SILENCE_CALLING_S = 0.5  # ... while nobody has answered yet, and there is another endpoint to try
DESERTED_S = 0.1  # where nobody listens, and there is another endpoint to try
MOVED_POLL_S = 0.05  # whether the copy of a shared registry has changed: a comparison of two numbers
# An instance that seems to be stopped, or not to know the key, may just be starting, or about to look for keys.
STOPPED_S = 1.5
KEY_RETRY_S = 1.0  # an instance looks for new keys and callers once a second
KEY_REFUSED_S = 2.0
BUSY_S = 0.1  # before what was not taken is sent again

RECONNECT_MS_MIN = 10
RECONNECT_MS_MAX = 200
QUEUED_MAX = 16_384  # frames inside ZeroMQ
MESSAGE_SIZE_BYTES_MAX = 72 << 20  # a reply may be as large as a message: 64 MiB, and what stands in front
