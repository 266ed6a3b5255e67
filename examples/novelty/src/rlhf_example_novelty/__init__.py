"""Answers that are new: an example of every kind of part that a plugin can bring."""
