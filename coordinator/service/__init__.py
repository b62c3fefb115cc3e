"""A coordinator's process, and the process that starts it with its app and starts them again."""
