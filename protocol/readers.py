# cython: annotation_typing=False
"""Incremental readers: they take bytes in any pieces and return events. One reader for each direction.

A reader keeps data in the pieces that arrive until a message or record is complete, and joins them once: reading takes
time linear in the bytes, whatever the pieces. A reader that has raised is unusable: close the connection.
"""

from __future__ import annotations

from msgspec import Struct

from immortal.protocol.errors import LimitExceededError, RemoteProtocolError
from immortal.protocol.limits import MESSAGE_SIZE_BYTES_MAX, RPC_FRONT_SIZE_BYTES_MAX, WHOLE_BATCH_SIZE_BYTES_MAX
from immortal.protocol.messages import MessageType, decode_checkpoint, decode_message
from immortal.protocol.record import (
    CHECKPOINT_SEQUENCE_ID,
    HEADER_SIZE_BYTES,
    RecordHeader,
    decode_header,
    verify_record,
)
from immortal.protocol.varint import INT_SIZE_BYTES_MAX, decode_zigzag_int, encode_zigzag


class Message(Struct):
    """Message from the app, without size and type."""

    message_type: int
    data: bytes


class TooLargeRpc(Struct, frozen=True):
    """RPC above the size limit; the reader skips its bytes. ``front``: the first bytes of its data."""

    size_bytes: int
    limit_bytes: int
    front: bytes


class Record(Struct):
    """Record from the coordinator, its check bytes verified.

    ``sources``: the sender of each batch, from the Sources message; an empty list: all batches came from the instance's
    own side; None: there was no such message.
    """

    header: RecordHeader
    content: bytes
    sources: list[str] | None = None


class BlobStart(Struct, frozen=True):
    """Start of a checkpoint of ``size_bytes`` bytes. BlobData follow; the last has ``last`` set (and can be empty)."""

    size_bytes: int


class BlobData(Struct, frozen=True):
    data: bytes
    last: bool


class Pieces:
    """Bytes that have arrived and are not consumed yet."""

    def __init__(self) -> None:
        self._front = b""
        self._offset = 0  # into the front
        self._rest: list[bytes] = []
        self.size_bytes = 0

    def append(self, data: bytes) -> None:
        if not data:
            return
        self.size_bytes += len(data)
        if self._offset == len(self._front) and not self._rest:
            self._front, self._offset = data, 0
        else:
            self._rest.append(data)

    def view(self, size_bytes: int) -> tuple[bytes, int]:
        """Join pieces until ``size_bytes`` bytes, or all available, are in one piece; return (bytes, offset)."""
        if self._rest and len(self._front) - self._offset < size_bytes:
            self._front = b"".join((self._front[self._offset :], *self._rest))
            self._offset = 0
            self._rest.clear()
        return self._front, self._offset

    def skip(self, size_bytes: int) -> None:
        self._offset += size_bytes
        self.size_bytes -= size_bytes

    def pop_piece(self, size_bytes_max: int) -> bytes:
        """Take up to ``size_bytes_max`` bytes, as many as are in one piece."""
        if self._offset == len(self._front) and self._rest:
            self.view(1)
        taken = self._front[self._offset : self._offset + size_bytes_max]
        self.skip(len(taken))
        return taken


class _Reader:
    def __init__(self) -> None:
        self._pieces = Pieces()
        self._blob_left_bytes: int | None = None

    @property
    def buffered_bytes(self) -> int:
        """Bytes that no event has covered yet. Above 0 at the end of the connection: it ended inside a message."""
        return self._pieces.size_bytes

    @property
    def inside_blob(self) -> bool:
        return self._blob_left_bytes is not None

    def receive_data(self, data: bytes) -> None:
        self._pieces.append(data)

    def _next_blob_data(self) -> BlobData | None:
        left = self._blob_left_bytes
        if left is None or (left and not self._pieces.size_bytes):
            return None
        data = self._pieces.pop_piece(left)
        left -= len(data)
        self._blob_left_bytes = left or None
        return BlobData(data, last=not left)


