"""JSON that a model wrote."""

import pytest

from rlhf_web.untrusted_json import UnreadableJson, read_first_json, read_json


def test_the_first_value_and_where_it_ends():
    assert read_first_json(' {"a": 1} x', 0) == ({"a": 1}, 9)
    assert read_json('{"a": {"a": [1, 2.5, true, null, "é"]}}') == {"a": {"a": [1, 2.5, True, None, "é"]}}
    assert read_json('{"brackets": "' + "[" * 100 + '"}') == {"brackets": "[" * 100}
    with pytest.raises(UnreadableJson):
        read_first_json("", 0)
