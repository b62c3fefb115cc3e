"""The object that the handlers run on: made at the first start, restored, upgraded, and written into checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from immortal.appsdk.calls.context import Context
from immortal.appsdk.calls.report import call_user_code
from immortal.appsdk.calls.rules import Rules
from immortal.appsdk.dispatch.delivery import Delivery
from immortal.appsdk.dispatch.upgrades import class_that_restores, guarded, moved, upgrade_path, upgraded
from immortal.appsdk.errors import StateError
from immortal.appsdk.handlers.contexts import attach
from immortal.appsdk.handlers.definition import Definition
from immortal.appsdk.state.journal import SavedTasks
from immortal.appsdk.state.schema import Envelope, decode_envelope, encode_envelope
from immortal.appsdk.waiting.tasks import Tasks


class Life:
    """``definition``: of the class that runs: one that the app upgrades from, until it is told to; ``delivery``: calls
    its handlers. ``instance`` None: not yet. ``next_sequence_id``: of the record that is to come. ``bound``: calls what
    encodes the state, and gives it up where it takes too long.
    """

    def __init__(
        self,
        definition: Definition,
        context: Context,
        tasks: Tasks,
        make_delivery: Callable[[Definition, Context], Delivery],
    ) -> None:
        self.definition = definition
        self.delivery = make_delivery(definition, context)
        self.instance: Any = None
        self.next_sequence_id = 0
        self._context = context
        self._tasks = tasks
        self._make_delivery = make_delivery
        self.bound: Callable[[Callable[[], tuple[bytes, bytes]]], tuple[bytes, bytes]] = lambda encode: encode()
        self._main_definition = definition

    def start(self, seed: bytes) -> None:
        """The first start: ``seed`` is that of all random streams. Raises StateError."""
        context = self._context
        context.seed = seed
        self._tasks.starts_first = True
        context.record_time_ns = context.now_ns()  # kept with the checkpoint: an upgrade of it sees it again
        instance = self._new_instance()
        run = context.run_contexts.run
        call_user_code(f"{self.definition.name}.__init__", lambda: run(instance.__init__), StateError)
        self._prepare(instance)
        self.instance = instance
        context.nodes.use(self.definition, instance)
        self._tasks.use(self.definition, instance)

    def restore(self, blob: bytes) -> None:
        """As a checkpoint has it. Raises StateError, JournalError."""
        envelope, state = decode_envelope(blob)
        self._use(class_that_restores(self._main_definition, envelope))
        context = self._context
        context.seed = envelope.seed
        context.sites.use(Rules(envelope.rules))
        context.multicasts.rules = envelope.order_rules
        context.instance_name = envelope.instance_name
        self.instance = instance = self._restored(envelope, state)
        context.nodes.use(self.definition, instance)
        context.nodes.restore(envelope.nodes)
        self._tasks.use(self.definition, instance)
        context.multicasts.restore(envelope.ordering)
        if envelope.tasks is not None:
            self._tasks.restore(envelope.tasks)

    def go_back(self, blob: bytes) -> None:
        """To a copy of this life's own: the object stays the same one. Raises StateError, JournalError."""
        envelope, state = decode_envelope(blob)
        fresh = self._restored(envelope, state)
        self.instance.__dict__ = fresh.__dict__  # at once: hooks look at it, and keep the object that they know
        attach(self.instance, self._context)
        self._context.multicasts.restore(envelope.ordering)
        self._context.nodes.restore(envelope.nodes)
        self._tasks.restore(envelope.tasks or SavedTasks())

    def _restored(self, envelope: Envelope, state: memoryview) -> Any:
        """A new object of the class that runs, in the state of a blob, as of its last record. Raises StateError."""
        self.next_sequence_id = envelope.sequence_id + 1
        self._context.sequence_id, self._context.record_time_ns = envelope.sequence_id, envelope.record_time_ns
        instance = self._new_instance()
        schema = self.definition.state()
        run = self._context.run_contexts.run
        restore = partial(run, schema.restore, instance, envelope, state)
        call_user_code(f"{self.definition.name}.restore", restore, StateError)
        self._prepare(instance)
        return instance

    def _new_instance(self) -> Any:
        instance = self.definition.new_instance()
        attach(instance, self._context)
        return instance

    def _prepare(self, instance: Any) -> None:
        if hasattr(instance, "prepare"):
            prepare = partial(self._context.run_contexts.run, instance.prepare)
            call_user_code(f"{self.definition.name}.prepare", prepare, StateError)

    def _use(self, definition: Definition) -> None:
        """From here on this class's code handles what comes in."""
        if definition is not self.definition:
            self.definition = definition
            self.delivery = self._make_delivery(definition, self._context)

    def upgrade(self, version: int | None) -> None:
        """Bring state and code to ``version`` (None: that of the app). Raises UpgradeError."""
        start, *steps = upgrade_path(self._main_definition, self.definition, version)
        run = self._context.run_contexts.run
        if start is not self.definition:
            self.instance = run(moved, start, self.definition, self.instance, self._context)
        for definition in steps:
            self.instance = run(upgraded, definition, self.instance, self._context)
            nodes = f"{definition.name}: its nodes"
            guarded(definition, nodes, partial(self._context.nodes.use, definition, self.instance))
            waiting = f"{definition.name}: what waits"
            guarded(definition, waiting, partial(self._tasks.use, definition, self.instance))
            self._use(definition)

    def require_savable(self) -> None:
        """What the initial message has made of the state: else its next checkpoint would be the first to say so.

        Raises StateError.
        """
        schema = self.definition.state()
        if schema.serializer != "own":
            schema.encode(self.instance, keeps_types=self._context.keeps_types)

    def encode(self) -> tuple[bytes, bytes]:
        """The blob: its envelope and the state as it is now. Raises StateError."""
        return self.bound(self._encode)

    def _encode(self) -> tuple[bytes, bytes]:
        schema = self.definition.state()
        encoded = partial(schema.encode, self.instance, keeps_types=self._context.keeps_types)
        encode = partial(self._context.run_contexts.run, encoded)
        state = call_user_code(f"{self.definition.name}.checkpoint", encode, StateError)
        waiting = f"{self.definition.name}: to save what its handlers wait for"
        return call_user_code(waiting, partial(self._envelope, schema.serializer), StateError), state

    def _envelope(self, serializer: str) -> bytes:
        context = self._context
        return encode_envelope(
            Envelope(
                class_name=self.definition.name,
                serializer=serializer,
                seed=context.seed,
                sequence_id=self.next_sequence_id - 1,
                version=self.definition.version,
                record_time_ns=context.record_time_ns,
                instance_name=context.instance_name,
                tasks=self._tasks.save(),
                rules=context.sites.rules,
                ordering=context.multicasts.save(),
                nodes=context.nodes.save(),
                order_rules=context.multicasts.rules,
            )
        )
