"""One module per command; each imports its dependencies when it runs."""
