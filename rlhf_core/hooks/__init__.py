"""Calling hook plugins: the relay, those that are installed, and the callbacks of the seed classes."""
