"""Each process's part of a tensor, read from a file: what cutting the whole tensor gives."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from rlhf_core.components import StrategyContext
from rlhf_core.config.sections import LoraConfig, ModelConfig
from rlhf_models import load_policy
from rlhf_strategies import stored_parameters
from rlhf_strategies.shards import local_part
from rlhf_testing.models import tiny_tokenizer
from rlhf_testing.tiny_training import tiny_model
from rlhf_torch.config import FsdpConfig
from rlhf_torch.fsdp import FsdpStrategy


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    model = tiny_model(seed=3)
    model.bfloat16().save_pretrained(path)
    tiny_tokenizer("0123456789>,").save_pretrained(path)
    return str(path)


@pytest.fixture
def last_of_six():
    """This process is the last of six, which no length of the model divides, and the others do not exist.

    So nothing may be communicated. One rank only: torch keeps some of what it derives from it as long as it lives.
    """
    dist.init_process_group("fake", rank=5, world_size=6, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(("tensor_parallel", "lora"), [(1, None), (2, None), (2, LoraConfig(r=3))])
def test_a_process_reads_its_part(folder, last_of_six, tensor_parallel, lora):
    strategy = FsdpStrategy(FsdpConfig(tensor_parallel=tensor_parallel), StrategyContext(device="cpu"))
    strategy.setup()
    config = ModelConfig(path=folder, lora=lora)
    whole = dict(load_policy(config, dtype=torch.float32, seed=0).named_parameters())
    with strategy.model_init_context():
        model = load_policy(config, dtype=torch.float32, seed=0)
    assert stored_parameters(model)
    strategy.prepare_inference(model)
    assert not stored_parameters(model)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.to_local(), local_part(parameter, whole[name]).to_local()), name
