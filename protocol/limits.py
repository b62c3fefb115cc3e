"""Size limits for data that is accepted, each with its reason."""

from __future__ import annotations

MESSAGE_SIZE_BYTES_MAX = 64 << 20  # apps and coordinators hold a whole message in memory
RECORD_SIZE_BYTES_MAX = 1 << 30  # the size field is signed 32 bits; half of that leaves room for mistakes to show
RPC_SIZE_BYTES_MAX = RECORD_SIZE_BYTES_MAX - (64 << 10)  # also for a batch: a record or frame holds it and little else
RPC_FRONT_SIZE_BYTES_MAX = 512  # an RPC without its arguments
ARGUMENTS_SIZE_MIB_DEFAULT = 64  # default of a setting: arguments of one RPC of an app
ARGUMENTS_SIZE_MIB_MAX = (RPC_SIZE_BYTES_MAX - RPC_FRONT_SIZE_BYTES_MAX) >> 20
WHOLE_BATCH_SIZE_BYTES_MAX = 1 << 20  # a larger RPCBatch from an app is split as it arrives
NAME_SIZE_BYTES_MAX = 255  # a file name, a key in the log
EXTENSIONS_MAX = 64  # in one Hello
NESTING_MAX_DEFAULT = 64  # default of a setting: nested arrays and maps; people nest a few, generated data some dozens
NESTING_MAX = 256  # largest value of that setting: each level is one of Python's 1,000 levels of recursion
