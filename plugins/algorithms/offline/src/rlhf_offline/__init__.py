"""Algorithms for the rlhf framework that learn from a dataset instead of rollouts."""
