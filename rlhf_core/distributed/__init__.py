"""Processes that train together: their group, how they were launched, signals, and the watch over a parent."""
