"""Traces of logs: messages by time (:mod:`.messages`), their spans (:mod:`.spans`), and export to viewers."""
