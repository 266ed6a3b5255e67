"""Decoding in fixed shapes: the same answers as in the shapes that the rows happen to have."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError

from rlhf_core.components import EngineContext
from rlhf_core.errors import ConfigError
from rlhf_core.models.builtin import build_character_tokenizer
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
        lambda forward, slots, tokens, _, spare, most: SlotModel(forward, slots, tokens, capture, spare, most),
    )
    same(collect(made, asked, sampling), expected)
    assert 1 <= len(prepared) <= 8  # 1, 2, 4 and 6 rows, at 64 and at 128 tokens


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.slow
def test_compiled_steps_give_the_same_answers(backend, precision, model, engine, requests, collect, monkeypatch):
    compiled, compile_with = [], torch.compile

    def compiling(run, **options):
        compiled.append(run)
        return compile_with(run, backend=backend, **options)

    monkeypatch.setattr(torch, "compile", compiling)
    torch._dynamo.reset()
    module, asked = model("llama"), requests(14, same=2)
    fast = engine(module, max_batch_size=6, precision=precision, compile=True)
    found = collect(fast, asked, SAMPLED)
    assert compiled
    if precision == "fp32":
        same(found, collect(engine(module, max_batch_size=6), asked, SAMPLED))
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    fast.weights_updated(1)
    same(collect(fast, asked, SAMPLED), found)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs  # what was compiled serves again


def test_a_step_that_cannot_be_compiled_is_named(model, engine, requests, collect, monkeypatch):
    def refusing(graph, inputs):
        raise RuntimeError("no such instruction")

    compile_with = torch.compile
    monkeypatch.setattr(torch, "compile", lambda run, **options: compile_with(run, backend=refusing, **options))
    torch._dynamo.reset()
    with pytest.raises(ConfigError, match="no such instruction") as caught:
        collect(engine(model("llama"), compile=True), requests(2), GREEDY)
    assert caught.value.where == "engine.compile"


def test_the_compiler_takes_no_packed_weights():
    with pytest.raises(ValidationError, match="exclude each other"):
        HfEngineConfig(compile=True, prepack="on")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("compiles", [False, True])
def test_captured_graphs_give_the_same_answers(compiles, precision, sampling, model, requests, collect):
    module, asked = model("llama").cuda(), requests(14, same=2)

    def answers(graphs: bool):
        context = EngineContext(
            model=module, tokenizer=build_character_tokenizer("abc"), device=torch.device("cuda"), seed=11
        )
        config = HfEngineConfig(max_batch_size=6, cuda_graphs=graphs, compile=compiles and graphs, precision=precision)
        return collect(build(config, context), asked, sampling)

    if precision == "fp32":
        same(answers(True), answers(False))
    else:
        assert answers(True).keys() == answers(False).keys()
