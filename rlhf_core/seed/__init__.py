"""What the seed's classes share: `**generate_kwargs`, batches of a prompt loader, reward models."""
