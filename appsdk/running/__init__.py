"""An app's process: its connection, threads, options and exit status."""
