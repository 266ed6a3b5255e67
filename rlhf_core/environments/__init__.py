"""Episodes of several turns: what an environment is, how it is played, and what becomes of its tokens."""
