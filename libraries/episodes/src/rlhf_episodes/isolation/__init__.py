"""Environments in their own process, which can be killed: one that holds Python's lock, crashes or floods.

`inside/` is what runs there. The policy that an environment sees there is a proxy: turns and forks are messages, and
rows, tokens, bounds and deadlines stay here. What the process writes is JSON within bounds and is checked; what it is
given is pickled, as it comes from the run that started it.
"""
