"""Verifiable rewards: each is a plain function, in a file of its own, that can be called by hand."""
