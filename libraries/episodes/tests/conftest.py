"""For all tests of environments."""

from __future__ import annotations

import gc

import pytest

from rlhf_episodes import response_formats
from rlhf_episodes.response_parser import ResponseParser


@pytest.fixture(scope="module", autouse=True)
def parsers_are_collected():
    """End the processes of response parsers, which stop when the parsers are collected."""
    yield
    gc.collect()


@pytest.fixture(scope="module")
def one_parser():
    """All response formats parse in one process, which imports transformers once."""
    parser = ResponseParser()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(response_formats, "ResponseParser", lambda: parser)
        yield
    parser._end()
