"""Gymnasium environments, played in text."""