class MessageReader(_Reader):
    """Reader of an app's data: messages, and the blob after a Checkpoint message.

    >>> reader = MessageReader(); reader.receive_data(bytes.fromhex("0202")); reader.next_event()
    Message(message_type=2, data=b'')

    ``rpc_size_bytes_max`` limits the size field of an RPC; the reader skips a larger one. An RPCBatch can then have any
    size: above WHOLE_BATCH_SIZE_BYTES_MAX it becomes several batches, in the pieces that arrive.
    """

    def __init__(
        self, message_size_bytes_max: int = MESSAGE_SIZE_BYTES_MAX, rpc_size_bytes_max: int | None = None
    ) -> None:
        super().__init__()
        self._message_size_bytes_max = message_size_bytes_max
        self._rpc_size_bytes_max = rpc_size_bytes_max
        self._batch_left_bytes: int | None = None
        self._batch_count = self._batch_seen = 0
        self._skip_left_bytes = 0

    def next_event(self) -> Message | TooLargeRpc | BlobStart | BlobData | None:
        """Return the next event, or None if more data is needed. Raises RemoteProtocolError, LimitExceededError."""
        if self._blob_left_bytes is not None:
            return self._next_blob_data()
        pieces = self._pieces
        while self._skip_left_bytes and pieces.size_bytes:
            self._skip_left_bytes -= len(pieces.pop_piece(self._skip_left_bytes))
        if self._batch_left_bytes == 0 and not self._skip_left_bytes:
            self._end_batch()
        available = pieces.size_bytes
        if not available:
            return None
        size_of_size, size_bytes = self._front()
        if not size_bytes:
            return None
        if self._rpc_size_bytes_max is not None:
            if self._batch_left_bytes is not None:
                return self._next_of_batch(size_of_size, size_bytes)
            if size_bytes > WHOLE_BATCH_SIZE_BYTES_MAX:
                if available <= size_of_size:
                    return None
                data, offset = pieces.view(size_of_size + 1)
                message_type = data[offset + size_of_size]
                if message_type == MessageType.RPC_BATCH:
                    return self._begin_batch(size_of_size, size_bytes)
                if message_type == MessageType.RPC and size_bytes > self._rpc_size_bytes_max:
                    return self._skip_rpc(size_of_size, size_bytes)
                if message_type != MessageType.RPC and size_bytes > self._message_size_bytes_max:
                    raise LimitExceededError("a message", size_bytes, self._message_size_bytes_max)
        elif size_bytes > self._message_size_bytes_max:
            raise LimitExceededError("a message", size_bytes, self._message_size_bytes_max)
        whole = size_of_size + size_bytes
        if available < whole:
            return None
        data, offset = pieces.view(whole)
        start = offset + size_of_size
        message = Message(data[start], data[start + 1 : start + size_bytes])
        pieces.skip(whole)
        if message.message_type == MessageType.CHECKPOINT:
            self._blob_left_bytes = decode_checkpoint(message.data)
            return BlobStart(self._blob_left_bytes)
        return message

    def _front(self) -> tuple[int, int]:
        """Return the size of the next message's size field, and its value; (0, 0) while the field is incomplete."""
        data, offset = self._pieces.view(INT_SIZE_BYTES_MAX)
        if self._pieces.size_bytes < INT_SIZE_BYTES_MAX and all(byte >= 0x80 for byte in data[offset:]):
            return 0, 0
        size_bytes, start = decode_zigzag_int(data, offset)
        if size_bytes < 1:
            raise RemoteProtocolError(f"a message gives its size as {size_bytes}, at least 1 was expected")
        return start - offset, size_bytes

    def _skip_rpc(self, size_of_size: int, size_bytes: int) -> TooLargeRpc | None:
        front_bytes = size_of_size + 1 + RPC_FRONT_SIZE_BYTES_MAX
        if self._pieces.size_bytes < front_bytes:
            return None
        data, offset = self._pieces.view(front_bytes)
        front = data[offset + size_of_size + 1 : offset + front_bytes]
        self._skip_left_bytes = size_of_size + size_bytes
        return TooLargeRpc(size_bytes, self._rpc_size_bytes_max or 0, front)

    # --- a batch that is taken apart as it arrives -------------------------------------------------------------------

    def _begin_batch(self, size_of_size: int, size_bytes: int) -> Message | TooLargeRpc | BlobStart | BlobData | None:
        front_bytes = size_of_size + 1 + INT_SIZE_BYTES_MAX
        if self._pieces.size_bytes < front_bytes:
            return None
        data, offset = self._pieces.view(front_bytes)
        count, start = decode_zigzag_int(data, offset + size_of_size + 1)
        if count < 0:
            raise RemoteProtocolError(f"an RPCBatch gives its count as {count}")
        self._pieces.skip(start - offset)
        self._batch_left_bytes = size_of_size + size_bytes - (start - offset)
        self._batch_count, self._batch_seen = count, 0
        return self.next_event()

    def _next_of_batch(self, size_of_size: int, size_bytes: int) -> Message | TooLargeRpc | None:
        """Return the messages of a batch that have arrived, as a batch of their own.

        ``size_bytes``: size of the first message.
        """
        left, whole, pieces = self._batch_left_bytes or 0, size_of_size + size_bytes, self._pieces
        if whole > left:
            raise RemoteProtocolError(f"a message of {size_bytes} bytes runs past the end of its RPCBatch")
        most = self._rpc_size_bytes_max or 0
        if size_bytes > most:
            passed = self._skip_rpc(size_of_size, size_bytes)
            if passed is not None:
                self._batch_left_bytes = left - whole
                self._batch_seen += 1
            return passed
        if pieces.size_bytes < whole:
            return None
        data, offset = pieces.view(whole)
        end, bound, count = offset + whole, min(len(data), offset + left), 1
        while end + INT_SIZE_BYTES_MAX <= bound:
            size_bytes, start = decode_zigzag_int(data, end)
            if not 0 < size_bytes <= most or start + size_bytes > bound:
                break  # incomplete, too large, or invalid: the next call handles it as the first message
            end, count = start + size_bytes, count + 1
        taken = data[offset:end]
        pieces.skip(end - offset)
        self._batch_left_bytes = left - len(taken)
        self._batch_seen += count
        return Message(MessageType.RPC_BATCH, encode_zigzag(count) + taken)

    def _end_batch(self) -> None:
        self._batch_left_bytes = None
        if self._batch_seen != self._batch_count:
            raise RemoteProtocolError(
                f"an RPCBatch gives its count as {self._batch_count} and holds {self._batch_seen} messages"
            )


