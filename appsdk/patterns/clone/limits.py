"""Limits and pauses of the clone pattern, each with its reason."""

from __future__ import annotations

SECOND_NS = 1_000_000_000

# --- of a table -------------------------------------------------------------------------------------------------------

KEY_SIZE_BYTES_MAX = 256
KEY_DEPTH_MAX = 16  # parts between "/": each is a subtree that somebody may have
VALUE_SIZE_BYTES_MAX = 1 << 20
ROWS_MAX = 1_000_000
SIZE_BYTES_MAX = 512 << 20  # of keys and values: each publisher and the checkpoint have them in memory
GONE_MAX = (
    100_000  # keys that were deleted, which a client that returns is told; one that was away longer gets all anew
)
CHANGES_MAX = 10_000  # of one update
TTL_S_MAX = 10 * 365 * 86_400.0
ENTITLED_MAX = 10_000  # names
EXPIRED_MAX = 1000  # rows whose time is over, of one look: others are handled in between
ALARMS_MAX = 10_000  # looks of one run of the alarm; then it begins anew, which keeps its history short
ROOM_S = 5.0  # for which a writer that is held up waits, before it asks again

# --- of a publisher, and of forwarders --------------------------------------------------------------------------------

SUBTREES_MAX = 100  # of one client
SUBTREES_SIZE_BYTES_MAX = 4096  # of all of them: they are in the row that says who is there
STREAMS_MAX = 10_000  # clients of one publisher; more is what forwarders are for
REQUEST_SIZE_BYTES_MAX = 64 << 10  # of one frame of a client
PART_SIZE_BYTES_MAX = 64 << 10  # of one frame to a client, but for a single larger value
PART_CHANGES_MAX = 1000
# Changes of some time go in one frame: under load, a frame for each would be what costs. The pause is so many times
# what the last frames took to send, so a publisher is busy with it for a fifth of its time.
FLUSH_PAUSES = 4
FLUSH_S_MIN = 0.0002
FLUSH_S_MAX = 0.02
REPORT_S = 0.1  # between two reports for operators, each of which names all clients
BEAT_S = 1.0  # each side says a word so often
ASK_S = 0.05  # and a client sooner, then later and later, from its request until it knows that nothing was lost
ASK_GROWTH = 1.5
SILENCE_S = 5.0  # who says none for so long is gone
WINDOW_BYTES_DEFAULT = 1 << 20  # in flight to one client
WINDOW_BYTES_MIN = 4 << 10
WINDOW_BYTES_MAX = 64 << 20
MARK_BYTES_DEFAULT = 4 << 20  # the high-water mark: what waits for one client beyond its window
MARK_BYTES_MIN = 4 << 10
MARK_BYTES_MAX = 64 << 20
HISTORY_BYTES = 1 << 20  # of each view, so that who joins in step need not be brought up to date
WALKS_MAX = 64  # clients that are brought up to date at a time: each has a list of rows
BLOCKING_S = 10.0  # a client that may block holds up writers for so long, then it is ended
PRESENCE_S = 0.2  # who came and who went is told to the table so often
LEASE_S = 5.0  # a forwarder without a word for so long is gone, and its clients
FORWARDERS_MAX = 1000
LABEL_SIZE_BYTES_MAX = 128  # what a client calls itself
HANDSHAKE_TIMEOUT_MS = 10_000  # all clients may come at the same time
BACKLOG = 4096  # connections that the kernel holds for ZeroMQ: behind a crash all clients come back at once
CLOSE_LINGER_MS = 100  # as the messenger's: ZeroMQ may end the process where it is cut off in a message

# --- of a client ------------------------------------------------------------------------------------------------------

TIMEOUT_DEFAULT_S = 30.0  # as immortal.appsdk.client's
RETRY_S = 0.2  # between two attempts to find a publisher
RETRY_S_MAX = 2.0
PART_S = 0.5  # for a publisher to say that it has heard of the end
CONNECT_S = 2.5  # for an answer to the first word; then the next place
CHANGES_WAITING_MAX = 10_000  # that wait for who reads changes(); beyond it nothing more is taken in
PART_RECEIVED_SIZE_BYTES_MAX = VALUE_SIZE_BYTES_MAX + REQUEST_SIZE_BYTES_MAX + (1 << 20)
RECONNECT_MS_MIN = 10
RECONNECT_MS_MAX = 500
CONNECT_TIMEOUT_MS = 1_000
