"""Commands to a running run."""
