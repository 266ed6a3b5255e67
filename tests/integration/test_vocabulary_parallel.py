"""Log-probs, entropies and gradients of a policy whose vocabulary two processes share, against the whole one."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from running import Forked, ranks, run_all
from torch import Tensor

from rlhf_core.batching import collate
from rlhf_core.components import StrategyContext
from rlhf_core.models.forward_passes import applying
from rlhf_core.util.tensor_files import load_tree, save_tree
from rlhf_forward.forward import policy_forward
from rlhf_passes import lean_head
from rlhf_passes.fast_passes import FastPasses
from rlhf_testing.models import tiny_model
from rlhf_testing.samples import make_item
from rlhf_torch.config import FsdpConfig
from rlhf_torch.fsdp import FsdpStrategy

CASES = [(tied, lean, vocabulary) for tied in (False, True) for lean in (False, True) for vocabulary in (16, 17)]


def model_of(tied: bool, vocabulary: int) -> torch.nn.Module:
    """17 rows cannot be shared equally: embedding and head are then gathered."""
    model = tiny_model(seed=4)
    torch.manual_seed(5)  # of the row that is added
    model.resize_token_embeddings(vocabulary, mean_resizing=False)
    if tied:
        model.config.tie_word_embeddings = True
        model.tie_weights()
    return model


def passed(model: torch.nn.Module, lean: bool) -> dict[str, Tensor]:
    """Log-probs and entropies of two ragged rows; the model has their gradients."""
    items = [make_item(0, num_actions=5), make_item(3, num_actions=2, num_prompt_tokens=6)]
    before, lean_head.MIN_LOGITS = lean_head.MIN_LOGITS, 0 if lean else 1 << 60
    chunk, lean_head.CHUNK_LOGITS = lean_head.CHUNK_LOGITS, 48  # three tokens of 16 logits
    try:
        with applying(FastPasses(), nullcontext()):
            found = policy_forward(model, collate(items), 0.7, with_entropy=True)
    finally:
        lean_head.MIN_LOGITS, lean_head.CHUNK_LOGITS = before, chunk
    assert found.entropy is not None
    weights = torch.linspace(-1, 2, found.log_probs.numel()).view_as(found.log_probs)
    ((found.log_probs + 0.3 * found.entropy) * weights).sum().backward()
    return {"log_probs": found.log_probs.detach(), "entropies": found.entropy.detach()}


def one_rank(out: Path, rank: int) -> None:
    torch.set_num_threads(1)
    strategy = FsdpStrategy(FsdpConfig(tensor_parallel=2), StrategyContext(device="cpu"))
    strategy.setup()
    seen = {}
    for index, (tied, lean, vocabulary) in enumerate(CASES):
        model = model_of(tied, vocabulary)
        trained = strategy.prepare(model, strategy.make_optimizer(model.parameters(), lr=0.1))
        found = passed(trained.model, lean)
        rows = {name: each.to_local().shape[0] for name, each in model.named_parameters() if "embed" in name}
        gradients = {name: each.grad.full_tensor() for name, each in model.named_parameters()}
        seen[str(index)] = {**found, "gradients": gradients, "rows": rows["model.embed_tokens.weight"]}
    if rank == 1:
        save_tree(out / "seen.safetensors", seen)
    strategy.teardown()


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    out = tmp_path_factory.mktemp("heads")
    run_all(*(Forked(one_rank, out, rank, env=place) for rank, place in enumerate(ranks(2))))
    return load_tree(out / "seen.safetensors")


@pytest.mark.parametrize("index", range(len(CASES)))
def test_it_is_the_same_policy(seen: dict[str, dict], index: int) -> None:
    tied, lean, vocabulary = CASES[index]
    alone, found = model_of(tied, vocabulary), seen[str(index)]
    expected = passed(alone, lean)
    for name, values in expected.items():
        assert torch.allclose(found[name], values, atol=1e-6), name
    gradients = {name: parameter.grad for name, parameter in alone.named_parameters()}
    assert set(found["gradients"]) == set(gradients)
    for name, gradient in gradients.items():
        assert gradient is not None
        assert torch.allclose(found["gradients"][name], gradient, atol=1e-5), name
    assert found["rows"] == (8 if vocabulary == 16 else 17)
