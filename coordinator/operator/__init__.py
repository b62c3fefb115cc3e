"""Operations on an instance: requests to a running coordinator, and removal of one that does not run."""
