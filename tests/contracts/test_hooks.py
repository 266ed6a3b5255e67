"""The hook plugins with options of this repository, where they do not have tests of their own."""

from rlhf_testing.contracts import HooksContract


class TestEarlyStop(HooksContract):
    """Built in."""

    plugin = "early-stop"
    options = {"metric": "reward/mean", "above": 0.9}
