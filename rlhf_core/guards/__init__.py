"""Hook plugins of core that decide about a run: `guards` (the section of that name), `early-stop` and `control`.

They use the public hook `rlhf_decide`; a hook plugin that implements it can do all that they do.
"""
