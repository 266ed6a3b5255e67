"""Verifiable rewards. Each is a plain function in its own file and can be called directly."""
