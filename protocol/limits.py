"""The largest things that are accepted, each with its reason."""

from __future__ import annotations

MESSAGE_SIZE_BYTES_MAX = 64 << 20  # a message is held in memory whole, in app and coordinators
RECORD_SIZE_BYTES_MAX = 1 << 30  # the size field is signed 32 bits; half of that leaves room for mistakes to show
NAME_SIZE_BYTES_MAX = 255  # a file name, a key in the log
EXTENSIONS_MAX = 64  # in one Hello
