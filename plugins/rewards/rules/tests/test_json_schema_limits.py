"""`json-schema` on answers that are hard to check, and schemas that no answer can be checked against."""

import json
import threading
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from rlhf_reward_rules.config import JsonSchemaConfig
from rlhf_reward_rules.json_schema import json_schema
from rlhf_reward_rules.processor_time import TimeUp, run_within
from rlhf_reward_rules.schema_check import make_validator

LINKED = {"type": "object", "properties": {"next": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}}}


def rollout(completion, **metadata):
    return SimpleNamespace(sample_id=7, completion=completion, answer=None, metadata=metadata)


def nested_any_of(depth):
    """Each level looks at its items twice if they do not fit."""
    levels = {str(level): {"anyOf": [{"items": {"$ref": f"#/$defs/{level + 1}"}}] * 2} for level in range(depth)}
    return {"$ref": "#/$defs/0", "$defs": levels | {str(depth): {"type": "string"}}}


@pytest.mark.parametrize("completion", ["1e999", "-1e999", '{"a": 1e999}', "7" * 400, "7" * 5000])
def test_a_number_too_large_scores_0(completion):
    fractional = {"multipleOf": 0.75, "properties": {"a": {"multipleOf": 0.75}}}
    assert json_schema([rollout(completion), rollout("1.5")], inline_schema=fractional) == [0.0, 1.0]


def test_an_answer_nested_too_deeply_scores_0():
    deep = '{"next": ' * 300 + "null" + "}" * 300
    assert json_schema([rollout(deep), rollout('{"next": {"next": null}}')], inline_schema=LINKED) == [0.0, 1.0]


@pytest.mark.parametrize(
    ("schema", "hard", "easy"),
    [
        ({"uniqueItems": True}, json.dumps([{"a": n} for n in range(4000)]), '[{"a": 1}, {"a": 2}]'),
        ({"pattern": "^(a+)+$"}, json.dumps("a" * 40 + "b"), '"aaa"'),
        (nested_any_of(40), "[" * 40 + "1" + "]" * 40, "[]"),
    ],
    ids=["uniqueItems", "pattern", "anyOf"],
)
def test_an_answer_that_takes_too_long_scores_0_alone(monkeypatch, caplog, schema, hard, easy):
    monkeypatch.setattr("rlhf_reward_rules.json_schema._SECONDS_PER_ANSWER", 0.3)
    samples = [rollout(easy), rollout(hard), rollout(easy)]
    assert json_schema(samples, inline_schema=schema, valid_json_score=0.5) == [1.0, 0.0, 1.0]
    (warning,) = caplog.messages
    assert "sample 7 scores 0: its answer takes more than 0.3 s" in warning


def test_fences_without_end_are_bounded(monkeypatch):
    monkeypatch.setattr("rlhf_reward_rules.json_schema._SECONDS_PER_ANSWER", 0.3)
    assert json_schema([rollout("```\n" * 100_000)], allow_fence=True) == [0.0]


def test_processor_time_is_limited_in_the_main_thread_only():
    with pytest.raises(TimeUp):
        run_within(0.05, lambda: [None for _ in iter(int, 1)])
    assert run_within(60.0, lambda: 3) == 3
    found = []
    thread = threading.Thread(target=lambda: found.append(run_within(60.0, lambda: 4)))
    thread.start()
    thread.join()
    assert found == [4]


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"$ref": "#"}, "reference '#' leads back to itself"),
        (
            {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/b"}]}, "b": {"$ref": "#/$defs/a"}}},
            "leads",
        ),
        ({"items": {"$ref": "#/$defs/a"}, "$defs": {"a": {"not": {"$ref": "#/$defs/a"}}}}, "'#/\\$defs/a' leads back"),
        ({"properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"not": {"$ref": "#/$defs/a"}}}}, "leads back"),
        (
            {
                "$ref": "#/$defs/a",
                "$defs": {
                    "a": {"items": {"$ref": "#/$defs/b"}, "not": {"$ref": "#/$defs/b"}},
                    "b": {"$ref": "#/$defs/a"},
                },
            },
            "leads back",
        ),
        ({"$dynamicRef": "#me", "$dynamicAnchor": "me"}, "'#me' leads back"),
        ({"properties": {"x": {"$ref": "#/$defs/missing"}}}, "'#/\\$defs/missing' cannot be resolved"),
        ({"$ref": "https://example.com/schema"}, "cannot be resolved"),
        ({"pattern": "("}, "is not a 'regex'"),
        ({"patternProperties": {"[": {}}}, "is not a 'regex'"),
        ({"type": "nonsense"}, "not a JSON schema"),
    ],
)
def test_a_schema_that_checks_nothing_is_a_config_error(schema, message, tmp_path):
    with pytest.raises(ValidationError, match=message):
        JsonSchemaConfig(inline_schema=schema)
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(schema))
    with pytest.raises(ValidationError, match=message):
        JsonSchemaConfig(schema_file=str(file))
    with pytest.raises(ValueError, match="sample 7: the schema.*" + message):
        json_schema([rollout("1", schema=schema)], metadata_key="schema")


def test_references_that_branch_on_and_on_hold_up_nothing(monkeypatch):
    monkeypatch.setattr("rlhf_reward_rules.json_schema._SECONDS_PER_ANSWER", 0.3)
    levels = {str(level): {"allOf": [{"$ref": f"#/$defs/{level + 1}"}] * 2} for level in range(60)}
    schema = {"$ref": "#/$defs/0", "$defs": levels | {"60": {}}}
    assert json_schema([rollout("1")], inline_schema=schema) == [0.0]
    assert json_schema([rollout("1", schema=schema), rollout("1")], metadata_key="schema") == [0.0, 1.0]


@pytest.mark.parametrize("text", ["{", "5", "[]", '"$schema"'])
def test_a_file_that_is_no_schema_is_a_config_error(tmp_path, text):
    file = tmp_path / "schema.json"
    file.write_text(text)
    with pytest.raises(ValidationError, match="not JSON|not a JSON schema"):
        JsonSchemaConfig(schema_file=str(file))


@pytest.mark.parametrize(
    "schema",
    [
        LINKED,
        True,
        {"$ref": "https://json-schema.org/draft/2020-12/schema"},
        {"$schema": "http://json-schema.org/draft-07/schema#", "$ref": "http://json-schema.org/draft-07/schema#"},
        {"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}], "$defs": {"a": {"type": ["object", "boolean"]}}},
        {"$defs": {"unused": {"$ref": "https://example.com/schema"}}},
        {"properties": {"$ref": {"type": "string"}, "pattern": True, "enum": {"enum": [{"$ref": "#"}]}}},
        {"$id": "https://a.test/", "$defs": {"b": {"$id": "b", "items": {"$ref": "/"}}}, "items": {"$ref": "b"}},
        {"dependentSchemas": {"a": {"required": ["b"]}}, "if": {"required": ["c"]}, "then": {"minProperties": 2}},
    ],
)
def test_a_schema_that_refers_to_itself_for_parts_is_fine(schema):
    assert make_validator(schema).is_valid({})


def test_a_limit_that_a_finalizer_drops_comes_again_and_is_not_reported():
    class Slow:
        def __del__(self):
            while True:
                pass

    def call():
        Slow()
        while True:
            pass

    with pytest.raises(TimeUp):
        run_within(0.05, call)
