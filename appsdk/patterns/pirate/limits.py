"""Limits and pauses of the pirate pattern, each with its reason."""

from __future__ import annotations

# --- of a client ------------------------------------------------------------------------------------------------------

TIMEOUT_DEFAULT_S = 30.0  # of a request with all its tries: above what starting a server again takes
TRIES_DEFAULT = 3  # at one server, where no other may have the request
TRY_TIMEOUT_DEFAULT_S = 2.5  # of one try: above the pauses of a busy machine, as immortal.appsdk.client's
HEARTBEAT_DEFAULT_S = 1.0  # between two pings of a server that has nothing to do for this client
SILENCE_DEFAULT_S = 2.5  # after a ping that nothing came back to: two more were sent meanwhile
REMOVAL_DEFAULT_S = 60.0  # a server that was silent for so long is waited for no more, only pinged
BUSY_S = 0.1  # before a server that had no room is asked again

OPEN_REQUESTS_MAX = 65_536  # of one client: each keeps its body in memory. As many as an instance takes
GIVEN_UP_MAX = 4096  # numbers that may be asked again: as many replies as a server keeps for one client
REGISTRY_POLL_S = 2.0  # for the instances that a pattern means

# --- of a server ------------------------------------------------------------------------------------------------------

# Requests that wait or are worked on, of one name of a key (without keys: of all). One more is told that there is no
# room, and goes to the next server.
WAITING_MAX = 1024
WAITING_SIZE_BYTES_MAX = 64 << 20
# Requests of one write transaction: one sync for all of them. It ends sooner once it has taken so long, since nobody
# has a reply before.
TURN_REQUESTS_MAX = 64
TURN_S = 0.005
TEXT_SIZE_BYTES_MAX = 2048  # of what a function has raised: a message for people

# --- of stored replies, for each name of a key (without keys: all clients together) -----------------------------------

REPLIES_OF_CLIENT_MAX = 4096
REPLIES_OF_CLIENT_SIZE_BYTES_MAX = 4 << 20
REPLIES_SIZE_BYTES_MAX = 64 << 20
REPLY_OVERHEAD_BYTES = 200  # what LMDB needs for the rows of one reply
CLIENTS_MAX = 100_000
# LMDB reserves addresses, not memory or disk. Replies need some 100 MiB for each name; the rest is for the user's rows.
MAP_SIZE_BYTES = 64 << 30
VALUE_SIZE_BYTES_MAX = 64 << 20  # of the user's rows
KEY_SIZE_BYTES_MAX = 511  # LMDB's own

# --- of the wire ------------------------------------------------------------------------------------------------------

CLIENT_ID_SIZE_BYTES_MAX = 64
BODY_SIZE_BYTES_MAX = 16 << 20
RECONNECT_MS_MIN = 10
RECONNECT_MS_MAX = 200
CONNECT_TIMEOUT_MS = 1_000  # as the messenger's: TCP alone asks a machine that is gone after longer and longer waits
HANDSHAKE_TIMEOUT_MS = 3_000
REPLIES_QUEUED_MAX = 64  # on their way to one client inside ZeroMQ; beyond it one is not sent, and is asked for again
CLOSE_LINGER_MS = 100  # as the messenger's: ZeroMQ may end the process where it is cut off in a message
