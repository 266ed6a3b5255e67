"""Bases and parts for strategy plugins."""
