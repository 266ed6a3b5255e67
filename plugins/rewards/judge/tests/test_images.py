"""Images of prompts in questions to a judge, on a server and as a local model."""

import asyncio
import base64
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import pytest
import torch
from PIL import Image

from rlhf_core.components import RewardContext
from rlhf_core.config import ModelConfig
from rlhf_core.errors import UserInputError
from rlhf_core.models import model_kind_for
from rlhf_core.plugins import load
from rlhf_images import ImageLimits, ImageReader, read_images
from rlhf_reward_judge.images import MAX_EDGE
from rlhf_testing.rollouts import make_rollout


def judge(**options):
    selected = load("rewards", "judge")
    config = selected.component.config.model_validate({"rubric": "be right", "images": True, **options})
    return selected.build(config, RewardContext(device="cpu", seed=0, folder=None))


def rollouts_of(*texts, size=(8, 4)):
    """Answers to one prompt with two images, of which the first is in it twice."""
    first, second = Image.new("RGB", size, "red"), Image.new("RGB", size, "blue")
    parts = [{"type": "image", "image": each} for each in (first, second, first)]
    record = {"prompt": [{"role": "user", "content": [*parts, {"type": "text", "text": "Which?"}]}]}
    record = read_images(record, ImageReader(ImageLimits(), Path()))
    made = [make_rollout(text, sample_id=k) for k, text in enumerate(texts)]
    metadata = {"images": record["images"]}
    return [replace(each, group_id=0, messages=tuple(record["prompt"]), metadata=metadata) for each in made]


def scores(reward, rollouts):
    async def call():
        try:
            return list(await reward(rollouts))
        finally:
            await reward.aclose()

    return asyncio.run(call())


@pytest.mark.parametrize(("mode", "reply"), [("rubric", '{"points": 5}'), ("pairwise", '{"better": "tie"}')])
def test_a_server_gets_the_images_after_the_question(server, mode, reply):
    server.replies = lambda body: reply
    rollouts = rollouts_of("a", "<image:0123456789abcdef>", size=(2 * MAX_EDGE, 8))
    assert scores(judge(url=server.url, model="wise", mode=mode), rollouts) == [0.5, 0.5]
    for request in server.requests:
        text, *images = request["messages"][1]["content"]
        assert "[image 1][image 2][image 1]Which?" in text["text"] and "<image:" not in text["text"]
        sent = [each["image_url"]["url"].removeprefix("data:image/png;base64,") for each in images]
        opened = [Image.open(BytesIO(base64.b64decode(each))) for each in sent]
        assert [each.getpixel((0, 0)) for each in opened] == [(255, 0, 0), (0, 0, 255), (255, 0, 0)]
        assert {each.size for each in opened} == {(MAX_EDGE, 4)}


def test_without_the_option_the_judge_gets_text(server):
    scores(judge(url=server.url, model="wise", images=False), rollouts_of("a"))
    assert isinstance(server.requests[0]["messages"][1]["content"], str)


def test_a_local_judge_sees(tmp_path):
    kind = model_kind_for(ModelConfig(path="builtin:tiny-vision"))
    tokenizer = kind.load_tokenizer()
    model = kind.load_policy(dtype=torch.float32, seed=0, tokenizer=tokenizer)
    model.config.text_config.max_position_embeddings = 2048
    kind.save_policy(model, model.state_dict(), tokenizer, tmp_path / "model", tmp_path / "adapter")
    reward = judge(model_path=str(tmp_path / "model"), max_reply_tokens=8, unreadable="lowest", asked_again=0)
    assert scores(reward, rollouts_of("a")) == [0.0]


def test_a_local_judge_that_does_not_see_is_refused():
    with pytest.raises(UserInputError, match="this model does not see"):
        judge(model_path="builtin:tiny-digits")
