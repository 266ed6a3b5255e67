"""The real vLLM with images: its log-probs are the trainer's, also after new weights of the part that sees."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from seeing_models import Seeing, largest_gap, requests_of, write_folder

from rlhf_core import train
from rlhf_core.types import SamplingParams
from rlhf_testing.runs import tiny_run
from rlhf_vllm.images import TYPES

pytest.importorskip("vllm", reason="needs vLLM: make setup-vllm")
pytestmark = pytest.mark.slow
SIX = SamplingParams(max_new_tokens=6)


@pytest.mark.parametrize("family", TYPES)
def test_log_probs_are_those_of_the_trainer(family: str, tmp_path: Any, engine: Any, collect: Any) -> None:
    if family != "idefics3":
        pytest.importorskip("torchvision", reason="vLLM or transformers' processor imports it for this family")
    write_folder(family, tmp_path, num_heads=1)  # the CPU build's attention supports heads of 32 and more
    seeing = Seeing(tmp_path)
    contents = (("Which ", (40, 30), " is it?"), ("Two: ", (16, 24), (50, 20), "?"), ("No image",))
    prompts = [seeing.prompt(*content) for content in contents]
    made, first = engine(seeing.model, seeing.tokenizer), {}
    for version in (0, 1):
        if version:
            generator = torch.Generator().manual_seed(1)
            with torch.no_grad():
                for name, parameter in seeing.model.named_parameters():
                    if name.startswith("model.vis"):  # vision_tower, vision_model or visual
                        parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
            made.weights_updated(version)
        answers = collect(made, requests_of(prompts), SIX)
        answers = [answers[number] for number in range(len(answers))]
        assert largest_gap(seeing.model, prompts, answers) < 1e-4
        first[version] = [each.logprobs for each in answers]
    changed = [before != after for before, after in zip(first[0], first[1], strict=True)]
    assert changed == [True] * 4 + [False] * 2, "new weights of the vision tower change answers to images only"


def test_a_run_trains_with_it(tmp_path: Any) -> None:
    """Two episodes of GRPO on pictures, with an adapter that is merged into the weights that vLLM gets."""
    write_folder("idefics3", tmp_path / "model", num_heads=1)
    result = train(
        tiny_run(
            {
                "model": {"path": str(tmp_path / "model"), "device": "cpu", "lora": {"r": 4}},
                "prompts": {"name": "drawn-digits", "size": 12},
                "algorithm": {"name": "grpo"},
                "engine": {"name": "vllm", "kv_cache_bytes": 64 * 1024**2, "max_new_tokens": 4},
                "train": {"episodes": 2, "samples_per_prompt": 2},
            }
        ),
        output=tmp_path / "run",
    )
    assert result is not None and result.summary["status"] == "done"
    gaps = [line["rollout/logprob_gap_max"] for line in result.metrics if "rollout/logprob_gap_max" in line]
    assert len(gaps) >= 2 and max(gaps) < 1e-4
