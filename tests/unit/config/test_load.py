"""Reading run files, and laying flags and --set over them."""

import json
from pathlib import Path, PurePosixPath

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.config.load import (
    apply_override,
    load_run,
    parse_override,
    parse_reward,
    plain,
    read_run_file,
)
from rlhf_core.errors import ConfigError
from rlhf_core.util.yaml12 import dump_yaml, parse_yaml

KEY = st.from_regex(r"[a-z][a-z_]{0,8}", fullmatch=True)
SCALAR = (
    st.none()
    | st.booleans()
    | st.integers(-(10**12), 10**12)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cc", "Cs"], exclude_characters="\ufeff\u2028\u2029"), max_size=20)
)
VALUE = st.recursive(SCALAR, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEY, inner, max_size=3))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("1.0e-6", 1e-6),
        ("-2E3", -2000.0),
        (".5", 0.5),
        ("3", 3),
        ("-0", 0),
        ("1_000", 1000),
        ("0x1f", 31),
        ("0o17", 15),
        ("017", 17.0),
        ("1:30", "1:30"),
        ("2026-01-02", "2026-01-02"),
        ("true", True),
        ("null", None),
        ("~", None),
        ("", None),
        ("[1, a]", [1, "a"]),
        ("{a: 1e3}", {"a": 1000.0}),
        ("1.2.3", "1.2.3"),
        ("e5", "e5"),
        (".inf", float("inf")),
    ],
)
def test_scalars_are_read_as_yaml_1_2(text, value):
    read = parse_yaml(text, "x")
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("text", "where", "message"),
    [
        ("model:\n\tpath: x\n", "x:2:1", "YAML does not allow a tab here: use spaces"),
        ("model:\n  path: x\n\ttrain: 3\n", "x:3:1", "YAML does not allow a tab here: use spaces"),
        ("model: {path: x\ntrain: {episodes: 3}\n", "x:1:8", 'the "{" is not closed, or a comma is missing after it'),
        ("a: 1\nrewards: [{name: x}\n", "x:2:10", 'the "[" is not closed, or a comma is missing after it'),
        ("model: {path:", "x:1:14", 'the file ends before a "{" or "[" is closed'),
        ('a: "text\nb: 3\n', "x:1:4", "the quote is not closed"),
        ("a: b: c\n", "x:1:5", 'unexpected ":": put text that contains ": " in quotes'),
        ("a:\n  b: 1\n c: 2\n", "x:3:2", "does not match the lines above: check the indentation"),
        ("a: {b: 1}}\n", "x:1:10", "check the indentation, brackets and quotes of this line"),
        ("a: @x\n", "x:1:4", 'text that begins with "@" needs quotes'),
    ],
)
def test_common_mistakes_in_yaml_are_explained_in_plain_words(text, where, message):
    with pytest.raises(ConfigError) as error:
        parse_yaml(text, "x")
    assert error.value.where == where
    assert message in error.value.message


@given(VALUE)
def test_what_is_dumped_is_read_back(value):
    assert parse_yaml(dump_yaml(value), "x") == value


@pytest.mark.parametrize("text", ["1e5", "0E0", "017", "1:30", "no", "2026-01-02", "null", "0o7", "~", "=", "x: y"])
def test_text_that_looks_like_something_else_stays_text(text):
    assert parse_yaml(dump_yaml({"stop": [text]}), "x") == {"stop": [text]}
    assert yaml.safe_load(dump_yaml({"stop": [text]})) == {"stop": [text]}


@given(st.lists(KEY, min_size=1, max_size=4), VALUE)
def test_set_puts_the_value_where_the_path_says(keys, value):
    run = load_run({}, [f"{'.'.join(['hooks', *keys])}={json.dumps(value, ensure_ascii=False)}"])
    place = run["hooks"]
    for key in keys:
        place = place[key]
    assert place == value


@given(st.dictionaries(KEY, VALUE, max_size=4), KEY, SCALAR)
def test_set_changes_nothing_else(run, key, value):
    before = json.loads(json.dumps(run))
    apply_override(run, key, value)
    assert run.pop(key) == value
    before.pop(key, None)
    assert run == before


