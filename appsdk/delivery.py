"""The hot loop: packed RPC messages to calls of handlers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from appsdk.clock import ToldTime
from appsdk.codec import ArgumentCodec, Decode
from appsdk.context import Context
from appsdk.definition import Definition
from appsdk.effect_waits import EffectResult
from appsdk.errors import HandlerError
from appsdk.handlers import CLOCK_METHOD_ID, EFFECT_METHOD_ID, INITIAL_METHOD_ID, Handler
from appsdk.report import handler_failed, undecodable
from protocol.client import Caller, decode_caller
from protocol.errors import RemoteProtocolError
from protocol.messages import MessageType, RpcKind, RpcType, decode_incoming_rpc, decode_message
from protocol.varint import encode_zigzag

if TYPE_CHECKING:
    import cython

VIEW_SIZE_BYTES_MIN = 4 << 10  # messages from this size on are decoded from a view, smaller ones from a faster copy

KNOWN_MAX = 4096  # fronts of messages that are remembered: some 1 MiB

Entry = tuple[Decode, Callable[..., Any], str]
Found = tuple[Decode, Callable[..., Any], str, bytes, int, int]  # ..., front with its size, its length, whole size


class Delivery:
    """Finds the handler of each message and calls it. The handler's position is in the context while it runs."""

    def __init__(self, definition: Definition, context: Context) -> None:
        self._definition = definition
        self._context = context
        self._entries: dict[int, Entry] = {}
        self._by_front: dict[bytes, Entry] = {}
        self._answers: dict[RpcKind, Entry] = {
            kind: (
                lambda data: (data,),
                lambda instance, data, kind=kind: context.tasks.answered(kind, data),
                "the answer of a call",
            )
            for kind in (RpcKind.RETURNED_VALUE, RpcKind.RETURNED_NOTHING, RpcKind.RAISED)
        }
        tasks, wakes = context.tasks, definition.has_tasks
        for method_id, handler in self._definition.by_method_id.items():
            codec = self._definition.codec(handler)
            self._entries[method_id] = (codec.decode, tasks.receiver(handler, wakes=wakes), codec.name)
        name = self._definition.initial
        begin: Callable[..., Any] = type(self)._no_initial if name is None else getattr(self._definition.cls, name)
        begin = tasks.waking(begin) if wakes else begin
        nothing: Any = msgspec.msgpack.Decoder(tuple[()]).decode
        self._entries[INITIAL_METHOD_ID] = (nothing, begin, f"{self._definition.name}.{name or 'initial'}")
        told: Any = msgspec.msgpack.Decoder(ToldTime).decode
        self._entries[CLOCK_METHOD_ID] = (
            lambda data: (told(data),),
            lambda instance, now: tasks.told_time(now.time_ns, now.decided),
            "the clock",
        )
        result: Any = msgspec.msgpack.Decoder(EffectResult).decode
        self._entries[EFFECT_METHOD_ID] = (
            lambda data: (result(data),),
            lambda instance, done: tasks.effect_done(done),
            "the result of an effect",
        )
        for method_id, entry in self._entries.items():
            for rpc_type in (RpcType.FORK, RpcType.IMPULSE):
                front = bytes((MessageType.RPC, RpcKind.CALL)) + encode_zigzag(method_id) + bytes((rpc_type,))
                self._by_front[front] = entry
        for method_id, handler in self._definition.by_method_id.items():
            front = bytes((MessageType.RPC, RpcKind.CALL)) + encode_zigzag(method_id) + bytes((RpcType.ASYNC,))
            self._by_front[front] = self._answering_entry(self._definition.codec(handler), handler)
        # The lengths of fronts, the most frequent first. No front starts another: a varint says where it ends.
        self._front_sizes = sorted({len(front) for front in self._by_front}, reverse=True)
        self._known: dict[bytes, Found] = {}  # by the first bytes of a message
        self._key_sizes: list[int] = []  # how many bytes: two or three in practice, as method IDs have few lengths

    def _answering_entry(self, codec: ArgumentCodec, handler: Handler[Any, Any]) -> Entry:
        def decode(arguments: Any) -> tuple[Any, ...]:
            return codec.decode_call(arguments)  # made when it is needed: few apps are called so

        return decode, self._context.tasks.answering_receiver(handler), codec.name

    @staticmethod
    def _no_initial(instance: object) -> None:
        """There is no @initial method."""

    def deliver(
        self, instance: Any, content: bytes, offset: cython.Py_ssize_t, end: cython.Py_ssize_t, slice_end: int
    ) -> int:
        """Handle the messages that start before ``slice_end`` (at least one); where the next one starts.

        Raises HandlerError, RemoteProtocolError.
        """
        context: Context = self._context
        octets: cython.p_const_uchar = content  # compiled, read without a check: only from offset to end, or below
        index: cython.Py_ssize_t = context.message_index
        known: dict[bytes, Found] = self._known
        key_sizes: list[int] = self._key_sizes
        start: cython.Py_ssize_t
        stride: cython.Py_ssize_t = 0
        front_size_bytes: cython.Py_ssize_t = 0
        key_size_bytes: cython.Py_ssize_t
        is_large: cython.bint = False
        front = b""
        view = memoryview(content)
        context.handling_thread_id = context.thread_id
        context.slice_end = slice_end
        while offset < context.slice_end:
            start = offset + front_size_bytes
            if not front_size_bytes or not content.startswith(front, offset):
                for key_size_bytes in key_sizes:
                    found = known.get(content[offset : offset + key_size_bytes])
                    if found is not None:
                        decode, function, name, front, front_size_bytes, stride = found
                        start = offset + front_size_bytes
                        break
                else:
                    (decode, function, name), start, stride = self._look_up(content, offset, end, index)
                    front = content[offset:start]
                    front_size_bytes = start - offset
                is_large = stride >= VIEW_SIZE_BYTES_MIN
            offset += stride
            if offset > end:
                raise RemoteProtocolError(
                    f"record {context.sequence_id}: message {index} runs past the end of its batch"
                )
            try:
                arguments = decode(view[start:offset] if is_large else octets[start:offset])
            except Exception as error:  # msgspec's own, and what a type's __post_init__ raises
                context.message_index = index
                if self._refuse_client(content, offset - stride):
                    index += 1
                    continue
                raise undecodable(name, f"{error}", offset - start, context.sequence_id, index) from None
            context.message_index = index
            try:
                if len(arguments) == 1:  # by far the most frequent, and three times as fast as to unpack a tuple
                    function(instance, arguments[0])
                else:
                    function(instance, *arguments)
            except HandlerError:  # of an async handler, which says more
                raise
            except (Exception, SystemExit) as error:
                raise handler_failed(name, arguments, error, context.sequence_id, index) from error
            index += 1
        context.message_index = index
        context.handling_thread_id = 0
        return offset

    def _look_up(self, content: bytes, offset: int, end: int, index: int) -> tuple[Entry, int, int]:
        """The message at ``offset``: (its handler, where its arguments start, its size in bytes)."""
        first = content[offset]
        if first < 0x80 and not first & 1:
            type_offset, size_bytes = offset + 1, first >> 1
        else:
            _, start, message_end = decode_message(content, offset)
            type_offset, size_bytes = start - 1, message_end - start + 1
        by_front = self._by_front
        for front_size_bytes in self._front_sizes:
            start = type_offset + front_size_bytes
            if (entry := by_front.get(content[type_offset:start])) is not None and front_size_bytes <= size_bytes:
                return self._remember(content, offset, entry, start, type_offset + size_bytes - offset)
        return self._look_up_answer(content, offset, end, index)

    def _look_up_answer(self, content: bytes, offset: int, end: int, index: int) -> tuple[Entry, int, int]:
        """As :meth:`_look_up`: an answer has the method ID of another instance's method."""
        message_type, start, message_end = decode_message(content, offset)
        if message_type != MessageType.RPC or message_end > end or content[start] == RpcKind.CALL:
            caller = decode_caller(content, start, message_end) if message_type == MessageType.RPC else None
            if caller is None or message_end > end:
                raise self._not_found(content, offset, end, index)
            return self._refusing_entry(caller), message_end, message_end - offset
        rpc = decode_incoming_rpc(content, start, message_end)
        entry = self._answers[RpcKind(rpc.kind)]
        start = message_end - len(rpc.arguments)
        return self._remember(content, offset, entry, start, message_end - offset)

    def _remember(self, content: bytes, offset: int, entry: Entry, start: int, stride: int) -> tuple[Entry, int, int]:
        """Where methods and sizes come in turns each message is looked up: here, once for each of them."""
        size_of_size = 1 if content[offset] < 0x80 else 2
        key_size_bytes = 2 + start - offset - size_of_size  # the front, and one byte of the arguments at most
        if stride < 1 << 13:  # its size takes no more than these two bytes
            if key_size_bytes not in self._key_sizes:
                self._key_sizes.append(key_size_bytes)
            if len(self._known) >= KNOWN_MAX:
                self._known.clear()
            key = content[offset : offset + key_size_bytes]
            self._known[key] = (*entry, content[offset:start], start - offset, stride)
        return entry, start, stride

    # What a client has sent must not stop the app, so it is told why its call can't be made. A replay must say the same
    # again: nothing in it that another version of a library, or one more handler, would word in another way.

    def _refusing_entry(self, caller: Caller) -> Entry:
        """For a client's call of a method that there is not."""
        reason = f"there is no method {caller.method_id}"
        return lambda arguments: (), lambda instance: self._context.tasks.refuse(caller, reason), "a client's call"

    def _refuse_client(self, content: bytes, offset: int) -> bool:
        """Whether the message at ``offset``, which can't be decoded, is a client's call; then it is answered."""
        _, start, end = decode_message(content, offset)
        caller = decode_caller(content, start, end)
        if caller is None:
            return False
        name = self._definition.by_method_id[caller.method_id].name
        self._context.tasks.refuse(caller, f"the arguments do not fit {name!r}")
        return True

    def _not_found(self, content: bytes, offset: int, end: int, index: int) -> Exception:
        sequence_id = self._context.sequence_id
        message_type, start, message_end = decode_message(content, offset)
        if message_type != MessageType.RPC or message_end > end:
            return RemoteProtocolError(
                f"record {sequence_id}: message {index} of a batch has type {message_type}, not RPC (0)"
            )
        rpc = decode_incoming_rpc(content, start, message_end)
        where = f"record {sequence_id}, message {index}"
        handlers = sorted(self._definition.handlers.values(), key=lambda handler: handler.method_id)
        known = ", ".join(f"{handler.name} = {handler.method_id}" for handler in handlers) or "none"
        return HandlerError(
            f"{where}: a call of method {rpc.method_id}, which {self._definition.name} does not have; the app stops\n"
            f"  It has: {known}.\n"
            f"  The call is in the log: give the class a handler for it (a removed or renamed one is found again "
            f"by its old\n"
            f"  name, or by @rpc(id=...)), and start the app again.",
            sequence_id,
            index,
        )
