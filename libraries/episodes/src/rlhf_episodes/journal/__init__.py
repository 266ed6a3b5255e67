"""Half-finished episodes survive the end of a run: finished turns and episodes are recorded in the run folder.

An episode depends on its task, its environment and the policy's turns. A later attempt of the run gives the recorded
turns to the environment instead of sampling them again. An environment with `state` and `restore` continues from its
last recorded state. Episodes that ended are not played again.
"""