def test_later_overrides_win_and_reach_into_lists():
    run = {"rewards": ["a:0.5", {"name": "b"}], "optimizer": {"lr": 1}}
    overrides = ["rewards.0.weight=2", "rewards.1.label=second", ("optimizer.lr", 3), "optimizer.lr=4e-1"]
    overrides += ["eval=null", "eval.num_prompts=3"]
    loaded = load_run(run, overrides)
    assert loaded["rewards"] == [{"name": "a", "weight": 2}, {"name": "b", "label": "second"}]
    assert loaded["optimizer"] == {"lr": 0.4}
    assert loaded["eval"] == {"num_prompts": 3}
    assert run == {"rewards": ["a:0.5", {"name": "b"}], "optimizer": {"lr": 1}}, "the source stays as it was"


def test_short_forms_are_written_out():
    run = load_run({"algorithm": "ppo", "rewards": ["./r.py:f:2"], "eval": {"prompts": "sort-digits"}})
    assert run == {
        "algorithm": {"name": "ppo"},
        "rewards": [{"name": "./r.py:f", "weight": 2.0}],
        "eval": {"prompts": {"name": "sort-digits"}},
    }


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rewards.1.weight=2", r'"1" is not an item of the list \(items: 0 to 0\)'),
        ("rewards.x=2", '"x" is not an item'),
        ("train.seed.deep=2", "train.seed is 3, which does not contain keys"),
        ("train.seed", "is not key.path=value"),
        ("=3", "is not key.path=value"),
        ("a..b=3", "is not key.path=value"),
        ("train.seed=[1", r'the "\[" is not closed'),
        ("nonsense=", "needs a value"),
    ],
)
def test_a_wrong_override_names_itself(override, message):
    with pytest.raises(ConfigError, match=message) as error:
        load_run({"rewards": ["a"], "train": {"seed": 3}}, [override])
    assert "--set" in str(error.value)


def test_the_value_may_hold_an_equals_sign():
    assert parse_override("a.b=x=y") == ("a.b", "x=y")


@pytest.mark.parametrize(
    ("text", "name", "weight"),
    [
        ("brevity", "brevity", 1.0),
        ("brevity:0.1", "brevity", 0.1),
        ("brevity:-2e-1", "brevity", -0.2),
        ("./my.py:brevity", "./my.py:brevity", 1.0),
        ("./my.py:brevity:3", "./my.py:brevity", 3.0),
        ("/a:b/my.py:f:0.5", "/a:b/my.py:f", 0.5),
        ("./my.py:inf", "./my.py:inf", 1.0),
    ],
)
def test_the_short_form_of_a_reward(text, name, weight):
    assert parse_reward(text) == {"name": name, "weight": weight}


@pytest.mark.parametrize("text", ["brevity:much", "brevity:nan", "brevity:inf", ":1", "./my.py:f:x"])
def test_a_wrong_weight_is_an_error(text):
    with pytest.raises(ConfigError, match="is not a reward"):
        parse_reward(text)


@pytest.mark.parametrize(
    ("text", "where", "message"),
    [
        ("a: 1\nb: [1\n", ":2:4", "is not closed"),
        ("a: 1\nb: 2\na: 3\n", ":3:1", 'the key "a" is set twice, first on line 1'),
        ("a:\n  b: 1\n  b: 2\n", ":3:3", 'the key "b" is set twice, first on line 2'),
        ("a: 1\n2: 3\n", ":2:1", "the key 2 is not text"),
        ("a: !!python/object:os.system {}\n", ":1:4", "could not determine a constructor"),
        ("a: *nowhere\n", ":1:4", "undefined alias"),
        ("- 1\n", "", "a run file must be a mapping of sections, this is a list"),
    ],
)
def test_a_wrong_file_names_the_line(tmp_path, text, where, message):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as error:
        read_run_file(path)
    assert error.value.where == f"{path}{where}"
    assert error.value.exit_code == 2


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        read_run_file(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="is a directory"):
        read_run_file(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"a: \xff")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_run_file(tmp_path / "latin.yaml")


def test_empty_files_merge_keys_and_anchors(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("")
    assert load_run(path) == {}
    path.write_text("a: &x {b: 1, c: 2}\nd: {<<: *x, c: 3}\n")
    assert load_run(path)["d"] == {"b": 1, "c": 3}


def test_python_values_become_plain_ones():
    assert plain({"a": (1, Path("x"))}) == {"a": [1, "x"]}
    assert plain(PurePosixPath("y")) == "y"
    with pytest.raises(ConfigError, match=r"a\.0: a run file cannot contain a set"):
        plain({"a": [{1, 2}]})
    with pytest.raises(ConfigError, match="the key 3 is not text"):
        plain({3: 1})
