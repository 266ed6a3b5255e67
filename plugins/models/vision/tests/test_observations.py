"""Images in observations, for each family: log-probs and gradients equal those of plain transformers on a whole row."""

from contextlib import closing
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from interrupted import Engine, journal
from PIL import Image
from playing import Reworded, driven, items, play, play_one, player
from transformers import AutoModelForImageTextToText

from rlhf_core.batching import collate
from rlhf_core.components import EngineContext
from rlhf_core.errors import EpisodeError
from rlhf_episodes import Outcome
from rlhf_episodes.contents import has_image_parts
from rlhf_episodes.conversations import Conversations
from rlhf_episodes.endpoint import Call, CallRefused, ChatMessage
from rlhf_episodes.sight import SeeingKind, Sight
from rlhf_forward import policy_forward
from rlhf_hf.config import HfEngineConfig
from rlhf_hf.engine import HfEngine
from rlhf_images import ImageLimits, ImageReader, find_markers, read_images

PROMPT = ("Which ", (40, 30), " is it?")
OBSERVATIONS = (("Look: ", (16, 24)), ("No image",), ((50, 20), " and ", (16, 24), "?"))


def picture(size, seed=0):
    return Image.frombytes("RGB", size, Random(f"{size}{seed}").randbytes(size[0] * size[1] * 3))


def message(content, role="user"):
    """`content`: texts and sizes (width, height) of images."""
    parts = [
        {"type": "text", "text": each} if isinstance(each, str) else {"type": "image", "image": picture(each)}
        for each in content
    ]
    return {"role": role, "content": parts}


def sight_of(seeing, limits=None):
    return Sight(seeing.kind, limits or ImageLimits(), Path())


def engine_of(seeing):
    return HfEngine(HfEngineConfig(), EngineContext(seeing.model, seeing.tokenizer, torch.device("cpu"), seed=3))


def play_messages(seeing, observations, *, prompt=PROMPT, first=None, tools=(), seed=0, **options):
    """Play a turn after the prompt, and one after each observation."""

    async def run(task, policy):
        await policy.turn(first, tools)
        for each in observations:
            await policy.turn([message(each)] if isinstance(each, tuple) else each)
        return Outcome()

    seen = seeing.prompt(*prompt, seed=seed)
    options = {"engine": engine_of(seeing), "max_new_tokens": 5, "max_turns": 9, "sight": sight_of(seeing), **options}
    return play_one(driven(run), tokenizer=seeing.tokenizer, prompt=seen, **options)


def gap(seeing, batch):
    with torch.no_grad():
        output = policy_forward(seeing.model, batch, 1.0)
    return float((output.log_probs - batch.action_log_probs)[batch.action_mask].abs().max())


def plain_log_probs(seeing, plain, item, images):
    """Log-probs of sampled tokens by transformers itself, with what the family's own processor gives to its forward."""
    ids = torch.cat([item.prompt_ids, item.response_ids])[None]
    is_given = torch.cat([torch.ones(len(item.prompt_ids), dtype=torch.bool), ~item.action_mask])[None]
    is_image = (ids == seeing.kind.family.image_token_id) & is_given
    ids = ids.masked_fill((ids == seeing.kind.family.image_token_id) & ~is_given, seeing.tokenizer.pad_token_id)
    processor, model_type = seeing.kind.family.processor, seeing.model.config.model_type
    options = {"do_pan_and_scan": False} if model_type == "gemma3" else {}
    each = [processor([image], return_tensors="pt", **options) for image in images]
    pixels = torch.cat(
        [one["pixel_values"][0] if one["pixel_values"].dim() == 5 else one["pixel_values"] for one in each]
    )
    arguments = {"pixel_values": pixels[None] if model_type in ("idefics3", "smolvlm") else pixels}
    if model_type == "gemma3":
        arguments["token_type_ids"] = is_image.long()
    if model_type.startswith("qwen"):
        arguments["image_grid_thw"] = torch.cat([one["image_grid_thw"] for one in each])
        arguments["mm_token_type_ids"] = is_image.int()
    logits = plain(input_ids=ids, attention_mask=torch.ones_like(ids), **arguments).logits
    log_probs = logits[0, len(item.prompt_ids) - 1 : -1].log_softmax(-1)
    return log_probs.gather(1, item.response_ids[:, None])[:, 0][item.action_mask]


