"""Rollouts: who makes which prompt, the maker, and how samples and weights travel in one process."""
