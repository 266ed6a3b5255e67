"""Images of prompts: what vLLM's process gets, with `fake/vllm`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from seeing_models import Seeing, requests_of, write_folder

from rlhf_core import train
from rlhf_core.columns import Column
from rlhf_core.config.sections import LoraConfig
from rlhf_core.errors import ConfigError, PluginError
from rlhf_core.models.kinds import MARK
from rlhf_core.types import SamplingParams
from rlhf_models import CausalLM
from rlhf_testing.runs import tiny_run
from rlhf_vllm.images import TYPES, image_input
from rlhf_vllm.names import WeightNames, has_packed_output, published_names

TWO = SamplingParams(max_new_tokens=2)
pytestmark = pytest.mark.usefixtures("fake_vllm")


@pytest.fixture
def seeing() -> Seeing:
    """`builtin:tiny-vision`, whose weights sum up to zero."""
    made = Seeing("builtin:tiny-vision")
    with torch.no_grad():
        for parameter in made.model.parameters():
            parameter.zero_()
    return made


def test_images_reach_vllm_with_the_ids_and_places_of_the_trainer(seeing: Seeing, engine: Any, collect: Any) -> None:
    """The fake counts images and rows of pixels, and asserts that each image token belongs to an image."""
    prompts = [seeing.prompt("Which?", (32, 32)), seeing.prompt((20, 9), "and", (32, 32)), seeing.prompt("No image")]
    made = engine(seeing.model, seeing.tokenizer)
    for version in (0, 1):
        if version:
            made.weights_updated(version)
        found = collect(made, requests_of(prompts), TWO)
        first = prompts[0].prompt_ids[0]
        assert [found[number].token_ids[0] - first for number in range(6)] == [2, 2, 4, 4, 0, 0]
        assert {each.policy_version for each in found.values()} == {version}


def test_an_answer_ends_at_an_image_token(seeing: Seeing, engine: Any, monkeypatch: Any) -> None:
    """vLLM would read it as an image token in the next step, and the trainer reads it as the pad token."""
    started: list[Any] = []
    monkeypatch.setattr("rlhf_vllm.engine.VllmProcess", lambda settings: started.append(settings))
    engine(seeing.model, seeing.tokenizer)._backend = SimpleNamespace(close=lambda: None)
    assert set(started[0].end_ids) == {seeing.tokenizer.eos_token_id, seeing.kind.image_token_id}


@pytest.mark.parametrize("family", TYPES)
def test_arguments_are_those_of_the_model_in_vllm(family: str, tmp_path: Any) -> None:
    write_folder(family, tmp_path)
    seeing = Seeing(tmp_path)
    prompt = seeing.prompt("Two: ", (16, 24), (50, 20), "?")
    given = seeing.kind.image_prompt(prompt.prompt_ids, prompt.columns.model_inputs)
    made = image_input(given.ids, given.images, model_type=family, image_token_id=3, version="7")
    names = {"pixel_values": torch.float32}
    names |= {"image_num_patches": torch.int64, "image_token_id": torch.int64} if family == "internvl" else {}
    names |= {"image_grid_thw": torch.int64} if family.startswith("qwen") else {}
    if family in ("idefics3", "smolvlm"):
        names |= {"num_patches": torch.int64, "pixel_attention_mask": torch.bool}
    for item, image in zip(made["mm_kwargs"]["image"], given.images, strict=True):
        assert {name: value.dtype for name, value in item.items()} == names
        assert torch.equal(item["pixel_values"], image.pixels)
        count = item.get("num_patches", item.get("image_num_patches"))
        assert count is None or int(count) == len(image.pixels)
    assert made["mm_hashes"]["image"] == [f"{each.digest}-7" for each in given.images]
    assert made["cache_salt"] == "7"
    for place, image in zip(made["mm_placeholders"]["image"], given.images, strict=True):
        assert (place.offset, place.length) == (image.first, len(image.is_feature))
        assert place.is_embed is None or torch.equal(place.is_embed, image.is_feature)


def test_a_model_without_an_output_layer_in_vllm_keeps_its_ties(module: Any) -> None:
    assert has_packed_output(module, "cpu") and not has_packed_output(module, "cuda")
    assert not has_packed_output(SimpleNamespace(config=SimpleNamespace(model_type="gemma2")), "cpu")


@pytest.mark.parametrize(
    ("family", "part", "published"),
    [
        ("llava", "model.vision_tower.embeddings.", "vision_tower.vision_model.embeddings."),
        ("gemma3", "model.vision_tower.embeddings.", "vision_tower.vision_model.embeddings."),
        ("idefics3", "model.vision_model.embeddings.", "model.vision_model.embeddings."),
    ],
)
def test_weights_have_the_names_of_published_files(family: str, part: str, published: str, tmp_path: Any) -> None:
    """A model made in code has no record of them, and vLLM does not know the modules of newer transformers."""
    write_folder(family, tmp_path)
    model = Seeing(tmp_path).model
    names = [name for name, _ in model.named_parameters() if name.startswith(part)]
    assert names and [published_names(model)(name) for name in names] == [
        published + name.removeprefix(part) for name in names
    ]


def test_tied_weights_are_sent_twice_to_a_cpu_build_without_ties(tmp_path: Any) -> None:
    """Its packed copy of the output layer does not follow the input embedding."""
    write_folder("internvl", tmp_path)
    model = Seeing(tmp_path).model
    head, embedding = "lm_head.weight", "model.language_model.embed_tokens.weight"
    shard = {embedding: model.get_input_embeddings().weight}
    for unties, names in ((True, {"lm_head.weight", embedding}), (False, {embedding})):
        assert model.lm_head.weight is shard[embedding] and head in model.all_tied_weights_keys
        (sent,) = WeightNames(model, published=False, unties=unties).renamed([shard])
        assert sent.keys() == names and all(value is shard[embedding] for value in sent.values())
    (sent,) = WeightNames(model, published=True, unties=True).renamed([shard])
    assert sent.keys() == {"language_model.lm_head.weight", "language_model.model.embed_tokens.weight"}


def test_other_inputs_of_a_model_are_refused_by_name(module: Any, engine: Any) -> None:
    kind = CausalLM()
    kind.columns = {"sounds": Column(per="prompt", model_input=True)}
    setattr(module, MARK, kind)
    with pytest.raises(ConfigError, match="vLLM gets tokens and images, not sounds"):
        engine(module)


def test_a_model_that_vllm_computes_otherwise_is_refused(engine: Any, tmp_path: Any) -> None:
    """Tokens of an image of Gemma 3 attend to each other in both directions, but not in vLLM's CPU build."""
    write_folder("gemma3", tmp_path)
    gemma = Seeing(tmp_path)
    with pytest.raises(ConfigError, match="not known to be the trainer's for models of the type gemma3") as raised:
        engine(gemma.model, gemma.tokenizer)
    assert "use the engine hf, or one of llava, " in str(raised.value)


def test_a_version_of_vllm_without_processed_images_is_refused_at_the_start(
    seeing: Seeing, engine: Any, monkeypatch: Any
) -> None:
    monkeypatch.setenv("FAKE_VLLM", "old")
    with pytest.raises(PluginError, match="does not take processed images") as raised:
        engine(seeing.model, seeing.tokenizer)
    assert "install vLLM 0.32 or newer" in str(raised.value)


def test_an_adapter_that_vllm_would_apply_to_a_part_is_refused(seeing: Seeing, engine: Any) -> None:
    model = seeing.kind.add_adapter(seeing.model, LoraConfig(r=4), seed=0)
    with pytest.raises(ConfigError, match="engine.adapter: vLLM applies adapters to the language model only"):
        engine(model, seeing.tokenizer, adapter=True)


def test_a_run_with_images_is_accepted() -> None:
    train(
        tiny_run(
            {
                "model": {"path": "builtin:tiny-vision"},
                "prompts": {"name": "drawn-digits", "size": 12},
                "engine": {"name": "vllm", "max_new_tokens": 3},
            }
        ),
        dry_run=True,
    )
