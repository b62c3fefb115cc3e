"""What-if for a fleet: changed code over the logs of its services, whose changed calls travel (decision 0092)."""
