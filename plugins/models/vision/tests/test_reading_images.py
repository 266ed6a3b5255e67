"""Images of messages are decoded on threads, once, and those that may fail become texts with the reason."""

import threading
from io import BytesIO
from pathlib import Path

import pytest
from playing import driven, items, play, play_one
from seeing_models import picture

from rlhf_episodes import Outcome
from rlhf_episodes.isolation.sendable import sendable
from rlhf_episodes.sight import Seen, Sight
from rlhf_images import ImageError, ImageLimits
from rlhf_testing.engine import FakeEngine


@pytest.fixture
def llava(open_model):
    return open_model("llava")


def file_of(size):
    file = BytesIO()
    picture(size).save(file, "PNG")
    return file.getvalue()


def shown(*images, **options):
    return {"role": "user", "content": [{"type": "image", "image": each, **options} for each in images]}


class Watched:
    """A kind that records the threads that encode, and the numbers of images."""

    def __init__(self, kind):
        self.kind, self.threads = kind, []

    def __getattr__(self, name):
        return getattr(self.kind, name)

    def encode_image(self, image):
        self.threads.append(threading.current_thread().name)
        return self.kind.encode_image(image)


def play_turns(llava, kind, observations, samples=1, **options):
    loops = []

    async def run(task, policy):
        loops.append(threading.current_thread().name)
        for each in observations:
            await policy.turn(None if each is None else [each])
        return Outcome()

    sight = Sight(kind, options.pop("limits", None) or ImageLimits(), Path())
    options = {"engine": FakeEngine(), "tokenizer": llava.tokenizer, "sight": sight, "max_turns": 9, **options}
    found = play(driven(run), samples=samples, prompt=llava.prompt("Which ", (40, 30)), **options)
    return found, set(loops)


def test_images_are_decoded_once_and_not_on_the_loop_of_the_episodes(llava):
    kind = Watched(llava.kind)
    observations = [None, shown(picture((16, 24))), shown(picture((50, 20)), picture((16, 24)))]
    found, loops = play_turns(llava, kind, observations, samples=3)
    assert len(found) == 3 and len(kind.threads) == 2
    assert not loops & set(kind.threads)


@pytest.mark.parametrize("observations", [[shown(picture((16, 24)))], [None, shown(picture((16, 24)))]])
def test_a_row_that_opens_with_messages_decodes_the_image_of_the_prompt_elsewhere(llava, observations):
    """If the first turn has messages, or each branch opens with the conversation."""
    llava.tokenizer.chat_template = llava.tokenizer.chat_template.replace(
        "{{ message.role }}:",
        "{% if not loop.last and message.role == 'assistant' %}old {% endif %}{{ message.role }}:",
    )
    kind = Watched(llava.kind)
    _, loops = play_turns(llava, kind, observations, history="branch")
    assert len(kind.threads) == 2 and not loops & set(kind.threads)


@pytest.mark.parametrize(
    ("image", "reason"),
    [
        (b"no image", "the image is not of the formats png, jpeg, webp, or is broken"),
        (file_of((90, 90))[:-4000], "the image cannot be decoded: "),
        (picture((200, 200)), "the image has 200 x 200 pixels, at most 30,000 are allowed"),
        ("data:image/png;base64,!", "the image is not base64: "),
    ],
)
def test_an_image_that_is_not_required_becomes_a_text_with_the_reason(llava, image, reason):
    limits = ImageLimits(max_pixels=30_000)
    message = shown(image, picture((16, 24)), required=False)
    for each in (message, *sendable([message])):
        (played,), _ = play_turns(llava, llava.kind, [None, each], limits=limits)
        (text,) = [turn.text for turn in played.rows[0].turns if turn.role == "environment"]
        assert text.startswith(f"[image not shown: {reason}") and "<image:" in text
        assert len(items(played)[0].columns["observed_sizes"]) == 1


def test_images_beyond_the_limit_that_are_not_required_become_texts(llava):
    message = shown(picture((9, 9)), picture((16, 24)), picture((50, 20)), required=False)
    (played,), _ = play_turns(llava, llava.kind, [None, message], limits=ImageLimits(max_images=2))
    (text,) = [turn.text for turn in played.rows[0].turns if turn.role == "environment"]
    assert text.endswith("[image not shown: an observation has 3 images, at most 2 are allowed]")
    assert len(items(played)[0].columns["observed_sizes"]) == 2


def test_a_size_that_an_image_processor_refuses_is_named(open_model):
    seeing = open_model("qwen2_vl")
    sight = Sight(seeing.kind, ImageLimits(), Path())
    with pytest.raises(ImageError, match="the model cannot use an image of 900 x 4 pixels: "):
        sight.read([shown(picture((900, 4)))], Seen(), False)


def test_an_image_that_was_read_again_counts_once(llava):
    """As those that `compact` returns."""
    sight, seen = Sight(llava.kind, ImageLimits(max_images=1), Path()), Seen()
    first = sight.read([shown(picture((9, 9)))], seen, False)
    second = sight.read([shown(picture((16, 24)))], seen, False)
    again = sight.read([*first, *second], seen, True)
    assert [each["content"][0]["image"] for each in again] == list(seen.references.values())
    assert again[0]["content"][0]["image"] is first[0]["content"][0]["image"]


def test_images_of_messages_that_the_policy_did_not_get_are_not_those_of_the_sample(llava):
    async def run(task, policy):
        await policy.turn()
        other = policy.fork()
        await other.turn([shown(picture((16, 24)))])
        await policy.turn([shown(picture((50, 20)))])
        return Outcome()

    sight = Sight(llava.kind, ImageLimits(), Path())
    options = {"engine": FakeEngine(), "tokenizer": llava.tokenizer, "sight": sight}
    played = play_one(driven(run), prompt=llava.prompt("Which ", (40, 30)), **options)
    assert [each["width"] for each in played.prompt.metadata["images"]] == [40, 50, 16]
