"""Limits of the messenger, each with its reason."""

from __future__ import annotations

# Messages sent on one link and not yet acknowledged; later ones wait in the sender's buffer, in order. The IDs in
# flight lie within this distance of the lowest unacknowledged one. Large enough that a link never waits for a round
# trip, small enough that all of it can be sent again after a reconnect. It also bounds what a receiver that does not
# read must hold: of messages sent again, at most this many are sent before an answer arrives.
IN_FLIGHT_MAX = 1024

# The same limit in bytes: what a receiver that has stopped reading may have to buffer for one link. One message is
# always sent, however large.
IN_FLIGHT_SIZE_BYTES_MAX = 64 * 2**20

# Messages pending for one destination, sent or not, unless the messenger is given other limits: beyond either limit a
# send is refused. Far above what is in flight, and small enough that a program learns that a destination is gone before
# its memory is full. One message is always taken, however large.
PENDING_MAX = 65_536
PENDING_SIZE_BYTES_MAX = 256 * 2**20

# Receive window: a receiver refuses an ID at this distance from the sender's lowest unacknowledged ID. It bounds the
# replies kept for each link. Above IN_FLIGHT_MAX, so that the latter can grow.
SPAN_MAX = 8192

# Links that one listening endpoint remembers; beyond it the least recently used is forgotten. Each costs about 1 KiB.
# Far above the number of peers of one instance.
LINKS_MAX = 4096

# Links of one peer, known by its key, so that none displaces those of others. A peer has one link here for each of its
# runs, and one for each command that runs with its key.
PEER_LINKS_MAX = 64

# Connections of one link that are tried for a reply, the newest first: an older one has usually broken.
ROUTES_MAX = 4

# Connections remembered, to which this side has sent the kinds of envelopes that it knows.
NOTIFIED_ROUTES_MAX = 256

# Replies kept for one link, in case they are lost in transit: beyond it the oldest is dropped, and the duplicate of its
# message is acknowledged without it. Each counts with Python's overhead for it.
REPLIES_SIZE_BYTES_MAX = 16 * 2**20
REPLY_OVERHEAD_BYTES = 200
PART_OVERHEAD_BYTES = 60

# Replies kept for all links of one peer, or of all peers without keys: beyond it the least recently used link is
# forgotten. Messages that arrive before an earlier one may use the bytes that the replies leave. The limit is as much
# as one sender may have in flight.
PEER_REPLIES_SIZE_BYTES_MAX = 64 * 2**20

# Unused callbacks of one link: beyond it the oldest is dropped, and a sender that addresses it gets an error. As many
# as messages can be in flight. Each counts as one of the replies kept, with Python's overhead for a function and a few
# variables.
CALLBACKS_MAX = 1024
CALLBACK_OVERHEAD_BYTES = 500

# Replies queued in ZeroMQ for one peer. Beyond it a reply is not sent, but it is kept, and the sender's retransmission
# asks for it.
REPLIES_QUEUED_MAX = 2 * SPAN_MAX

# Bytes queued in ZeroMQ for one client: beyond it a reply is not sent, but it is kept, and the client asks for it.
# There is a limit for all clients together; beyond that each still gets a small share. One message may be larger than a
# client's limit.
CLIENT_QUEUED_SIZE_BYTES_MAX = 8 * 2**20
CLIENTS_QUEUED_SIZE_BYTES_MAX = 64 * 2**20
CLIENT_SHARE_SIZE_BYTES = 64 * 2**10

# Size of a part of a message: as large as a record, which can be one call. It bounds the memory that a stranger can
# make us reserve.
PART_SIZE_BYTES_MAX = 2**30
PARTS_MAX = 1024

# A larger message is accepted only if the messenger's owner says that an honest sender can send one.
USUAL_SIZE_BYTES = 64 * 2**20
RECEIVED_PARTS_MAX = PARTS_MAX + 2  # and the routing ID, and one more part, which shows that there are too many

# Size of all parts of a reply together, which is sent as one part.
REPLY_SIZE_BYTES_MAX = 255 * 2**20

