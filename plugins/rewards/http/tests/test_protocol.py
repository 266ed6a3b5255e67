"""What stands in a request and in a response."""

import json
from dataclasses import fields

import pytest
from http_rewards import make_rollout
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.types import Rollout, ToolCall, Turn
from rlhf_reward_http.protocol import (
    ProtocolError,
    Sample,
    decode_request,
    decode_response,
    encode_error,
    encode_request,
    encode_response,
)

TEXTS = st.text(max_size=20)
VALUES = st.recursive(st.none() | st.booleans() | st.integers() | TEXTS, st.lists, max_leaves=4)
TURNS = (
    Turn(
        role="policy",
        text="call",
        token_ids=(5, 2),
        logprobs=(-0.5, -1.0),
        reward=1.0,
        tool_calls=(ToolCall(name="add", arguments={"a": 1}), ToolCall(name="", error="no JSON")),
    ),
    Turn(role="environment", text="3", token_ids=(7,), logprobs=(0.0,)),
)
ROLLOUTS = st.builds(
    make_rollout,
    st.integers(0, 2**63 - 1),
    TEXTS,
    prompt=TEXTS,
    messages=st.none() | st.just(({"role": "user", "content": "é"},)),
    answer=VALUES,
    metadata=st.dictionaries(TEXTS, VALUES, max_size=3),
    finish_reason=st.sampled_from(["stop", "length"]),
    action_mask=st.none() | st.just((True, False)),
    group_id=st.integers(0, 9),
    turns=st.just(()) | st.just(TURNS),
)


@given(rollouts=st.lists(ROLLOUTS, max_size=3))
def test_samples_arrive_as_they_were_sent(rollouts):
    assert decode_request(encode_request(rollouts)) == rollouts


def test_a_sample_says_all_that_a_rollout_has():
    assert set(Sample.model_fields) == {field.name for field in fields(Rollout)}


def test_the_least_a_request_may_say():
    (rollout,) = decode_request(b'{"protocol":1,"samples":[{"sample_id":1,"prompt":"a","completion":"b"}]}')
    assert (rollout.prompt, rollout.completion, rollout.completion_ids, rollout.metadata) == ("a", "b", (), {})


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "Request: Input should be a valid dict"),
        (b"{}", "protocol: Field required"),
        (b'{"protocol":2,"samples":[]}', "protocol: Input should be 1"),
        (b'{"protocol":1}', "samples: Field required"),
        (b'{"protocol":1,"samples":[3]}', r"samples\.0: Input should be a valid dict"),
        (b'{"protocol":1,"samples":[{"sample_id":1,"prompt":"a"}]}', r"samples\.0\.completion: Field required"),
        (
            b'{"protocol":1,"samples":[{"sample_id":true,"prompt":"a","completion":""}]}',
            r"sample_id: Input should be a valid integer",
        ),
        (
            b'{"protocol":1,"samples":[{"sample_id":1,"prompt":"a","completion":"","messages":"hi"}]}',
            "messages: Input should be a valid list",
        ),
        (
            b'{"protocol":1,"samples":[{"sample_id":1,"prompt":"a","completion":"","policy_versions":7}]}',
            "policy_versions: Input should be a valid list",
        ),
        (
            b'{"protocol":1,"samples":[{"sample_id":1,"prompt":"a","completion":"","turns":[{"role":"user"}]}]}',
            r"^samples\.0\.turns\.0\.role: Input should be 'policy' or 'environment'$",
        ),
    ],
)
def test_a_request_that_is_none_says_what_is_wrong(body, said):
    with pytest.raises(ProtocolError, match=said):
        decode_request(body)


def test_what_json_cannot_hold_is_named():
    with pytest.raises(ProtocolError, match="sample 4 cannot be sent as JSON: it cannot contain a set"):
        encode_request([make_rollout(4, metadata={"seen": {1, 2}})])
    with pytest.raises(ProtocolError, match="sample 4 cannot be sent"):
        encode_request([make_rollout(4, answer=float("nan"))])


def test_a_long_error_is_cut():
    assert len(json.loads(encode_error("x" * 10_000))["error"]) == 500


def test_scores_and_errors():
    assert decode_response(encode_response([1.0, None, -2.5]), 3) == [1.0, None, -2.5]
    with pytest.raises(ProtocolError, match="1 scores for 2 samples"):
        decode_response(encode_response([1.0]), 2)
    with pytest.raises(ProtocolError, match="scores: Input should be a valid list"):
        decode_response(json.dumps({"protocol": 1, "scores": 1}).encode(), 1)
