"""Environments in a child process, which can be killed if one blocks the GIL, crashes or floods its output.

`worker.py` and `policy.py` run in the child. An environment there gets a proxy of the policy: turns and forks are
messages, while rows, tokens, limits and deadlines stay in the run. The child sends JSON, which is validated and limited
in size. The run sends pickles, since the child trusts the run that started it.

Many episodes share a child. If it crashes, floods its output or exceeds a deadline, it is killed. The episodes whose
call was running are then played again, each in its own child, so that a second failure is attributed to that episode.
"""
