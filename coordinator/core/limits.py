"""Every queue, window and buffer of the core, with its reason."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from immortal.protocol.limits import ARGUMENTS_SIZE_MIB_DEFAULT, NESTING_MAX_DEFAULT

MIB = 1 << 20


class ReplayCheck(enum.StrEnum):
    """Strictness with which a recovery's replay is compared with the log."""

    STRICT = "strict"  # how many calls to whom, in which order, and their contents
    COUNTS = "counts"  # all but the contents
    OFF = "off"  # nothing


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the core; all sizes in bytes."""

    group_size_bytes: int = 1 * MIB
    """A group is sealed above this. Syncs of 1 MiB run at the disk's full rate; larger ones only add latency."""

    log_retry_ns_min: int = 50_000_000
    """A log that does not answer is asked again after this, then after twice as long each time ..."""

    log_retry_ns_max: int = 2_000_000_000
    """... up to this: nobody waits longer than that for a log that is there again."""

    stream_retry_ns: int = 2_000_000_000
    """A stream that has stopped greets its receiver again after this: what was wrong may have been mended there."""

    barrier_ns: int = 2_000_000_000
    """An instance that was called, and does not say that it has the call, is waited for no longer than this with what
    follows from the call."""

    held_back_ns: int = 250_000_000
    """Who has used up its rate is heard again after this, and once a quarter of a second's calls may be made."""

    hold_off_ns_min: int = 1_000_000_000
    """A caller that has ended the app's process three times is not heard for this, then for twice as long each time;"""

    hold_off_ns_max: int = 60_000_000_000
    """at most for this: behind one caller may be many people, of which one means harm."""

    log_pending_bytes: int = 16 * MIB
    """Input from the app that waits for the log; above this the app is not read."""

    output_memory_bytes: int = 64 * MIB
    """Outputs for one peer that it has not acknowledged, in memory, those on their way included; more is spilled."""

    spill_limit_bytes: int = 4 << 30
    """Outputs spilled to the log, all peers together; beyond this, and with memory full, the app is not read."""

    spill_row_bytes: int = 256 << 10
    """Spilled outputs gather up to this, within ``output_memory_bytes``: a row for each call costs more."""

    recent_ns: int = 1_000_000_000
    """A receiver that has acknowledged nothing for so long takes nothing; one not called for so long needs nothing."""

    spill_trim_bytes: int = 16 * MIB
    """Spilled outputs that were acknowledged are removed from the log above this: one step of trimming."""

    peer_window_bytes: int = 16 * MIB
    """Sent to one peer and not yet acknowledged: two of the largest commits, so that one gathers while the other is
    synced. Where the receiver has granted a window, that one counts; it grants no more than this."""

    unsaid_window_bytes: int = 8 * MIB
    """... where the receiver says none: the protocol's figure."""

    receive_budget_bytes: int = 64 * MIB
    """What all peers may have on their way here: shared by those that send, less what waits for the disk already."""

    grant_bytes_min: int = 64 << 10
    """A peer is granted at least this, so that none is ever shut out."""

    turn_bytes: int = 1 * MIB
    """Of one sender on its way to the disk, or one batch of it, while others send, too: what they wait for at most."""

    turn_pause_ns_max: int = 1_000_000_000
    """After a larger batch that others had to wait for, until the next one, at most."""

    active_ns: int = 10_000_000_000
    """A peer that has sent nothing for so long gives its share of the budget to the others."""

    arguments_bytes_max: int = ARGUMENTS_SIZE_MIB_DEFAULT * MIB
    """Of one RPC from the app. It is held in memory whole, several times."""

    nesting_max: int = NESTING_MAX_DEFAULT
    """Arrays and maps in one another in a value of a message, for apps that say what WIRE.md's part 4.1 says."""

    held_impulses_bytes: int = 64 * MIB
    """Impulses that must not be taken yet, beside one of the largest size, each batch with what it takes to keep it.
    The SDK has 4 MiB of them on their way. An app that sends on is turned away: to read no more of it would hold up the
    checkpoint that makes room."""

    log_limit_bytes: int | None = None
    """The log's size: above this, input from peers is refused and impulses wait until a checkpoint has made room."""

    disk_free_bytes_min: int = 0
    """... and the same below this much free space on the log's disk."""

    peer_window_frames: int = 64
    """... and as a number, for tiny frames."""

    peer_frame_bytes: int = 512 << 10
    """Waiting outputs are joined into frames of about this size."""

    peer_gather_bytes: int = 64 << 10
    """While frames are on their way, less than this waits for more to come (never longer than one round trip)."""

    waiting_frames_max: int = 1024
    """Frames of one sender that wait to be acknowledged: above any honest one's ``peer_window_frames``."""

    greeted_senders_max: int = 1024
    """Senders that have said Hello, and of which nothing was taken: beyond it the first is forgotten. It greets again
    if it has anything to send."""

    refused_senders_max: int = 256
    """Senders of which nothing is known but why they were refused, to say that once."""

    parked_senders_max: int = 256
    """Instances whose Hellos wait for the end of this one's first start; others are refused, and greet again."""

    parked_hellos_max: int = 8
    """... and Hellos of each: beyond it the oldest is forgotten. Its sender has given it up; the newest few may have
    crossed on their way."""

    app_window_bytes: int = 16 * MIB
    """Handed over for the app and not yet taken by its socket; the rest is fed from the log. Several joined commits."""

    read_size_bytes: int = 1 * MIB
    """Read from the log at once, to feed the app."""

    chunk_size_bytes: int = 1 * MIB
    """Of a checkpoint's blob, as stored."""

    chunks_pending_bytes: int = 16 * MIB
    """Chunks that wait for the disk; above this the app is not read."""

    clients_max: int = 100_000
    """Clients of which anything is known. About 0.6 KiB each with one small reply; beyond it the one that was unused
    for longest is forgotten."""

    client_keep_ns: int = 24 * 3600 * 1_000_000_000
    """A client that was unused for so long is forgotten: nobody tries a request again a day later."""

    client_replies_max: int = 4096
    """Replies kept for one client, in case it asks again; beyond it the oldest go."""

    client_replies_bytes: int = 4 * MIB
    """... and in bytes, each with what it takes to keep it. The last reply is kept whatever its size."""

    replies_bytes: int = 64 * MIB
    """Of all clients together; beyond it those of the client that was unused for longest go."""

    client_again_bytes: int = 8 * MIB
    """Replies that one client is told again, at once and a second: all that are kept for it fit. It asks for the rest
    later."""

    again_bytes: int = 16 * MIB
    """... and all clients together: to put them together takes the loop some 20 ms."""

    gone_max: int = 262_144
    """Numbers of all clients whose replies went while an older request is open; beyond it clients with some wait."""

    client_span_max: int = 16_384
    """From the oldest request that a client may still ask for to its newest: what is remembered of each."""

    requests_open_max: int = 65_536
    """Requests taken and not answered; beyond it clients are told to wait. The app is far behind then."""

    queries_open_max: int = 1024
    """Queries that are not logged, taken and not answered; beyond it clients are told to ask again later."""

    caller_queries_max: int = 64
    """... and of one caller, or one client where callers have no keys."""

    queries_bytes: int = 16 * MIB
    """... and in bytes: what they are asked with."""

    queries_at_app_max: int = 16
    """Queries that the app has been given, at most; fewer where it takes longer than the next one for them."""

    queries_at_app_ns: int = 5_000_000
    """So long a record that comes waits for queries that the app was given before it, or for two of them."""

    query_barred_ns: int = 60_000_000_000
    """A query that has changed the state is not asked again for so long: each time costs the app a replay."""

    replies_gather_bytes: int = 1 * MIB
    """Replies that wait for the next commit; above this they ask for one."""

    checkpoint_trigger_bytes: int = 1024 * MIB
    """Logged since the last checkpoint: above this the app is asked for the next one."""

    checkpoint_age_ns: int | None = None
    """The last checkpoint's age: beyond it, and if there is anything new in the log, the app is asked for the next."""

    checkpoints_on_standby: bool = False
    """A checkpoint that is due is asked of who follows, not of the app."""

    standby_checkpoint_ns: int = 120_000_000_000
    """So long a checkpoint that is due waits for who follows; then the app is asked for it, so that the log stays
    bounded."""

    letters_max: int = 10_000
    """Dead letters kept for an operator; beyond it the oldest go."""

    letters_bytes: int = 64 * MIB
    """... and in bytes."""

    verdicts_max: int = 10_000
    """Verdicts on messages behind the last checkpoint, which the app and this coordinator keep in memory; beyond it no
    more is taken of who may not call all methods, until there is a checkpoint."""

    kills_max: int | None = 3
    """A message that was at work so often in a row when the app's process ended is not given to it again; None: it
    always is."""

    long_handler_s: float = 10.0
    """A handler that takes longer is told to the operator."""

    replay_check: ReplayCheck | None = None
    """None: strict for an app that says a Hello, counts for one of the base protocol: those may call themselves with
    the time."""
