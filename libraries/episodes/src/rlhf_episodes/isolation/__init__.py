"""Environments in their own process, which can be killed: one that holds Python's lock, crashes or floods.

`worker.py` and `policy.py` run there. The policy that an environment sees there is a proxy: turns and forks are
messages, and rows, tokens, bounds and deadlines stay here. What the process writes is JSON within bounds and is
checked; what it is given is pickled, as it comes from the run that started it.

Many episodes share a process. One that does harm, or has a call that passes its deadline, is ended. The episodes whose
call ran then are played again, each in a process by itself, where whatever it does is their fault.
"""
