"""App without a process and a socket: the real dispatcher, fed with bytes, on a clock of its caller."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from immortal.appsdk.calls.codec import encoder
from immortal.appsdk.calls.context import Context
from immortal.appsdk.calls.outbox import Chunk
from immortal.appsdk.calls.user_code import ControlFlowSignal
from immortal.appsdk.dispatch.delivery import Delivery
from immortal.appsdk.dispatch.dispatcher import Dispatcher
from immortal.appsdk.dispatch.events import Goodbye, Refusal, SnapshotBegun
from immortal.appsdk.effects.effect import EffectRunner
from immortal.appsdk.errors import HandlerError, Refused, StateError, UpgradeError
from immortal.appsdk.handlers.definition import Definition
from immortal.appsdk.running.tracing import TracingDispatcher
from immortal.appsdk.waiting.impulses import earlier
from immortal.protocol.checksum import crc64
from immortal.protocol.errors import ImmortalError
from immortal.protocol.messages import MessageType, encode_message


class ProcessDies(ControlFlowSignal):
    """Raised in a handler of a test to end the app's process there, like a segfault. Its coordinator lives on."""


class EffectsByClock(EffectRunner, Protocol):
    """EffectRunner without a thread: its caller tells it when time has passed."""

    @property
    def next_due_ns(self) -> int | None: ...

    def run(self) -> None:
        """Run each attempt that is due."""


class LocalApp:
    """App without a process. ``trace``: it reports which message made each call, for an inspected replay.
    ``fails_alone`` False: a message that fails stops it. ``make_delivery``: as in :class:`Dispatcher`. ``outsiders``:
    names that can see handles and hold none: a test.

    ``now_ns``: ``immortal.now()`` in ``__init__``, ns since the Unix epoch. ``output`` has what it sends. ``error``:
    why it has stopped, if it has; then it gets no more input.
    """

    def __init__(
        self,
        definition: Definition,
        seed: bytes,
        now_ns: int,
        effects: EffectsByClock | None = None,
        *,
        trace: bool = False,
        fails_alone: bool = True,
        make_delivery: Callable[[Definition, Context], Delivery] = Delivery,
        outsiders: frozenset[str] = frozenset(),
    ) -> None:
        self.error: ImmortalError | None = None
        self.has_left = False
        self.has_died = False
        self._effects = effects
        make_dispatcher = TracingDispatcher if trace else Dispatcher
        self.dispatcher = make_dispatcher(
            definition,
            lambda: seed,
            effects=effects,
            keeps_large_copies=True,
            fails_alone=fails_alone,
            compares_queries=True,
            make_delivery=make_delivery,
        )
        self.dispatcher.context.nodes.accounts.outsiders = outsiders
        # The clock is the record's; before the first record, the context's own, which must not be the real one.
        self.dispatcher.context.record_time_ns = now_ns
        self.output = bytearray()
        self.take_output()

    @property
    def is_primary(self) -> bool:
        return self.dispatcher.is_primary

    @property
    def instance(self) -> Any:
        return self.dispatcher.instance

    @property
    def next_due_ns(self) -> int | None:
        return earlier(self.dispatcher.next_due_ns, None if self._effects is None else self._effects.next_due_ns)

    def state_check(self) -> int:
        """Return the checksum of its state, of the waits of its handlers, and of multicasts in flight."""
        dispatcher = self.dispatcher
        state = dispatcher.definition.state().encode(dispatcher.instance)
        waiting = dispatcher.tasks.save(), dispatcher.context.multicasts.save(), dispatcher.context.nodes.save()
        return crc64(encoder.encode(waiting), crc64(state))

    def log_time(self, time_ns: int) -> None:
        """Run timers and effects that are due. Raises what the effects raise."""
        if (due_ns := self.dispatcher.next_due_ns) is not None and due_ns <= time_ns:
            self.dispatcher.log_time(time_ns)
        if self._effects is not None:
            self._effects.run()
        self.take_output()

    def receive(self, data: bytes | memoryview) -> None:
        """Handle bytes of the coordinator. Never raises: see ``error``."""
        try:
            self.dispatcher.receive_data(bytes(data))
            self._run()
        except ProcessDies:
            self.has_died = True
        except HandlerError as error:
            self.error = error
            if isinstance(self.dispatcher, TracingDispatcher):
                self.dispatcher.report_failure(error)
                self.take_output()
        except UpgradeError as error:
            self.error = error
            self.take_output()  # which tells the coordinator of it
        except ImmortalError as error:
            self.error = error

    def _run(self) -> None:
        while True:
            event = self.dispatcher.next_event()
            self.take_output()
            if event is None:
                return
            if isinstance(event, SnapshotBegun):
                try:
                    self._snapshot(event.encode()[1])
                except StateError as error:
                    self.dispatcher.snapshot_failed(error)
                    self.take_output()
            elif isinstance(event, Goodbye):
                self.has_left = True
            elif isinstance(event, Refusal):
                raise Refused(f"the coordinator refuses: {event.reason}")

    def _snapshot(self, pieces: Iterable[bytes]) -> None:
        """Send at once what a child process would send beside the handlers."""
        for piece in pieces:
            self._append_output((encode_message(MessageType.SNAPSHOT_CHUNK, piece),))
        self._append_output((encode_message(MessageType.SNAPSHOT_END, b""),))

    def take_output(self) -> None:
        self._append_output(self.dispatcher.data_to_send())

    def _append_output(self, chunks: Iterable[Chunk]) -> None:
        for chunk in chunks:
            self.output += chunk

    def close(self) -> None:
        self.dispatcher.outbox.impulses.close("the app has stopped")
        self.dispatcher.tasks.discard_all()