def assert_same_gradients(seeing, item, images):
    seeing.model.zero_grad()
    batch = collate([item])
    ours = policy_forward(seeing.model, batch, 1.0).log_probs[batch.action_mask]
    ours.sum().backward()
    plain = AutoModelForImageTextToText.from_pretrained(seeing.path, dtype=torch.float32).eval()
    theirs = plain_log_probs(seeing, plain, item, images)
    assert (ours - theirs).abs().max() < 1e-4
    theirs.sum().backward()
    gradients = {name: each.grad for name, each in plain.named_parameters() if each.grad is not None}
    found = {name: each.grad for name, each in seeing.model.named_parameters() if each.grad is not None}
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        # The same number added to all scores of a query changes nothing: such a bias has only rounding errors.
        of = name.replace("k_proj.bias", "k_proj.weight")
        scale = gradients[of].abs().max().clamp(min=1e-3)
        assert (found[name] - gradient).abs().max() / scale < 1e-4, name


def test_an_episode_with_images_in_observations_has_the_gradients_of_plain_transformers(seeing):
    assert isinstance(seeing.kind, SeeingKind)
    played = play_messages(seeing, OBSERVATIONS)
    (item,) = items(played)
    assert gap(seeing, collate([item])) < 1e-4
    images = [picture(each) for each in ((40, 30), (16, 24), (50, 20), (16, 24))]
    assert_same_gradients(seeing, item, images)


CONTENT = st.lists(st.sampled_from(["a?", (40, 30), (16, 24), (60, 20)]), min_size=1, max_size=3).map(tuple)


@pytest.mark.parametrize("seeing", ["llava", "qwen2_5_vl"], indirect=True)
@given(conversation=st.tuples(CONTENT, CONTENT, CONTENT), seed=st.integers(0, 99))
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_conversation_has_the_gradients_of_plain_transformers(seeing, conversation, seed):
    prompt, *observations = (("x", *each) for each in conversation)
    sizes = [each for content in (prompt, *observations) for each in content if not isinstance(each, str)]
    if not sizes:
        return
    (item,) = items(play_messages(seeing, observations, prompt=prompt))
    assert gap(seeing, collate([item])) < 1e-4
    assert_same_gradients(seeing, item, [picture(each) for each in sizes])


def test_rows_with_different_images_share_a_batch(seeing):
    episodes = [play_messages(seeing, OBSERVATIONS[:count]) for count in range(4)]
    text = play_messages(seeing, (("Text",),), prompt=("No image",))
    batch = collate([item for played in (*episodes, text) for item in items(played)])
    assert gap(seeing, batch) < 1e-4


@pytest.fixture
def llava(open_model):
    return open_model("llava")


def image_ids(seeing, item):
    """Number of image tokens in prompt and response."""
    token = seeing.kind.family.image_token_id
    return [int((ids == token).sum()) for ids in (item.prompt_ids, item.response_ids)]


def test_an_environment_may_add_an_image_before_the_first_turn(seeing):
    (item,) = items(play_messages(seeing, OBSERVATIONS[:1], first=[message(("And ", (50, 20)))]))
    assert gap(seeing, collate([item])) < 1e-4
    images = [picture(each) for each in ((40, 30), (50, 20), (16, 24))]
    assert_same_gradients(seeing, item, images)
    # The prompt is that of a source whose records have both messages.
    record = {"prompt": [message(("Which ", (40, 30), " is it?")), message(("And ", (50, 20)))]}
    prompt = seeing.encoder.prompt(read_images(record, ImageReader(ImageLimits(), Path())), 0, "record 1")
    assert item.prompt_ids.tolist() == list(prompt.prompt_ids)
    assert torch.equal(item.columns["images_pixels"], prompt.columns["images_pixels"])


def test_samples_of_a_prompt_share_the_images_before_the_first_turn(llava):
    async def run(task, policy):
        await policy.turn([message(("And ", (50, 20)))])
        return Outcome()

    options = {"engine": engine_of(llava), "sight": sight_of(llava), "tokenizer": llava.tokenizer}
    first, second = play(driven(run), samples=2, prompt=llava.prompt(*PROMPT), **options)
    pixels = [items(played)[0].columns["images_pixels"] for played in (first, second)]
    assert pixels[0] is pixels[1] and len(pixels[0]) == 2


