"""One module per command. Each imports its dependencies when the command runs."""
