"""What differs between two run files."""

from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.config.fitting import config_changes
from rlhf_core.config.sections import LoraConfig

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)


def test_every_changed_option_is_named_with_both_values():
    before = {"optimizer": {"lr": 1e-3}, "rewards": [{"name": "a", "weight": 1}], "train": {"seed": 0, "episodes": 2}}
    after = {"optimizer": {"lr": 1e-4}, "rewards": [{"name": "a", "weight": 2}], "train": {"seed": 0, "episodes": 3}}
    changes = config_changes(before, after)
    assert [(c.key, c.before, c.after) for c in changes] == [
        ("optimizer.lr", 1e-3, 1e-4),
        ("rewards.0.weight", 1, 2),
        ("train.episodes", 2, 3),
    ]
    assert str(changes[2]) == "train.episodes: 2 -> 3"


def test_what_came_and_what_went():
    changes = config_changes({"engine": {"stop": ["a"]}, "eval": None}, {"eval": {"num_prompts": 4}})
    assert [(c.key, c.before, c.after) for c in changes] == [
        ("eval.num_prompts", None, 4),
        ("engine.stop", ["a"], None),
    ]


@given(st.dictionaries(st.sampled_from("abc"), values))
def test_a_run_file_does_not_differ_from_itself(run):
    assert config_changes(run, run) == []


def test_a_run_from_before_the_variants_of_lora_is_unchanged():
    old = {"r": 4, "alpha": 8.0, "dropout": 0.0, "target_modules": None}
    before, after = ({"model": {"path": "m", "lora": lora}} for lora in (old, LoraConfig(**old).model_dump()))
    assert config_changes(before, after) == []
    after["model"]["lora"]["dora"] = True
    assert [str(change) for change in config_changes(before, after)] == ["model.lora.dora: False -> True"]
