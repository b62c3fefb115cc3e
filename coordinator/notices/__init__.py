"""What an instance tells its operator. Whoever has something to say gives a notice to :class:`Notices`, which gives it
to each sink: lines for people or machines, the supervisor's readiness, metrics. A sink has one method.

log = configure("counter", level="info", log_format="human")
log.take(Recovered(epoch=4, sequence_id=41))
log.warning("a frame was dropped", kind="frame", origin=origin)
"""

from immortal.coordinator.notices.sinks import LOG_FORMATS, LOG_LEVELS, Notices, Sink, configure, warnings_on_stderr

__all__ = ["LOG_FORMATS", "LOG_LEVELS", "Notices", "Sink", "configure", "warnings_on_stderr"]
