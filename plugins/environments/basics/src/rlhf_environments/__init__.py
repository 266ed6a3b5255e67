"""Environments for a start: a game of guessing, tools from functions, scripted conversations."""
