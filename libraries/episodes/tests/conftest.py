"""For all tests of environments."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(scope="module", autouse=True)
def parsers_are_collected():
    """End the processes of response parsers, which stop when the parsers are collected."""
    yield
    gc.collect()
