"""Runs programs that a model wrote in a sandbox, and rewards and environments in processes that can be killed."""
