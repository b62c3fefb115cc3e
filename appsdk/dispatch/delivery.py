"""Delivery of packed RPC messages to handlers: the hot loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from immortal.appsdk.calls.codec import ArgumentCodec, Decode
from immortal.appsdk.calls.context import Context
from immortal.appsdk.calls.failures import argument_mismatch, refusal
from immortal.appsdk.calls.user_code import UNCHANGED_LENGTH, handler_failed, is_user_failure
from immortal.appsdk.dispatch.invocation import receiver, rpc_receiver, waking
from immortal.appsdk.errors import Failure, HandlerError
from immortal.appsdk.handlers.decorators import CLOCK_METHOD_ID, EFFECT_METHOD_ID, INITIAL_METHOD_ID, Handler
from immortal.appsdk.handlers.definition import Definition
from immortal.appsdk.nodes.reference_counts import decode_awaited_node_call, decode_handle_message, decode_node_call
from immortal.appsdk.ordering.multicasts import (
    decode_executed,
    decode_fence_message,
    decode_ordering_message,
    decode_propose,
)
from immortal.appsdk.waiting.impulses import EffectResult, LoggedTime
from immortal.protocol import decoding
from immortal.protocol.errors import RemoteProtocolError
from immortal.protocol.messages import MessageType, RpcKind, RpcType, decode_incoming_rpc, decode_message
from immortal.protocol.system_methods import (
    CANCEL_CALL_METHOD_ID,
    EXECUTED_METHOD_ID,
    FENCING_METHOD_ID,
    HANDLES_METHOD_ID,
    NODE_METHOD_ID,
    ORDER_METHOD_ID,
    ORDERED_METHOD_ID,
    ORDERING_METHOD_ID,
    Order,
)
from immortal.protocol.varint import encode_zigzag
from immortal.protocol.verdicts import Cause

if TYPE_CHECKING:
    import cython

VIEW_SIZE_BYTES_MIN = 4 << 10  # messages from this size on are decoded from a view, smaller ones from a faster copy

CACHED_MAX = 4096  # limit of cached fronts of messages: about 1 MiB

Entry = tuple[Decode, Callable[..., Any], str]
Found = tuple[Decode, Callable[..., Any], str, bytes, int, int]  # an Entry, the message's start, its and the whole size


class Delivery:
    """Finds the handler of each message and calls it. The message's position is in the context while a handler runs."""

    def __init__(self, definition: Definition, context: Context) -> None:
        self._definition = definition
        self._context = context
        self._entries: dict[int, Entry] = {}
        self._by_front: dict[bytes, Entry] = {}
        receive = context.tasks.incoming.receive_answer
        self._answers: dict[RpcKind, Entry] = {
            kind: _entry(lambda data: data, partial(receive, kind), "the answer of a call")
            for kind in (RpcKind.RETURNED_VALUE, RpcKind.RETURNED_NOTHING, RpcKind.RAISED)
        }
        tasks, wakes = context.tasks, definition.has_tasks
        multicasts, inbox = context.multicasts, context.nodes.inbox
        for method_id, handler in self._definition.by_method_id.items():
            codec = self._definition.codec(handler)
            counting, is_plain = context.nodes.accounts.counting, not codec.may_hold_handles
            decode = codec.decode_plainly if is_plain else counting(codec.decode)
            self._entries[method_id] = (decode, receiver(tasks, handler, wakes=wakes), codec.name)
        name = self._definition.initial
        begin: Callable[..., Any] = (lambda instance: None) if name is None else getattr(self._definition.cls, name)
        begin = waking(tasks, begin) if wakes else begin
        nothing: Any = decoding.Decoder(tuple[()]).decode
        initial = (nothing, self._only_in_first_record(begin), f"{self._definition.name}.{name or 'initial'}")
        clock = _entry(decoding.Decoder(LoggedTime).decode, tasks.apply_time, "the clock")
        effects = _entry(decoding.Decoder(EffectResult).decode, tasks.receive_effect_result, "the result of an effect")
        orders = _entry(decoding.Decoder(Order).decode, tasks.execute_order, "an operator's order")
        cancels: Entry = (
            decoding.Decoder(tuple[str, int, int, str]).decode,
            lambda instance, caller, number, cancelled, reason: tasks.cancel_call(caller, number, cancelled, reason),
            "the cancellation of a call",
        )
        for method_id, entry in self._entries.items():
            for front in _fronts(method_id, (RpcType.FORK, RpcType.IMPULSE)):
                self._by_front[front] = entry
        for method_id, handler in self._definition.by_method_id.items():
            for front in _fronts(method_id, (RpcType.ASYNC,)):
                self._by_front[front] = self._answering_entry(self._definition.codec(handler), handler)
        for method_id, rpc_type, entry in (
            (INITIAL_METHOD_ID, RpcType.FORK, initial),
            (CLOCK_METHOD_ID, RpcType.IMPULSE, clock),
            (EFFECT_METHOD_ID, RpcType.IMPULSE, effects),
            (ORDER_METHOD_ID, RpcType.IMPULSE, orders),
            (CANCEL_CALL_METHOD_ID, RpcType.ASYNC, cancels),
            (EFFECT_METHOD_ID, RpcType.FORK, effects),  # a result that had to wait for multicasts
            (
                ORDERED_METHOD_ID,
                RpcType.FORK,
                _entry(decode_propose, multicasts.handle_propose, "an ordered multicast"),
            ),
            (
                ORDERING_METHOD_ID,
                RpcType.FORK,
                _entry(decode_ordering_message, multicasts.handle_message, "an ordered multicast"),
            ),
            (
                FENCING_METHOD_ID,
                RpcType.FORK,
                _entry(decode_fence_message, multicasts.handle_fencing, "an ordered multicast"),
            ),
            (
                EXECUTED_METHOD_ID,
                RpcType.FORK,
                _entry(decode_executed, multicasts.handle_executed, "an ordered multicast"),
            ),
            (NODE_METHOD_ID, RpcType.FORK, _entry(decode_node_call, inbox.run_call, "a handle")),
            (NODE_METHOD_ID, RpcType.ASYNC, _entry(decode_awaited_node_call, inbox.run_call, "a handle")),
            (HANDLES_METHOD_ID, RpcType.FORK, _entry(decode_handle_message, inbox.receive_message, "a handle")),
        ):
            self._by_front[_fronts(method_id, (rpc_type,))[0]] = entry
        # Lengths of fronts, the longest first. No front is the start of another: a varint marks its own end.
        self._front_sizes = sorted({len(front) for front in self._by_front}, reverse=True)
        self._cached: dict[bytes, Found] = {}  # by the first bytes of a message
        self._key_sizes: list[int] = []  # how many bytes: two or three in practice, as method IDs have few lengths
        self._tripped: dict[bytes, str] = {}  # names of methods that are no longer called, by front

    def _answering_entry(self, codec: ArgumentCodec, handler: Handler[Any, Any]) -> Entry:
        def decode(arguments: Any) -> tuple[Any, ...]:
            return codec.decode_call(arguments)  # made at its first use: few apps are called so

        counted: Decode = self._context.nodes.accounts.counting(decode) if codec.may_hold_handles else decode
        return counted, rpc_receiver(self._context.tasks, handler), codec.name

    def _only_in_first_record(self, begin: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the initial method, whose message is in record 0: a later message is another sender's, and refused."""

        def run(instance: object) -> None:
            context = self._context
            if context.sequence_id == 0:
                begin(instance)
                return
            text = f"method {INITIAL_METHOD_ID} is the SDK's own: nobody else calls it"
            failure = refusal("the initial message", INITIAL_METHOD_ID, Cause.METHOD, text)
            raise self._refused(context.message_index, failure)

        return run

    def deliver(
        self, instance: Any, content: bytes, offset: cython.Py_ssize_t, end: cython.Py_ssize_t, slice_end: int
    ) -> int:
        """Handle the messages that start before ``slice_end`` (at least one); return the offset of the next one.

        Raises RemoteProtocolError, and HandlerError, which says how one message can fail without the others.
        """
        context: Context = self._context
        context.handling_thread_id = context.thread_id
        context.slice_end = slice_end
        while True:
            variables = context.run_contexts.new()
            offset = variables.run(self._deliver, instance, content, offset, end, variables)
            if offset >= context.slice_end:
                break
        context.handling_thread_id = 0
        return offset

    def _deliver(
        self, instance: Any, content: bytes, offset: cython.Py_ssize_t, end: cython.Py_ssize_t, variables: Any
    ) -> int:
        """Deliver messages in the context ``variables`` until a handler changes it: the next one needs a fresh one."""
        context: Context = self._context
        octets: cython.p_const_uchar = content  # compiled, it is read without a check: only from offset to end
        index: cython.Py_ssize_t = context.message_index
        cached: dict[bytes, Found] = self._cached
        key_sizes: list[int] = self._key_sizes
        start: cython.Py_ssize_t
        stride: cython.Py_ssize_t = 0
        front_size_bytes: cython.Py_ssize_t = 0
        key_size_bytes: cython.Py_ssize_t
        is_large: cython.bint = False
        front = b""
        view = memoryview(content)
        while offset < context.slice_end:
            start = offset + front_size_bytes
            if not front_size_bytes or not content.startswith(front, offset):
                for key_size_bytes in key_sizes:
                    found = cached.get(content[offset : offset + key_size_bytes])
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
            except BaseException as error:  # msgspec's own, and what a type's __post_init__ raises
                if not is_user_failure(error):
                    raise
                context.message_index = index
                arguments = self._read_again(content, offset - stride, name, error, content[start:offset], index)
            context.message_index = index
            try:
                if len(arguments) == 1:  # by far the most frequent case, and three times as fast as unpacking a tuple
                    function(instance, arguments[0])
                else:
                    function(instance, *arguments)
            except HandlerError:  # of an async handler, with more details
                raise
            except BaseException as error:
                if not is_user_failure(error):
                    raise
                method_id, front_count = method_and_front(content, offset - stride)
                raise self._failed(method_id, name, arguments[front_count:], error, index) from error
            index += 1
            if len(variables) > UNCHANGED_LENGTH:
                break
        context.message_index = index
        return offset

    def _look_up(self, content: bytes, offset: int, end: int, index: int) -> tuple[Entry, int, int]:
        """Look up the message at ``offset``: return (its handler, the start of its arguments, its size in bytes)."""
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
                if self._tripped and content[type_offset:start] in self._tripped:
                    self._context.message_index = index
                    raise self._tripped_error(content[type_offset:start], index)
                return self._remember(content, offset, entry, start, type_offset + size_bytes - offset)
        return self._look_up_answer(content, offset, end, index)

    def _look_up_answer(self, content: bytes, offset: int, end: int, index: int) -> tuple[Entry, int, int]:
        """Look up a message that can be an answer: it has the method ID of another instance's method."""
        message_type, start, message_end = decode_message(content, offset)
        self._context.message_index = index
        is_answer = message_type == MessageType.RPC and message_end <= end and content[start] in self._answers
        if not is_answer:
            raise self._unknown(content, offset, end, index)
        try:
            rpc = decode_incoming_rpc(content, start, message_end)
        except RemoteProtocolError:
            raise self._unknown(content, offset, end, index) from None
        entry = self._answers[RpcKind(rpc.kind)]
        start = message_end - len(rpc.arguments)
        return self._remember(content, offset, entry, start, message_end - offset)

    def _remember(self, content: bytes, offset: int, entry: Entry, start: int, stride: int) -> tuple[Entry, int, int]:
        """Cache the entry for the next messages of the same method and size, so that each is looked up once."""
        size_of_size = 1 if content[offset] < 0x80 else 2
        key_size_bytes = 2 + start - offset - size_of_size  # the front, and one byte of the arguments at most
        if stride < 1 << 13:  # its size field takes no more than these two bytes
            if key_size_bytes not in self._key_sizes:
                self._key_sizes.append(key_size_bytes)
            if len(self._cached) >= CACHED_MAX:
                self._cached.clear()
            key = content[offset : offset + key_size_bytes]
            self._cached[key] = (*entry, content[offset:start], start - offset, stride)
        return entry, start, stride

    # --- failed messages: each error says how its message can fail alone ----------------------------------------------

    def _refused(self, index: int, failure: Failure) -> HandlerError:
        sequence_id = self._context.sequence_id
        return HandlerError(
            f"record {sequence_id}, message {index}: {failure.text}; the app stops\n"
            f"  The call is in the log: give the class what it needs (a removed or renamed handler is found again by\n"
            f"  its old name, or by @rpc(id=...); a new parameter by its default), and start the app again.",
            sequence_id,
            index,
            failure,
        )

    def _read_again(
        self, content: bytes, message_start: int, name: str, error: BaseException, data: bytes, index: int
    ) -> tuple[Any, ...]:
        """Decode arguments again, more slowly, with types that the fast decoder lacks. Raises HandlerError."""
        method_id, front_count = method_and_front(content, message_start)
        handler = self._definition.by_method_id.get(-1 if method_id is None else method_id)
        if handler is not None and not front_count:
            try:
                return self._definition.codec(handler).decode_again(data, error)
            except BaseException as another:
                if not is_user_failure(another):
                    raise
                error = another
        raise self._misfit(method_id, name, error, data, index, front_count) from None

    def _misfit(
        self, method_id: int | None, name: str, error: BaseException, data: bytes, index: int, front: int
    ) -> Any:
        handler = self._definition.by_method_id.get(-1 if method_id is None else method_id)
        if handler is None:
            text = f"{name}: it can't be read: {error}"
            return self._refused(index, refusal(name, method_id, Cause.UNUSABLE, text))
        text = argument_mismatch(self._definition.codec(handler), error, data, front)
        return self._refused(index, refusal(name, method_id, Cause.ARGUMENTS, text))

    def _failed(
        self, method_id: int | None, name: str, arguments: tuple[Any, ...], error: BaseException, index: int
    ) -> HandlerError:
        handler = self._definition.by_method_id.get(-1 if method_id is None else method_id)
        if handler is None:
            return handler_failed(name, arguments, error, self._context.sequence_id, index)
        failed: HandlerError = self._context.tasks.handler_runs.failed(handler, arguments, error)
        return failed

    def _unknown(self, content: bytes, offset: int, end: int, index: int) -> HandlerError:
        message_type, start, message_end = decode_message(content, offset)
        if message_type != MessageType.RPC or message_end > end:
            raise RemoteProtocolError(
                f"record {self._context.sequence_id}: message {index} of a batch has type {message_type}, not RPC (0)"
            )
        try:
            rpc = decode_incoming_rpc(content, start, message_end)
        except RemoteProtocolError as error:
            return self._refused(index, refusal("a call", None, Cause.UNREADABLE, str(error)))
        name = f"method {rpc.method_id}"
        handlers = sorted(self._definition.handlers.values(), key=lambda handler: handler.name)
        if rpc.method_id < 0:
            text = f"method {rpc.method_id} is the SDK's own: nobody else calls it"
        else:
            names = ", ".join(handler.name for handler in handlers) or "none"
            text = f"{self._definition.name} has no method {rpc.method_id} (it has: {names})"
        return self._refused(index, refusal(name, rpc.method_id, Cause.METHOD, text))

    def trip(self, method_ids: Iterable[int]) -> None:
        """Refuse calls of ``method_ids`` from here on, and of no other methods."""
        self._tripped = {
            front: self._definition.by_method_id[method_id].function.__qualname__
            for method_id in method_ids
            if method_id in self._definition.by_method_id
            for front in _fronts(method_id, (RpcType.ASYNC, RpcType.FORK, RpcType.IMPULSE))
        }
        self._cached.clear()
        self._key_sizes.clear()

    def _tripped_error(self, front: bytes, index: int) -> HandlerError:
        name = self._tripped[front]
        text = (
            f"{name} has failed so often in a row that it is no longer called: deploy code that does not fail, or "
            f"restart the app"
        )
        return self._refused(index, refusal(name, None, Cause.TRIPPED, text))


def _entry(decode: Callable[[Any], Any], function: Callable[[Any], None], name: str) -> Entry:
    """Make the entry for one of the SDK's own messages: ``function`` gets the decoded message."""
    return (lambda data: (decode(data),)), (lambda instance, message: function(message)), name


def _fronts(method_id: int, rpc_types: Iterable[RpcType]) -> list[bytes]:
    """Return the first bytes of a call of the method, after its size."""
    return [bytes((MessageType.RPC, RpcKind.CALL)) + encode_zigzag(method_id) + bytes((one,)) for one in rpc_types]


def method_and_front(content: bytes, offset: int) -> tuple[int | None, int]:
    """Return the method ID of the message at ``offset`` (None: no call), and how many items precede the arguments."""
    _, start, end = decode_message(content, offset)
    rpc = decode_incoming_rpc(content, start, end)
    if rpc.kind != RpcKind.CALL:
        return None, 0
    return rpc.method_id, 2 if rpc.rpc_type == RpcType.ASYNC else 0
