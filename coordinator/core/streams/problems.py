"""What is wrong between an instance and a peer with another log, in words: who has what, and the way out."""

from __future__ import annotations

from immortal.protocol.peer import PeerFrame, RefusedCode


def reset_command(name: str, peer: str) -> str:
    return f"'immortal peers reset {name} {peer}'"


def reclaim_command(name: str) -> str:
    return f"'immortal peers reclaim {name}'"


# --- said by a stream's sender, ``name``, of its receiver -------------------------------------------------------------


def receiver_swapped(name: str, receiver: str, known: int, now: int, acknowledged: int, made: int) -> str:
    """``known``, ``now``: committer IDs."""
    return (
        f"{receiver!r} was committer {known} and is {now} now: its log was wiped or swapped; it had acknowledged "
        f"{acknowledged} of {made} messages; restore it, or run {reset_command(name, receiver)}"
    )


def receiver_older(name: str, receiver: str, received: int, once: int) -> str:
    return (
        f"{receiver!r} has {received} messages of this instance, it once had {once}: its log was replaced by an older "
        f"copy; restore it, or run {reset_command(name, receiver)}"
    )


def own_log_older(name: str, receiver: str, received: int, sent: int) -> str:
    return (
        f"{receiver!r} has {received} messages of this instance, which has sent only {sent}: this instance's log was "
        f"replaced by an older copy; restore it, or run {reset_command(name, receiver)}"
    )


def refused(name: str, receiver: str, refusal: PeerFrame) -> str:
    """With the way out, for which the frame of a receiver with a long name may have had no room."""
    text = f"{receiver!r} refuses this instance's messages: {refusal.reason}"
    own, other = reset_command(name, receiver), reset_command(receiver, name)
    if refusal.code == RefusedCode.STALE_EPOCH:  # to the newest frames: this log knows less than was sent before
        return f"{text}; restore the log of {name!r}, or, where a copy of it has run, run {reclaim_command(name)}"
    if refusal.code not in (RefusedCode.COMMITTER_CHANGED, RefusedCode.ROLLED_BACK):
        return text
    command = own if refusal.code == RefusedCode.ROLLED_BACK else other
    return text if command in text else f"{text}; restore the log that was replaced, or run {command}"


# --- said by a stream's receiver, ``name``, of its sender -------------------------------------------------------------


def sender_swapped(name: str, sender: str, known: int, now: int, received: int) -> str:
    """``known``, ``now``: committer IDs."""
    return (
        f"{sender!r} was committer {known} here and is {now} now: its log was wiped or swapped; {received} of its "
        f"messages are here; restore it, or run {reset_command(name, sender)}"
    )


def has_less_than_once(name: str, sender: str, received: int, once: int) -> str:
    return (
        f"{name!r} has {received} messages of {sender!r}, it once had {once}: its log was wiped or replaced by an "
        f"older copy; restore it, or run {reset_command(sender, name)}"
    )


def perhaps_older(name: str, sender: str, reason: str) -> str:
    """To a Hello that was refused for its epoch."""
    command = reclaim_command(sender)
    return f"{reason}; if its log was replaced by an older copy, or a copy has run, restore it, or run {command}"
