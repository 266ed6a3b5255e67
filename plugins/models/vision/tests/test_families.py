"""Each family, with a tiny random model: prompts, the gap between engine and trainer, gradients, and saved folders."""

import pytest
import torch
from seeing_models import items_of, largest_gap, requests_of
from transformers import AutoModelForImageTextToText

from rlhf_core.batching import collate
from rlhf_core.components import EngineContext
from rlhf_core.config.sections import LoraConfig
from rlhf_core.types import BufferItem, SamplingParams
from rlhf_forward import policy_forward
from rlhf_hf.config import HfEngineConfig
from rlhf_hf.engine import HfEngine
from rlhf_passes.fast_passes import FastPasses, fast_passes

PROMPTS = (("Which ", (40, 30), " is it?"), ("Two: ", (16, 24), (50, 20), "?"), ("No image",))


def completions(seeing, prompts, *, samples=2, max_new_tokens=6, greedy=False):
    engine = HfEngine(HfEngineConfig(), EngineContext(seeing.model, seeing.tokenizer, torch.device("cpu"), seed=3))
    requests = requests_of(prompts, samples)
    sampling = SamplingParams(max_new_tokens=max_new_tokens, greedy=greedy)
    return sorted(engine.generate(requests, sampling), key=lambda each: each.sample_id), engine


def test_engine_and_trainer_have_the_same_log_probs(seeing):
    prompts = [seeing.prompt(*content, position=place) for place, content in enumerate(PROMPTS)]
    answers, engine = completions(seeing, prompts)
    assert engine.path.name != "recompute"
    assert largest_gap(seeing.model, prompts, answers) < 1e-4


def test_the_image_decides_the_answer(seeing):
    red, other = (seeing.prompt("Which ", (40, 30), "?", seed=seed) for seed in (0, 1))
    assert red.prompt_ids == other.prompt_ids
    answers, _ = completions(seeing, [red, other], samples=1, max_new_tokens=4)
    assert answers[0].logprobs != answers[1].logprobs


def test_gradients_equal_plain_transformers(seeing, folders):
    prompts = [seeing.prompt(*content) for content in PROMPTS[:2]]
    answers, _ = completions(seeing, prompts, samples=1)
    batch = collate(items_of(prompts, answers, samples=1))
    seeing.model.zero_grad()
    policy_forward(seeing.model, batch, 1.0).log_probs.sum().backward()
    ours = {name: each.grad.clone() for name, each in seeing.model.named_parameters() if each.grad is not None}

    plain = AutoModelForImageTextToText.from_pretrained(seeing.path, dtype=torch.float32)
    plain.eval()
    total = torch.zeros(())
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([[*prompt.prompt_ids, *answer.token_ids]])
        logits = plain(
            input_ids=ids, attention_mask=torch.ones_like(ids), **plain_arguments(seeing, prompt, ids)
        ).logits
        log_probs = logits[0, len(prompt.prompt_ids) - 1 : -1].log_softmax(-1)
        total = total + log_probs.gather(1, torch.tensor(answer.token_ids)[:, None]).sum()
    total.backward()
    theirs = {name: each.grad for name, each in plain.named_parameters() if each.grad is not None}
    assert ours.keys() == theirs.keys()
    assert any("vision" in name or "visual" in name for name in ours)
    assert ours.keys() == {name for name, each in seeing.model.named_parameters() if each.requires_grad}
    for name, gradient in theirs.items():
        scale = gradient.abs().max().clamp(min=1e-3)
        assert (ours[name] - gradient).abs().max() / scale < 1e-4, name


def plain_arguments(seeing, prompt, ids):
    """Write down what the family's own processor gives to a forward of one row."""
    pixels, sizes = processed_pixels(seeing, prompt), prompt.columns["images_sizes"]
    model_type, is_image = seeing.model.config.model_type, ids == seeing.kind.family.image_token_id
    assert not is_image[0, len(prompt.prompt_ids) :].any()
    if model_type in ("idefics3", "smolvlm"):
        return {"pixel_values": pixels[None]}
    if model_type == "gemma3":
        return {"pixel_values": pixels, "token_type_ids": is_image.long()}
    if model_type.startswith("qwen"):
        return {"pixel_values": pixels, "image_grid_thw": sizes[:, 1:], "mm_token_type_ids": is_image.int()}
    return {"pixel_values": pixels}


def processed_pixels(seeing, prompt):
    """Return the pixels of a prompt from the processor of its folder, one image at a time."""
    processor = seeing.kind.family.processor
    options = {"do_pan_and_scan": False} if seeing.model.config.model_type == "gemma3" else {}
    images = [reference.open() for reference in prompt.metadata["images"]]
    each = [processor([image], return_tensors="pt", **options)["pixel_values"] for image in images]
    return torch.cat([pixels[0] if pixels.dim() == 5 else pixels for pixels in each])


def test_pixels_are_stored_in_uint8_and_normalized_as_by_the_processor(seeing):
    prompt = seeing.prompt("Two: ", (16, 24), (50, 20), "?")
    stored, expected = prompt.columns["images_pixels"], processed_pixels(seeing, prompt)
    assert stored.dtype == torch.uint8 and stored.shape == expected.shape
    assert torch.allclose(seeing.kind.family.normalized(stored), expected, atol=2e-6)


