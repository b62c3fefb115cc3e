"""Every queue, window and buffer of the core, with its reason."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Limits:
    """All sizes in bytes."""

    group_size_bytes: int = 1 * MIB
    """A group is sealed above this. Syncs of 1 MiB run at the disk's full rate; larger ones only add latency."""

    stream_retry_ns: int = 2_000_000_000
    """A stream that has stopped greets its receiver again after this: what was wrong may have been mended there."""

    log_pending_bytes: int = 16 * MIB
    """Input from the app that waits for the log; above this the app is not read."""

    output_waiting_bytes: int = 64 * MIB
    """Outputs that peers have not acknowledged, all streams together; above this the app is not read."""

    peer_window_bytes: int = 8 * MIB
    """Sent to one peer and not yet acknowledged: several commits' worth, so that the receiver never runs dry."""

    peer_window_frames: int = 64
    """... and as a number, for tiny frames."""

    peer_frame_bytes: int = 512 << 10
    """Waiting outputs are joined into frames of about this size."""

    peer_gather_bytes: int = 64 << 10
    """While frames are on their way, less than this waits for more to come (never longer than one round trip)."""

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

    checkpoint_trigger_bytes: int = 1024 * MIB
    """Logged since the last checkpoint: above this the app is asked for the next one."""

    checkpoint_age_ns: int | None = None
    """The last checkpoint's age: beyond it, and if there is anything new in the log, the app is asked for the next."""
