"""What compressed answers unfold to is bounded while they unfold."""

import gzip
import tracemalloc
import zlib

import pytest

from rlhf_reward_http.client import Unfolder, UnfoldingError


def unfold(encoding, content, max_bytes=10**6, piece=1000):
    unfolder = Unfolder(encoding, max_bytes)
    for start in range(0, len(content), piece):
        unfolder.add(content[start : start + piece])
    return unfolder.finish()


@pytest.mark.parametrize("piece", [1, 7, 10**6])
@pytest.mark.parametrize(
    ("encoding", "fold"),
    [("", bytes), ("identity", bytes), ("gzip", gzip.compress), ("X-GZIP", gzip.compress), ("deflate", zlib.compress)],
)
def test_what_was_folded_comes_back(encoding, fold, piece):
    content = b"score " * 500
    assert unfold(encoding, fold(content), piece=piece) == content
    assert unfold(encoding, fold(content), max_bytes=len(content), piece=piece) == content
    with pytest.raises(UnfoldingError, match="longer than 2,999 bytes"):
        unfold(encoding, fold(content), max_bytes=2999, piece=piece)


def test_a_bomb_takes_no_memory():
    bomb = gzip.compress(bytes(64 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(UnfoldingError, match="longer than 10,000 bytes"):
            unfold("gzip", bomb, max_bytes=10_000, piece=1 << 20)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("encoding", "content", "says"),
    [
        ("br", b"x", 'content encoding "br" is none of gzip, deflate'),
        ("gzip, gzip", b"x", "is none of"),
        ("gzip", b"not gzip", "is not gzip"),
        ("gzip", gzip.compress(b"x" * 99, mtime=0)[:-9], "its end is missing"),
        ("gzip", b"", "its end is missing"),
    ],
)
def test_a_bad_encoding_is_named(encoding, content, says):
    with pytest.raises(UnfoldingError, match=says):
        unfold(encoding, content)


def test_what_follows_the_end_is_not_kept():
    unfolder = Unfolder("gzip", 100)
    unfolder.add(gzip.compress(b"the answer"))
    for _ in range(50):
        unfolder.add(b"x" * 1000)
    assert unfolder.finish() == b"the answer"
    assert len(unfolder._stream.unused_data) <= 1000
