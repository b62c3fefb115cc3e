"""What a service of a benchmark had counted when it was stopped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from immortal.appsdk.state.schema import decode_envelope
from immortal.bench.processes import BenchError, Service
from immortal.log import open_reader


def final_state(service: Service, attributes: Mapping[str, Any]) -> dict[str, Any]:
    """``attributes``, by name with their types, as the clean stop of ``service`` left them. Raises BenchError."""
    name = service.settings.name
    with open_reader(service.settings.log, name) as log:
        summary = log.summary()
        checkpoint = summary.checkpoints[-1]
        if checkpoint.sequence_id != summary.last_sequence_id:
            raise BenchError(
                f"the last checkpoint of {name!r} is of record {checkpoint.sequence_id}, its log ends with record "
                f"{summary.last_sequence_id}: the stop was not clean"
            )
        blob = b"".join(log.checkpoint_chunks(checkpoint.checkpoint_id))
    state = msgspec.msgpack.decode(decode_envelope(blob)[1], type=dict[str, msgspec.Raw])
    return {name: msgspec.msgpack.decode(state[name], type=kind) for name, kind in attributes.items()}
