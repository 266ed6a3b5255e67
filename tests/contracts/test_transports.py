"""Every transport of this repository keeps the contract; `local` is the one that others are compared with."""

from __future__ import annotations

import pytest

from rlhf_testing.contracts import TransportContract


class TestLocal(TransportContract):
    plugin = "local"


@pytest.mark.slow
class TestRay(TransportContract):
    """Slow: three runs, each of which starts Ray and its actors."""

    plugin = "ray"
