"""Prompts: the endless stream of a run, and the sources that core brings."""
