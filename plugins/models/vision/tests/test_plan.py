"""Memory of runs with images, as `rlhf plan` estimates it."""

import pytest

from rlhf_core.config.resolve import resolve
from rlhf_core.entry.train import check_run
from rlhf_plan import plan_run

RUN = {
    "model": {"path": "builtin:tiny-vision"},
    "prompts": {"name": "drawn-digits", "size": 12},
    "algorithm": {"name": "grpo", "kl_coef": 0.05},
    "rewards": [{"name": "exact-match"}],
    "engine": {"name": "hf", "max_new_tokens": 3},
    "train": {"episodes": 2, "prompts_per_episode": 4, "samples_per_prompt": 2, "train_batch_size": 4},
}


def parts_of(**changes):
    resolved = resolve({**RUN, **changes})
    (process,) = plan_run(resolved, check_run(resolved)).processes
    return process.bytes_by_part


def test_images_of_an_episode_and_of_held_out_prompts_are_counted():
    image = 3 * 32 * 32
    few = parts_of()["images of prompts"]
    assert 4 * image <= few <= 4 * (image + 64)  # with the columns of sizes
    held_out = parts_of(prompts={"name": "drawn-digits", "size": 40}, eval={"num_prompts": 12})
    assert held_out["images of prompts"] == 4 * few


def test_the_vision_tower_is_a_part_of_the_activations():
    import torch
    from transformers import CLIPVisionConfig

    from rlhf_core.columns import Column, Columns
    from rlhf_plan.inputs import InputCost

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    tower = CLIPVisionConfig(**sizes, patch_size=8, image_size=32)
    model = torch.nn.Module()
    model.config = type("Config", (), {"vision_config": tower})()
    kinds = {"pixels": Column(per="prompt", dtype="uint8", model_input=True)}
    cost = InputCost.of([Columns({"pixels": torch.zeros(2, 3, 32, 32)}, kinds)], model)
    assert (cost.stored_bytes, cost.read_bytes) == (2 * 3072, 2 * 3072 * 4)
    assert cost.kept_bytes == 2 * 16 * 2 * (8 * 64 + 3 * 128) * 4
    assert InputCost.of([Columns()], model) == InputCost()


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen2_vl", "idefics3", "gemma3", "internvl"])
def test_a_model_folder_is_planned_from_its_config(folders, family):
    parts = parts_of(model={"path": str(folders(family))})
    assert parts["images of prompts"] > 0 and parts["policy weights"] > 0
