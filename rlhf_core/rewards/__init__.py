"""Scoring answers: calling rewards within a deadline, in threads or processes, caching and combining them."""
