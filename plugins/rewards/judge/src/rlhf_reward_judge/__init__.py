"""A language model as judge for the rlhf framework."""
