"""Notices of an instance to its operator. Any part emits a notice to :class:`Notices`, which passes it to each sink:
lines for people or machines, the supervisor's readiness, metrics.

log = configure("counter", level="info", log_format="human")
log.emit(Recovered(epoch=4, sequence_id=41))
log.warning("a frame was dropped", kind="frame", origin=origin)
"""

from immortal.coordinator.notices.sinks import LOG_FORMATS, LOG_LEVELS, Notices, Sink, configure, warnings_on_stderr

__all__ = ["LOG_FORMATS", "LOG_LEVELS", "Notices", "Sink", "configure", "warnings_on_stderr"]