# Threads of ZeroMQ. Each connection belongs to the thread that has fewest. To decrypt 8 MiB of one peer takes a thread
# 10 ms and more, and only the connections of that thread wait for it.
IO_THREADS = 4

# Size from which sharing a part with ZeroMQ's thread is cheaper than copying it.
LARGE_PART_SIZE_BYTES = 32 * 1024

# Messages read from one socket before the next socket's turn, and turns in one process(). If messages are left, the
# descriptor stays readable.
RECEIVED_PER_TURN_MAX = 1000
TURNS_MAX = 16

# Messages sent between two checks that the link still has the same connection: a few hundred microseconds, far below
# the RECONNECT_MS_MIN that a new connection takes at least.
SENT_PER_MONITOR_CHECK = 64
RECONNECT_MS_MIN = 10
RECONNECT_MS_MAX = 200

# Time that a closed link gets to finish sending. Without it, ZeroMQ ends the process if the connection breaks in the
# middle of a message at that moment (an assertion in session_base.cpp, clean_pipes).
CLOSE_LINGER_MS = 100

# Time after which a connection attempt without an answer is begun anew. TCP itself retries after longer and longer
# waits, so a peer that returns after a minute would be found a minute later. Far above a round trip.
CONNECT_TIMEOUT_MS = 1_000

# TCP keep-alive: interval of the probes, and how many may stay unanswered before the connection is dropped. A peer
# whose machine is gone sends no FIN.
KEEPALIVE_S = 5
KEEPALIVE_COUNT = 3

# Time without any answer after a retransmission before the connection is begun anew: it may be dead, although it is
# still open. Or its receiver is stuck: so each next wait is twice as long, up to this many doublings.
SILENCE_NS = 20_000_000_000
SILENCE_DOUBLINGS_MAX = 5

# Time that an incoming connection has for its handshake. Far above what that takes on a busy machine.
HANDSHAKE_TIMEOUT_MS = 3_000

# Time that an outgoing connection has for its handshake: the receiver may be stopped, or busy with many others.
CONNECT_HANDSHAKE_TIMEOUT_MS = 10_000

# Bytes that a connection may send before it is authenticated: a CURVE handshake has some 600. The bytes are polled: at
# the full speed of a loopback connection, some MiB arrive between two polls, from all strangers together.
HANDSHAKE_SIZE_BYTES_MAX = 8 * 1024
HANDSHAKE_POLL_MS = 5
HANDSHAKE_PLAIN_GRACE_MS = 50

# Connections at one listener that are not authenticated: beyond it the oldest is ended. A handshake takes milliseconds,
# so an honest one has ended long before.
HANDSHAKES_MAX = 256

# Pause after a failed handshake, before the link is made anew with the keys of its destination that are then known.
RECONNECT_REFUSED_NS = 200_000_000

# Pause between attempts of a listener with a new key to bind: ZeroMQ's thread must have released the endpoint, which
# takes milliseconds.
REBIND_NS = 2_000_000

# Time before a message is sent again. FIRST: while no round trip was measured. MIN: at least this much longer than a
# round trip, as a busy process pauses. GAP_MIN: the same for a message of which later ones have arrived.
RETRANSMIT_NS_FIRST = 100_000_000
RETRANSMIT_NS_MIN = 30_000_000
RETRANSMIT_GAP_NS_MIN = 1_000_000

# Time that is added for each byte in flight (10 MB/s), since round trips may have been measured with small messages.
RETRANSMIT_NS_PER_BYTE = 100

# Longest delay of replies that nobody waits for. They are sent with the next message to their receiver, which reads
# them with its next other input; each side waits no longer than this. Twice this is below the shortest time before a
# message is sent again.
REPLY_DELAY_NS_MAX = 10_000_000

# Delayed replies that are sent with one message: with this many, the sender waits no longer.
PIGGYBACKED_MAX = 4

# Shortest interval between two warnings about misbehaving peers.
WARNING_INTERVAL_NS = 5_000_000_000
