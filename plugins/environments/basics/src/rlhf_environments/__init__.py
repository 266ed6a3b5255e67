"""Basic environments: a guessing game, tools from Python functions, and scripted conversations."""
