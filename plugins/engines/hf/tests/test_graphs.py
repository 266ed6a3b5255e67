"""Decoding in fixed shapes: the same answers as in the shapes that the rows happen to have."""

from __future__ import annotations

import pytest
import torch

from rlhf_core.builtin_models import build_character_tokenizer
from rlhf_core.components import EngineContext
from rlhf_core.types import SamplingParams
from rlhf_hf import engine as engine_module
from rlhf_hf.config import HfEngineConfig
from rlhf_hf.engine import build
from rlhf_hf.slot_model import SlotModel

GREEDY = SamplingParams(max_new_tokens=90, greedy=True)
SAMPLED = SamplingParams(max_new_tokens=90)


def same(found, expected) -> None:
    assert {key: a.token_ids for key, a in found.items()} == {key: a.token_ids for key, a in expected.items()}
    for key, answer in found.items():
        assert answer.logprobs == pytest.approx(expected[key].logprobs, abs=1e-4)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "llama-eager"])
def test_fixed_shapes_give_the_same_answers(family, sampling, model, engine, requests, collect, monkeypatch):
    """Rows leave and enter, and the cache grows past a block; every shape is prepared once until it does."""
    module, asked = model(family), requests(14, same=2)
    expected = collect(engine(module, max_batch_size=6), asked, sampling)
    prepared = []

    def capture(run):
        prepared.append(run)
        return run

    made = engine(module, max_batch_size=6)
    assert made.path.name == "slots"
    monkeypatch.setattr(
        engine_module,
        "SlotModel",
        lambda forward, slots, tokens, _, spare: SlotModel(forward, slots, tokens, capture, spare),
    )
    same(collect(made, asked, sampling), expected)
    assert 1 <= len(prepared) <= 8  # 1, 2, 4 and 6 rows, at 64 and at 128 tokens


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_captured_graphs_give_the_same_answers(precision, sampling, model, requests, collect):
    module, asked = model("llama").cuda(), requests(14, same=2)

    def answers(graphs: bool):
        context = EngineContext(
            model=module, tokenizer=build_character_tokenizer("abc"), device=torch.device("cuda"), seed=11
        )
        config = HfEngineConfig(max_batch_size=6, cuda_graphs=graphs, precision=precision)
        return collect(build(config, context), asked, sampling)

    if precision == "fp32":
        same(answers(True), answers(False))
    else:
        assert answers(True).keys() == answers(False).keys()
