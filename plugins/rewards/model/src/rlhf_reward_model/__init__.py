"""Neural reward models for the rlhf framework."""
