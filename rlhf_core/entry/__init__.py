"""What a command or a user calls: train, the quickstart, launching processes, inference."""
