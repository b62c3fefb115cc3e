"""An app's process: its connection, its threads, its options, its exit status."""
