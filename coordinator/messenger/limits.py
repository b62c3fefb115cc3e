"""Every limit of the messenger, with its reason."""

from __future__ import annotations

# Sent on one link and not yet acknowledged; later ones wait in the sender's buffer, in order. A link's IDs
# in flight all lie within this distance of the lowest that is unacknowledged. Large enough that a link
# never waits for a round trip, small enough that all of it can be sent again at a reconnect. It bounds what a receiver
# that does not read has to hold, too: of what is sent again, at most as much goes out before something is heard.
IN_FLIGHT_MAX = 1024

# The same in bytes: what a receiver that has stopped reading may have to buffer for one link. One message
# is always let through, however large.
IN_FLIGHT_SIZE_BYTES_MAX = 64 * 2**20

# Not acknowledged by one destination, sent or not, unless the messenger is given other limits: beyond either no more is
# taken. Far above what is in flight, and small enough that a program learns of a destination that is gone before its
# memory is full. One message is always taken, however large.
PENDING_MAX = 65_536
PENDING_SIZE_BYTES_MAX = 256 * 2**20

# What a receiver accepts: an ID this far above the sender's lowest unacknowledged one is refused. It bounds the
# replies kept for each link. Above any sender's IN_FLIGHT_MAX, so that the latter can grow.
SPAN_MAX = 8192

# Links whose IDs one listening endpoint remembers; beyond it the one unused for longest is forgotten. It
# costs about 1 KiB each, and is far above the number of peers of one instance.
LINKS_MAX = 4096

# The same of one peer, known by its key: so that none makes those of others be forgotten. A peer has one link here for
# each of its lives, and those of commands that run with its key.
PEER_LINKS_MAX = 64

# Connections of one link that a reply is tried on, the newest first: the older ones are those that have just broken.
ROUTES_MAX = 4

# Connections of which it is remembered that they were told which envelopes are known here.
NOTIFIED_ROUTES_MAX = 256

# Replies kept for one link, in case they were lost on the way: beyond it the oldest is dropped, and the
# sender is told "acknowledged" without it. Each counts with what Python needs to keep it.
REPLIES_SIZE_BYTES_MAX = 16 * 2**20
REPLY_OVERHEAD_BYTES = 200

# The same for all links of one peer, or of all peers without keys: beyond it, that which was unused for longest is
# forgotten, as above.
PEER_REPLIES_SIZE_BYTES_MAX = 64 * 2**20

# Callbacks given with the replies of one link, whose messages have not come: beyond it the oldest is dropped, and its
# sender is told so if it addresses it. As many as may be in flight. Each counts with the replies kept, as what Python
# needs to keep a function and a few variables of its own.
CALLBACKS_MAX = 1024
CALLBACK_OVERHEAD_BYTES = 500

# Replies on their way to one peer inside ZeroMQ. Beyond it one is not sent, but it is kept, and the
# sender's retry asks for it.
REPLIES_QUEUED_MAX = 2 * SPAN_MAX

# To one client and not taken by its connection: beyond it a reply is not sent, but it is kept, and the client asks for
# it. All clients together; beyond that each still gets a small share. One message may be larger than a client's.
CLIENT_QUEUED_SIZE_BYTES_MAX = 8 * 2**20
CLIENTS_QUEUED_SIZE_BYTES_MAX = 64 * 2**20
CLIENT_SHARE_SIZE_BYTES = 64 * 2**10

# A part of a message: a call may be as large as a record. A stranger can make us reserve no more memory.
PART_SIZE_BYTES_MAX = 2**30
PARTS_MAX = 1024
RECEIVED_PARTS_MAX = PARTS_MAX + 2  # with the routing ID in front, and one too many

# A reply travels as one part: its parts together.
REPLY_SIZE_BYTES_MAX = 255 * 2**20

# ZeroMQ's threads. Each connection belongs to the one that has fewest: 8 MiB of one peer take it 10 ms and more to
# decrypt, and only those that share its thread wait for that.
IO_THREADS = 4

# Below it, a part is cheaper to copy than to share with ZeroMQ's thread.
LARGE_PART_SIZE_BYTES = 32 * 1024

# Messages taken from one socket before the next has its turn, and turns in one process(); what is left
# makes the descriptor readable again.
RECEIVED_PER_TURN_MAX = 1000
TURNS_MAX = 16

# Messages sent between two looks at whether the link is still the same connection: a few hundred microseconds,
# far below the RECONNECT_MS_MIN that a new connection takes at least.
SENT_PER_MONITOR_CHECK = 64
RECONNECT_MS_MIN = 10
RECONNECT_MS_MAX = 200

# A link that is closed gets so long to finish what it is sending: without it, ZeroMQ ends the whole process where the
# connection breaks in the middle of a message at the same moment (an assertion in session_base.cpp, clean_pipes).
CLOSE_LINGER_MS = 100

# A connection that gets no answer is begun anew: TCP itself asks after longer and longer waits, so a peer that comes
# back after a minute would be found a minute later. Far above a round trip.
CONNECT_TIMEOUT_MS = 1_000

# A peer whose machine is gone sends no FIN: the kernel asks so often, and drops the connection after so many questions
# without an answer, and one wait more.
KEEPALIVE_S = 5
KEEPALIVE_COUNT = 3

# Nothing at all has come back for so long since a message was sent again: the connection leads nowhere, although it
# stands, and is begun anew. Or its receiver is stuck: so the next wait is twice as long, up to this many times.
SILENCE_NS = 20_000_000_000
SILENCE_DOUBLINGS_MAX = 5

# A connection that has not said who it is by then is closed. Far above what a handshake takes on a busy machine.
HANDSHAKE_TIMEOUT_MS = 3_000

# A connection of one's own waits for longer: the receiver may be stopped, or behind many others.
CONNECT_HANDSHAKE_TIMEOUT_MS = 10_000

# What a connection may bring before it is known who it is: a handshake with CURVE has some 600 bytes. It is looked at
# so often: at the full speed of a loopback connection some MiB come meanwhile, all strangers together.
HANDSHAKE_SIZE_BYTES_MAX = 8 * 1024
HANDSHAKE_POLL_MS = 5
HANDSHAKE_PLAIN_GRACE_MS = 50

# Connections of which it is not known who they are, at one listener: beyond it the oldest is ended. A handshake takes
# milliseconds, so an honest one is through long before.
HANDSHAKES_MAX = 256

# After a handshake that failed, the link is made anew with what is known of its destination by then.
RECONNECT_REFUSED_NS = 200_000_000

# A listener that changes its key must wait until ZeroMQ's thread has released the endpoint: milliseconds.
REBIND_NS = 2_000_000

# Where the owner is patient, replies are looked at with whatever else comes, but at most so much later: far below the
# first retry.
REPLY_DELAY_NS_MAX = 10_000_000

# A warning about a misbehaving peer is logged at most so often.
WARNING_INTERVAL_NS = 5_000_000_000
