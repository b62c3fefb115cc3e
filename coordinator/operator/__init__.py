"""What an operator asks of a running coordinator, and what is done to one that does not run."""
