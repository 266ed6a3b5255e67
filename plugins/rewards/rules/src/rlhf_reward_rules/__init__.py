"""Verifiable rewards for the rlhf framework: exact match, regular expressions, length."""
