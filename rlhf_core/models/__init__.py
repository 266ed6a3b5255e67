"""Models: loading, what a forward pass is given, and what makes it faster."""
