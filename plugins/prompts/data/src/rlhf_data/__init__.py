"""Prompt sources: datasets, mixtures, streams, curricula and generated problems."""
