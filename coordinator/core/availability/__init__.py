"""High availability: the write lease, failover to a standby, snapshots for standbys."""
