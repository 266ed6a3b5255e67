"""The callers of rewards that the options `isolate` and `cache` of a reward's entry turn on."""
