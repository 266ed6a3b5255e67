"""What checking a run has built is what the run goes on with."""

import pytest
import transformers

from rlhf_core import train
from rlhf_testing.models import save_tiny_model
from rlhf_testing.runs import tiny_run

COUNTED = """
from importlib import import_module
from rlhf_core import Component
from rlhf_data.config import SortDigitsConfig
from rlhf_ppo.config import PPOConfig

built = []

def counting(name, module):
    def build(config, context):
        built.append(name)
        return import_module(module).build(config, context)
    return build

build_algorithm = counting("algorithm", "rlhf_ppo.algorithm")
build_prompts = counting("prompts", "rlhf_data.sort_digits")
algorithm = Component("Counts.", PPOConfig, "counted:build_algorithm")
prompts = Component("Counts.", SortDigitsConfig, "counted:build_prompts")
"""


@pytest.fixture
def counted(install, monkeypatch):
    targets = {"rlhf.algorithms": {"counted": "counted:algorithm"}, "rlhf.prompts": {"counted": "counted:prompts"}}
    install("counted", targets, {"counted": COUNTED})
    import counted

    load = transformers.AutoTokenizer.from_pretrained

    def from_pretrained(*args, **options):
        counted.built.append("tokenizer")
        return load(*args, **options)

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", from_pretrained)
    return counted.built


def test_nothing_is_built_twice(counted, tmp_path):
    source = {"name": "counted", "num_digits": 2, "size": 50}
    evaluation = {"num_prompts": 2, "prompts": source}
    changes = {"model": {"path": str(save_tiny_model(tmp_path / "model"))}, "eval": evaluation, "algorithm": "counted"}
    run = {**tiny_run(changes), "prompts": source}
    result = train(run, output=tmp_path / "run")
    assert result.summary["status"] == "done"
    assert sorted(counted) == ["algorithm", "prompts", "prompts", "tokenizer"]
