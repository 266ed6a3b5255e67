"""Rewards for the style of an answer."""
