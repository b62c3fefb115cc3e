"""What-if for a fleet: changed code over the logs of many services, whose changed calls travel. See decision 0092."""
