"""Limits of all queues, windows and buffers of the core, with reasons."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from immortal.protocol.limits import ARGUMENTS_SIZE_MIB_DEFAULT, NESTING_MAX_DEFAULT

MIB = 1 << 20


class ReplayCheck(enum.StrEnum):
    """Strictness with which a recovery's replay is compared with the log."""

    STRICT = "strict"  # compare the number, receivers, order and contents of calls
    COUNTS = "counts"  # compare all but the contents
    OFF = "off"  # compare nothing


@dataclass(frozen=True, slots=True, eq=False, repr=False)  # for 65 fields these take a while, at each start
class Limits:
    """Limits of the core; all sizes in bytes."""

    group_size_bytes: int = 1 * MIB
    """Size above which a group is sealed. Syncs of 1 MiB run at the disk's full rate; larger ones only add latency."""

    log_retry_ns_min: int = 50_000_000
    """First pause before a request to a silent log is repeated; each further pause is twice as long."""

    log_retry_ns_max: int = 2_000_000_000
    """Longest pause before a request to a silent log is repeated: nobody waits longer once the log is back."""

    stream_retry_ns: int = 2_000_000_000
    """Pause after which a stopped stream greets its receiver again: the cause may be fixed there."""

    barrier_ns: int = 2_000_000_000
    """Longest wait for an instance to confirm a call, before the messages that follow from the call are sent."""

    held_back_retry_ns: int = 250_000_000
    """Pause after which the calls of a caller that has used up its rate are read again. It can make a quarter of a
    second's calls then."""

    hold_off_ns_min: int = 1_000_000_000
    """First hold-off of a caller whose calls have ended the app's process three times; each further one is twice as
    long."""

    hold_off_ns_max: int = 60_000_000_000
    """Longest hold-off: one caller can stand for many people, of whom only one does harm."""

    log_pending_bytes: int = 16 * MIB
    """Input from the app that waits for the log; above this the coordinator does not read from the app."""

    output_memory_bytes: int = 64 * MIB
    """Unacknowledged outputs for one peer in memory, in flight or not; further ones are spilled."""

    spill_limit_bytes: int = 4 << 30
    """Outputs spilled to the log, for all peers; above this, and with memory full, the app is not read."""

    spill_row_bytes: int = 256 << 10
    """Size of a row of spilled outputs, gathered within ``output_memory_bytes``: a row for each call costs more."""

    recent_ns: int = 1_000_000_000
    """Time after which a receiver without an acknowledgement counts as stuck, and one without calls as idle."""

    spill_trim_bytes: int = 16 * MIB
    """Acknowledged spilled outputs above which a step of trimming removes them from the log."""

    peer_window_bytes: int = 16 * MIB
    """Bytes in flight to one peer: two of the largest commits, so that one gathers while the other is synced. A
    receiver's window replaces it, but is never larger."""

    assumed_window_bytes: int = 8 * MIB
    """Window of a receiver that grants none: the value of the protocol."""

    receive_budget_bytes: int = 64 * MIB
    """Bytes in flight from all peers to this instance: shared by the active peers, less what waits for the disk."""

    grant_bytes_min: int = 64 << 10
    """Smallest window of a peer, so that no peer is ever shut out."""

    turn_bytes: int = 1 * MIB
    """Bytes (or one batch) of one sender on their way to the disk while others also send: the longest wait of the
    others."""

    turn_pause_ns_max: int = 1_000_000_000
    """Longest pause after a larger batch that delayed others, until the next such batch."""

    active_ns: int = 10_000_000_000
    """Time after which a peer that has sent nothing gives its share of the budget to the others."""

    arguments_bytes_max: int = ARGUMENTS_SIZE_MIB_DEFAULT * MIB
    """Arguments of one RPC from the app. They are held in memory as a whole, several times."""

    nesting_max: int = NESTING_MAX_DEFAULT
    """Depth of arrays and maps in a message's value, for apps that name who waits (WIRE.md, part 4.1)."""

    held_impulses_bytes: int = 64 * MIB
    """Held impulses, plus one of the largest size, each batch with its overhead. The SDK has 4 MiB of them in
    flight. An app that sends more is refused: a stop in reading would also stop the checkpoint that makes room."""

    log_limit_bytes: int | None = None
    """Size of the log above which input from peers is refused and impulses wait, until a checkpoint makes room."""

    disk_free_bytes_min: int = 0
    """Free space on the log's disk below which input is refused and impulses wait, as well."""

    peer_window_frames: int = 64
    """Frames in flight to one peer; it matters for tiny frames."""

    peer_frame_bytes: int = 512 << 10
    """Approximate size of the frames into which waiting outputs are joined."""

    peer_gather_bytes: int = 64 << 10
    """Size of outputs that get a frame of their own while others are in flight. Fewer bytes wait for more, at most one
    round trip."""

    waiting_frames_max: int = 1024
    """Frames of one sender that wait for acknowledgement: more than ``peer_window_frames`` of an honest sender."""

    greeted_senders_max: int = 1024
    """Senders that have said Hello and sent nothing yet; above this the first is forgotten. It greets again if it has
    anything to send."""

    refused_senders_max: int = 256
    """Refused senders without a stream whose reason is remembered, so that it is reported only once."""

    parked_senders_max: int = 256
    """Instances whose Hellos wait for the end of this instance's first start; others are refused, and greet again."""

    parked_hellos_max: int = 8
    """Parked Hellos of each sender; above this the oldest is forgotten. Its sender has given it up; the newest few can
    have crossed on their way."""

    app_window_bytes: int = 16 * MIB
    """Bytes given to the app and not yet taken by its socket: several joined commits. More is fed from the log."""

    read_size_bytes: int = 1 * MIB
    """Bytes read from the log in one request, to feed the app."""

    chunk_size_bytes: int = 1 * MIB
    """Size of a stored chunk of a checkpoint's blob."""

    chunks_pending_bytes: int = 16 * MIB
    """Chunks that wait for the disk; above this the app is not read."""

    clients_max: int = 100_000
    """Known clients, about 0.6 KiB each with one small reply; above this the least recently used is forgotten."""

    client_keep_ns: int = 24 * 3600 * 1_000_000_000
    """Time after which an unused client is forgotten: nobody repeats a request a day later."""

    client_replies_max: int = 4096
    """Replies kept for one client, in case it asks again; above this the oldest are removed."""

    client_replies_bytes: int = 4 * MIB
    """Bytes of replies kept for one client, with their overhead. The last reply is kept whatever its size."""

    replies_bytes: int = 64 * MIB
    """Bytes of replies kept for all clients; above this those of the least recently used client are removed."""

    client_resend_bytes: int = 8 * MIB
    """Bytes of replies repeated to one client, at once and per second: all that are kept for it fit. It asks for the
    rest later."""

    resend_bytes: int = 16 * MIB
    """Bytes of replies repeated to all clients, at once and per second: to join them takes the loop some 20 ms."""

    gone_replies_max: int = 262_144
    """Numbers of all clients whose replies were removed while an older request is open; above this, such clients
    wait."""

    client_span_max: int = 16_384
    """Numbers from the oldest request that a client can still ask for to its newest: all of them are remembered."""

    requests_open_max: int = 65_536
    """Accepted requests without an answer; above this clients must wait. The app is far behind then."""

    queries_open_max: int = 1024
    """Accepted queries without an answer, not logged; above this clients must ask again later."""

    caller_queries_max: int = 64
    """Open queries of one caller, or of one client if callers have no keys."""

    queries_bytes: int = 16 * MIB
    """Bytes of the arguments of open queries."""

    queries_at_app_max: int = 16
    """Most queries at the app at once; fewer if it answers slowly."""

    queries_at_app_ns: int = 5_000_000
    """Longest wait of a record for the queries given to the app before it, or for two of them."""

    query_barred_ns: int = 60_000_000_000
    """Time for which a query that has changed the state is refused: each such query costs the app a replay."""

    replies_gather_bytes: int = 1 * MIB
    """Replies that wait for the next commit; above this they ask for a commit."""

    checkpoint_trigger_bytes: int = 1024 * MIB
    """Bytes logged since the last checkpoint above which the app is asked for the next one."""

    checkpoint_age_ns: int | None = None
    """Age of the last checkpoint above which, with anything new in the log, the app is asked for the next one."""

    checkpoints_on_standby: bool = False
    """Ask a follower, not the app, for a checkpoint that is due."""

    standby_checkpoint_ns: int = 120_000_000_000
    """Longest wait for a follower's checkpoint; then the app must take it, so that the log stays bounded."""

    letters_max: int = 10_000
    """Dead letters kept for an operator; above this the oldest are dropped."""

    letters_bytes: int = 64 * MIB
    """Bytes of dead letters kept for an operator."""

    verdicts_max: int = 10_000
    """Verdicts on messages after the last checkpoint, kept in memory by the app and this coordinator; above this
    callers with limited permissions are refused until there is a checkpoint."""

    kills_max: int | None = 3
    """Deaths of the app's process in a row at one message, after which the app does not get it again; None: it always
    does."""

    long_handler_s: float = 10.0
    """Duration after which a running handler is reported to the operator."""

    replay_check: ReplayCheck | None = None
    """Strictness of the replay check. None: strict for an app that says Hello; counts for one of the base protocol,
    which can call itself with the current time."""
