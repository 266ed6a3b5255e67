"""Rewards for how an answer is written."""