def test_the_result_of_a_tool_may_have_images(llava):
    class Camera:
        def look(self):
            """Take a picture."""
            return [{"type": "text", "text": "Done: "}, {"type": "image", "image": picture((16, 24))}]

    call = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    engine = Reworded(llava.tokenizer, [call, "Nice."])
    options = {"prompt": llava.prompt(*PROMPT), "sight": sight_of(llava), "tokenizer": llava.tokenizer}
    played = play_one(Camera, engine=engine, max_new_tokens=99, **options)
    (item,) = items(played)
    assert image_ids(llava, item) == [9, 9]
    (shown,) = [turn.text for turn in played.rows[0].turns if turn.role == "environment"]
    assert shown.startswith("Done: ") and len(find_markers(shown)) == 1
    assert len(played.prompt.metadata["images"]) == 2
    text = llava.tokenizer.decode(item.response_ids)
    assert "<tool_response>\nDone: <image><image>" in text and "</tool_response>" in text
    assert gap(llava, collate([item])) < 99  # the row can be trained on, whatever its log-probs


def test_a_list_of_records_with_a_type_is_a_text():
    rows = [{"type": "image", "width": 3}, {"type": "link"}]
    assert not has_image_parts(rows) and not has_image_parts(["a", {"type": "image", "image": "a.png"}])
    assert has_image_parts([{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "data:,"}}])


def test_a_call_of_an_agent_shows_the_images_of_the_prompt(llava):
    """By their markers, wherever its messages contain them. A plain text cannot."""
    problems = []

    async def run(task, policy):
        calls = Conversations(policy._episode)
        text = task.prompt.messages[0]["content"]
        first = ChatMessage(role="user", content="Hint: ")
        await calls.answer(Call(messages=(first, ChatMessage(role="user", content=text))))
        with pytest.raises(CallRefused) as refused:
            await calls.answer(Call(text=text))
        problems.append(str(refused.value))
        return Outcome()

    options = {"engine": engine_of(llava), "max_new_tokens": 3, "sight": sight_of(llava), "tokenizer": llava.tokenizer}
    played = play_one(driven(run), prompt=llava.prompt(*PROMPT), **options)
    (item,) = items(played)
    assert int(item.columns["images_tokens"]) == item.prompt_ids.tolist().count(llava.kind.image_token_id) > 0
    assert gap(llava, collate([item])) < 1e-4
    assert "images cannot be extended" in problems[0]


def test_branches_have_the_images_that_they_saw(llava):
    async def run(task, policy):
        await policy.turn()
        other = policy.fork()
        await policy.turn([message(("Left ", (16, 24)))])
        await other.turn([message(("Right ", (50, 20), (60, 20)))])
        return Outcome()

    options = {"engine": engine_of(llava), "sight": sight_of(llava), "tokenizer": llava.tokenizer}
    left, right = items(play_one(driven(run), prompt=llava.prompt(*PROMPT), **options))
    assert [len(each.columns["observed_sizes"]) for each in (left, right)] == [1, 2]
    assert left.columns["images_pixels"] is right.columns["images_pixels"]
    assert gap(llava, collate([left, right])) < 1e-4


def test_a_history_in_branches_opens_each_with_all_images(llava):
    llava.tokenizer.chat_template = llava.tokenizer.chat_template.replace(
        "{{ message.role }}:",
        "{% if not loop.last and message.role == 'assistant' %}old {% endif %}{{ message.role }}:",
    )
    played = play_messages(llava, OBSERVATIONS, history="branch")
    found = items(played)
    assert len(found) == 4
    assert [len(each.columns["images_sizes"]) for each in found] == [1, 2, 2, 4]
    assert gap(llava, collate(found)) < 1e-4


def test_a_shortened_conversation_keeps_the_images_that_it_returns(llava):
    class Looks:
        def reset(self, task):
            return None

        def step(self, reply):
            return [message((f"{reply.turn} ", (16, 24)))], 0.0, reply.turn == 9

        def compact(self, messages):
            assert messages[0]["content"][1]["type"] == "image"
            return [messages[0], messages[-1]]

    options = {"engine": engine_of(llava), "sight": sight_of(llava), "tokenizer": llava.tokenizer, "max_tokens": 60}
    played = play_one(Looks, prompt=llava.prompt(*PROMPT), max_new_tokens=5, max_turns=10, **options)
    found = items(played)
    assert len(found) > 2 and len(played.prompt.metadata["images"]) == 2
    assert all(len(each.columns["images_sizes"]) == 2 for each in found[1:])
    assert gap(llava, collate(found)) < 1e-4


