"""Fakes and contract suites: what a plugin author runs against their own plugin."""
