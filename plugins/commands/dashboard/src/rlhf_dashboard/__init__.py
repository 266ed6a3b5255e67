"""`rlhf dashboard`: a read-only page about the runs of a folder."""
