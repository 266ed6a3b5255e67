"""What is read of a server's errors, and what it may ask for."""

import pytest

from rlhf_web.client import _error_text, _retry_after_seconds


@pytest.mark.parametrize(("header", "seconds"), [("2", 2.0), ("99999", 60.0), ("Fri, 31 Dec 1999", 0.0), ("", 0.0)])
def test_retry_after(header, seconds):
    assert _retry_after_seconds(header) == seconds


def test_messages_of_errors_are_one_short_printable_line():
    assert _error_text(b'{"error":"out of\\n judges"}') == "out of judges"
    assert _error_text(b"<html>" + b"x" * 9999) == "<html>" + "x" * 494
    assert _error_text(b"\x1b[31mred") == "\\x1b[31mred"
