"""Each family, with a tiny random model: prompts, the gap between engine and trainer, gradients, and saved folders."""

import torch
from transformers import AutoModelForImageTextToText

from rlhf_core.batching import collate
from rlhf_core.components import EngineContext
from rlhf_core.types import BufferItem, GenerationRequest, SamplingParams
from rlhf_forward import policy_forward
from rlhf_hf.config import HfEngineConfig
from rlhf_hf.engine import HfEngine

PROMPTS = (("Which ", (40, 30), " is it?"), ("Two: ", (16, 24), (50, 20), "?"), ("No image",))


def completions(seeing, prompts, *, samples=2, max_new_tokens=6, greedy=False):
    engine = HfEngine(HfEngineConfig(), EngineContext(seeing.model, seeing.tokenizer, torch.device("cpu"), seed=3))
    requests = [
        GenerationRequest(
            sample_id=number * samples + k, prompt_ids=prompt.prompt_ids, inputs=prompt.columns.model_inputs
        )
        for number, prompt in enumerate(prompts)
        for k in range(samples)
    ]
    sampling = SamplingParams(max_new_tokens=max_new_tokens, greedy=greedy)
    return sorted(engine.generate(requests, sampling), key=lambda each: each.sample_id), engine


def items_of(prompts, answers, samples=2):
    return [
        BufferItem(
            sample_id=answer.sample_id,
            group_id=answer.sample_id // samples,
            policy_version=0,
            prompt_ids=torch.tensor(prompts[answer.sample_id // samples].prompt_ids),
            response_ids=torch.tensor(answer.token_ids),
            action_mask=torch.ones(len(answer.token_ids), dtype=torch.bool),
            action_log_probs=torch.tensor(answer.logprobs),
            columns=prompts[answer.sample_id // samples].columns,
        )
        for answer in answers
    ]


def test_engine_and_trainer_have_the_same_log_probs(seeing):
    prompts = [seeing.prompt(*content, position=place) for place, content in enumerate(PROMPTS)]
    answers, engine = completions(seeing, prompts)
    assert engine.path.name != "recompute"
    batch = collate(items_of(prompts, answers))
    with torch.no_grad():
        output = policy_forward(seeing.model, batch, 1.0)
    gap = (output.log_probs - batch.action_log_probs)[batch.action_mask].abs().max()
    assert gap < 1e-4


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