def test_a_prompt_has_the_tokens_of_its_images(seeing):
    prompt = seeing.prompt("Two: ", (16, 24), (50, 20), "?")
    family, columns = seeing.kind.family, prompt.columns
    count = prompt.prompt_ids.count(family.image_token_id)
    assert count == int(columns["images_tokens"]) > 0
    assert int(columns["images_sizes"][:, 0].sum()) == len(columns["images_pixels"])
    assert len(columns["images_sizes"]) == 2


def test_an_image_token_that_the_policy_sampled_is_read_as_padding(seeing):
    prompt = seeing.prompt("Which ", (40, 30), " is it?")
    image, pad = seeing.kind.family.image_token_id, seeing.tokenizer.pad_token_id
    outputs = []
    for token in (image, pad):
        answer = [5, token, 7]
        item = BufferItem(
            sample_id=0, group_id=0, policy_version=0, prompt_ids=torch.tensor(prompt.prompt_ids),
            response_ids=torch.tensor(answer), action_mask=torch.ones(3, dtype=torch.bool),
            action_log_probs=torch.zeros(3), columns=prompt.columns,
        )  # fmt: skip
        with torch.no_grad():
            outputs.append(policy_forward(seeing.model, collate([item]), 1.0).log_probs[0])
    assert torch.allclose(outputs[0][[0, 2]], outputs[1][[0, 2]], atol=1e-6)


def test_a_saved_folder_loads_in_transformers_and_here(seeing, tmp_path):

    weights = {name: value.clone() for name, value in seeing.model.state_dict().items()}
    seeing.kind.save_policy(seeing.model, weights, seeing.tokenizer, tmp_path / "model", tmp_path / "adapter")
    assert type(AutoModelForImageTextToText.from_pretrained(tmp_path / "model")) is type(seeing.model)
    again = type(seeing)(tmp_path / "model")
    first, second = (each.prompt("Which ", (40, 30), "?") for each in (seeing, again))
    assert first.prompt_ids == second.prompt_ids
    assert torch.equal(first.columns["images_pixels"], second.columns["images_pixels"])


def test_images_one_by_one_are_those_of_the_forward_pass(seeing):
    """For engines with their own model: the images, and ids without sampled image tokens."""
    prompt = seeing.prompt("Two: ", (16, 24), (50, 20), "?")
    inputs, image = prompt.columns.model_inputs, seeing.kind.image_token_id
    ids = (*prompt.prompt_ids, 5, image, 7)
    given = seeing.kind.image_prompt(ids, inputs)
    assert given.ids == (*prompt.prompt_ids, 5, seeing.tokenizer.pad_token_id, 7)
    rows = torch.tensor([ids])
    batch = {name: value[None] for name, value in inputs.items()}
    arguments = seeing.kind.inputs(rows, torch.ones_like(rows, dtype=torch.bool), batch)
    pixels = torch.cat([each.pixels for each in given.images])
    assert torch.equal(pixels, arguments["pixel_values"].view(pixels.shape))
    places = [each.first + int(place) for each in given.images for place in each.is_feature.nonzero()]
    assert places == [place for place, token in enumerate(prompt.prompt_ids) if token == image]
    assert len({each.digest for each in given.images}) == 2
    for number, each in enumerate(given.images):
        for name, value in each.sizes.items():
            assert torch.equal(value, arguments[name][number])


def test_equal_images_have_one_digest_and_text_has_none(seeing):
    prompt = seeing.prompt("Two: ", (16, 24), (16, 24), "?")
    given = seeing.kind.image_prompt(prompt.prompt_ids, prompt.columns.model_inputs)
    assert len(given.images) == 2 and len({each.digest for each in given.images}) == 1
    text = seeing.prompt("No image")
    assert seeing.kind.image_prompt(text.prompt_ids, text.columns.model_inputs).images == ()


def test_lora_adapts_the_language_model_or_everything(seeing):
    """Each linear layer of those parts gets an adapter, and no other."""
    linear = {name for name, module in seeing.model.named_modules() if isinstance(module, torch.nn.Linear)}
    language = {name for name in linear if {"language_model", "text_model"} & set(name.split("."))}
    adapted = {}
    for targets in (["language"], None):
        model = type(seeing)(seeing.path).model
        model = seeing.kind.add_adapter(model, LoraConfig(r=2, target_modules=targets), seed=0)
        names = (name for name, _ in model.named_parameters() if ".lora_A." in name)
        adapted[str(targets)] = {name.removeprefix("base_model.model.").partition(".lora_A.")[0] for name in names}
    assert adapted["['language']"] == language
    assert adapted["None"] == linear - {"lm_head"} > language


def test_rows_with_images_are_not_packed(seeing, monkeypatch):
    prompts = [seeing.prompt(*content) for content in PROMPTS]
    answers, _ = completions(seeing, prompts)
    batch = collate(items_of(prompts, answers))
    monkeypatch.setattr(FastPasses, "lay_out", lambda *_: pytest.fail("rows with images are laid out otherwise"))
    with torch.no_grad():
        padded = policy_forward(seeing.model, batch, 1.0).log_probs
        with fast_passes(seeing.model):
            assert torch.allclose(policy_forward(seeing.model, batch, 1.0).log_probs, padded, atol=1e-5)
