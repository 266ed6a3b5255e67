"""Profiles chosen episodes of a run of the rlhf framework: traces and memory snapshots."""