def test_text_that_looks_like_an_image_is_not_one(llava):
    token, marker = llava.kind.family.image_token, "<image:0011223344556677>"
    assert llava.kind.without_placeholders(f"<im{token}age>x") == "x"
    played = play_messages(llava, ((f"You wrote {token} {marker}: ", (16, 24)), f"And {token}?"))
    (item,) = items(played)
    assert image_ids(llava, item)[0] == 9 and int(item.columns["observed_tokens"][0, 1]) == 9
    assert gap(llava, collate([item])) < 1e-4
    assert len(played.prompt.metadata["images"]) == 2


@pytest.mark.parametrize(
    ("image", "problem"),
    [
        ({"image": b"no image"}, "not of the formats"),
        ({"image": "missing.png"}, "there is no image"),
        ({"image": "../../etc/passwd"}, "is outside of"),
        ({"image": "https://example.org/x.png"}, "is an address"),
        ({"image": Image.new("L", (200, 200))}, "at most 30,000 are allowed"),
        ({}, "lacks an image"),
        ({"image": {"sha256": "0" * 64}}, "lacks an image"),
    ],
)
def test_an_image_that_cannot_be_used_is_an_error_of_the_environment(llava, image, problem, tmp_path):
    sight = Sight(llava.kind, ImageLimits(max_pixels=30_000, max_images=2), tmp_path)
    wrong = [{"role": "user", "content": [{"type": "image", **image}]}]
    with pytest.raises(EpisodeError, match=problem):
        play_messages(llava, (wrong,), sight=sight)
    assert play_messages(llava, (wrong,), sight=sight, on_failure="zero").rows[0].columns["environment"]["failed"]
    with pytest.raises(EpisodeError, match="an observation has 3 images, at most 2"):
        play_messages(llava, (((9, 9), (9, 9), (9, 9)),), sight=sight)


def test_a_model_that_does_not_see_refuses_images_by_name(llava):
    with pytest.raises(EpisodeError, match="the model does not see"):
        play_messages(llava, OBSERVATIONS, sight=None)


class Shows:
    """Shows a picture after each of two turns."""

    def __init__(self, seed):
        self.seed = seed

    def reset(self, task):
        return None

    def step(self, reply):
        part = {"type": "image", "image": picture((16, 24), self.seed + reply.turn)}
        return [{"role": "user", "content": [part]}], 1.0, reply.turn == 2


def test_a_resume_replays_turns_that_saw_the_same_images(llava, tmp_path):
    def attempt(seed):
        engine = Engine()
        options = {"engine": engine, "sight": sight_of(llava), "tokenizer": llava.tokenizer}
        found = player(lambda: Shows(seed), max_new_tokens=3, **options)
        lines, found.journal = journal(tmp_path, engine)
        with closing(found):
            (played,) = found.play([(llava.prompt(*PROMPT), 0)])
        lines.close()
        return len(engine.sampled), items(played)[0]

    (first_count, first), (again_count, again), (other_count, _) = attempt(0), attempt(0), attempt(9)
    assert (first_count, again_count, other_count) == (3, 0, 2)
    assert torch.equal(first.response_ids, again.response_ids)
    assert torch.equal(first.columns["observed_pixels"], again.columns["observed_pixels"])


def test_engines_with_their_own_model_get_observed_images_one_by_one(seeing):
    (item,) = items(play_messages(seeing, OBSERVATIONS))
    ids = torch.cat([item.prompt_ids, item.response_ids])[None]
    inputs = item.columns.model_inputs
    found = seeing.kind.image_prompt(ids[0].tolist(), inputs)
    batch = {name: value[None] for name, value in inputs.items()}
    arguments = seeing.kind.inputs(ids, torch.ones_like(ids, dtype=torch.bool), batch)
    pixels = torch.cat([each.pixels for each in found.images])
    assert torch.equal(pixels, arguments["pixel_values"].view(pixels.shape))
    places = [each.first + int(place) for each in found.images for place in each.is_feature.nonzero()]
    image = seeing.kind.image_token_id
    assert places == [place for place, token in enumerate(found.ids) if token == image]
    assert [each.first for each in found.images] == sorted(each.first for each in found.images)
    assert len(found.images) == 4 and all(len(each.is_feature) for each in found.images)
