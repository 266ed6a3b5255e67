"""The reward `http`, in front of a server that works, keeps the contract of rewards."""

import pytest
from http_rewards import serving

from rlhf_testing.contracts import RewardContract


def seen_by_the_server(rollouts):
    return [len(each.completion) + 0.1 * len(each.messages or ()) + 0.01 * len(each.metadata) for each in rollouts]


class TestHttp(RewardContract):
    plugin = "http"

    @pytest.fixture(scope="class")
    @classmethod
    def given(cls):
        with serving(seen_by_the_server) as server:
            yield {"url": server.url, "samples_per_request": 3}
