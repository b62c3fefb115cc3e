"""The driver's log port in service: the store and the thread that writes, or a log that another process writes."""