class RecordReader(_Reader):
    """Reader of a coordinator's data: records, and the blob after the record with a Checkpoint message."""

    def next_event(self) -> Record | BlobStart | BlobData | None:
        """Return the next event, or None if more data is needed. Raises RemoteProtocolError, DamagedRecordError."""
        if self._blob_left_bytes is not None:
            return self._next_blob_data()
        pieces = self._pieces
        if pieces.size_bytes < HEADER_SIZE_BYTES:
            return None
        data, offset = pieces.view(HEADER_SIZE_BYTES)
        size_bytes = decode_header(data, offset).size_bytes
        if pieces.size_bytes < size_bytes:
            return None
        data, offset = pieces.view(size_bytes)
        header = verify_record(memoryview(data)[offset : offset + size_bytes])
        content = data[offset + HEADER_SIZE_BYTES : offset + size_bytes]
        pieces.skip(size_bytes)
        if header.sequence_id == CHECKPOINT_SEQUENCE_ID:
            message_type, start, end = decode_message(content)
            if message_type != MessageType.CHECKPOINT or end != len(content):
                raise RemoteProtocolError(
                    f"a record with sequence ID {CHECKPOINT_SEQUENCE_ID} must hold one Checkpoint message and nothing "
                    f"else: it has {len(content)} bytes, of which the first message (type {message_type}) takes {end}"
                )
            self._blob_left_bytes = decode_checkpoint(content[start:end])
            return BlobStart(self._blob_left_bytes)
        return Record(header, content)
