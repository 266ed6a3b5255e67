"""Image parts and keys of records become markers and references."""

import base64
import json
import pickle
from io import BytesIO

import pytest
from PIL import Image

from rlhf_core.errors import DataError
from rlhf_core.types import Rollout
from rlhf_images import (
    ImageError,
    ImageLimits,
    ImageReader,
    ImageReference,
    decode_image,
    find_markers,
    open_images,
    read_images,
)


def encoded(color=(255, 0, 0), size=(6, 4)):
    file = BytesIO()
    Image.new("RGB", size, color).save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def reader(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "red.png").write_bytes(encoded())
    (tmp_path / "secret.png").write_bytes(encoded())
    (tmp_path / "data" / "loop.png").symlink_to("loop.png")
    return ImageReader(ImageLimits(max_images=3), tmp_path / "data")


def user(*parts):
    return [{"role": "user", "content": list(parts)}]


TEXT = {"type": "text", "text": "Which color?"}
BASE64 = base64.b64encode(encoded()).decode()


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "image": "red.png"},
        {"type": "image", "path": "red.png"},
        {"type": "image", "base64": BASE64},
        {"type": "image", "bytes": encoded(), "path": None},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{BASE64}"}},
        {"type": "image", "image": {"bytes": None, "path": "red.png"}},
    ],
)
def test_an_image_part_is_a_marker_in_the_text(reader, part):
    record = read_images({"prompt": user(part, TEXT), "answer": "red"}, reader)
    (reference,) = record["images"]
    assert record["prompt"] == [{"role": "user", "content": f"{reference.marker}Which color?"}]
    assert reference.open().getpixel((0, 0)) == (255, 0, 0) and (reference["width"], reference["height"]) == (6, 4)
    assert reference.marker == f"<image:{reference['sha256'][:16]}>"
    assert record["answer"] == "red"


def test_a_pillow_image_is_described_by_its_pixels(reader):
    image = Image.new("L", (3, 2), 7)
    first, second = (read_images({"prompt": "?", "image": image}, reader)["images"][0] for _ in range(2))
    assert first == second and first.open().getpixel((0, 0)) == (7, 7, 7)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("Which?", "{0}{1}Which?"),
        ("A <image> or <image>?", "A {0} or {1}?"),
        (user(TEXT), "{0}{1}Which color?"),
        (user({"type": "image"}, TEXT, {"type": "image"}), "{0}Which color?{1}"),
        ([{"role": "user", "content": "<image> and <image>"}], "{0} and {1}"),
    ],
)
def test_images_of_a_key_are_placed_in_the_prompt(reader, prompt, expected):
    record = read_images({"prompt": prompt, "images": ["red.png", Image.new("RGB", (2, 2))]}, reader)
    text = record["prompt"] if isinstance(prompt, str) else record["prompt"][0]["content"]
    assert text == expected.format(*(each.marker for each in record["images"]))


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ({"prompt": "<image>", "images": ["red.png"] * 2}, "it has 2 images, but 1 times <image>"),
        ({"prompt": "<image><image>", "images": ["red.png"]}, "it has 1 images, but <image> more often"),
        ({"prompt": "?", "images": ["red.png"] * 4}, "it has 4 images, at most 3"),
        ({"prompt": "?", "images": ["../secret.png"]}, "outside of"),
        ({"prompt": "?", "images": ["/etc/passwd"]}, "outside of"),
        ({"prompt": "?", "images": ["a\0b.png"]}, "cannot be used: embedded null byte"),
        ({"prompt": "?", "images": ["~nosuchuser/x.png"]}, "there is no image"),
        ({"prompt": "?", "images": ["\ud800.png"]}, "cannot be"),
        ({"prompt": "?", "images": ["loop.png"]}, "cannot be|there is no image"),
        ({"prompt": "?", "images": ["x" * 5000]}, "cannot be"),
        ({"prompt": "?", "images": [{"image": {"image": {"image": "red.png"}}}]}, "an image is a dict"),
        ({"prompt": user(*[{"type": "image", "image": "red.png"}] * 4)}, "it has 4 images, at most 3"),
        ({"prompt": "?", "images": ["none.png"]}, "there is no image 'none.png'"),
        ({"prompt": "?", "images": ["http://localhost:1/x.png"]}, "download it and give its path, or allow its host"),
        ({"prompt": "?", "images": ["data:image/png;base64,%%%"]}, "is not base64"),
        ({"prompt": "?", "images": [7]}, "an image is a int"),
        ({"prompt": "<image:0011223344556677>", "images": ["red.png"]}, "contains a marker"),
        ({"prompt": user({"type": "audio"})}, "a part of a chat message is 'audio'"),
        ({"prompt": user({"type": "image", "detail": "low"})}, "an image part lacks an image"),
    ],
)
def test_a_wrong_record_is_named(reader, record, problem):
    with pytest.raises(DataError, match=problem):
        read_images(record, reader)


def test_text_without_images_is_unchanged(reader):
    record = {"prompt": "The tag <image> in HTML", "answer": "x"}
    assert read_images(record, reader) == {**record, "images": []}


def test_a_changed_file_is_noticed(reader):
    reference = reader.read("red.png")
    (reader.folder / "red.png").write_bytes(encoded((0, 255, 0)))
    with pytest.raises(ImageError, match="has changed since the run started"):
        reference.open()


def test_a_reference_is_json_and_a_copy_is_plain(reader):
    reference = reader.read("red.png")
    assert json.loads(json.dumps(reference)) == reference and reference["path"] == "red.png"
    copy = pickle.loads(pickle.dumps(reference))
    assert type(copy) is dict and copy == reference


def rollout(images):
    return Rollout(
        sample_id=5, prompt="", messages=None, prompt_ids=(), completion="", completion_ids=(), logprobs=(), answer="",
        metadata={"images": images}, policy_version=0, finish_reason="stop",
    )  # fmt: skip


def test_a_reward_opens_the_images_of_a_rollout(reader):
    assert [image.size for image in open_images(rollout([reader.read("red.png")]))] == [(6, 4)]
    with pytest.raises(DataError, match="sample 5: the images of a rollout can be opened only in the process"):
        open_images(rollout([dict(reader.read("red.png"))]))


def test_markers_are_found():
    reference = ImageReference.of({"sha256": "ab" * 32}, lambda: None)
    assert find_markers(f"x{reference.marker}y") == [(1, 25, "ab" * 8)]
    assert find_markers("<image><image:12>") == []


def test_a_wrong_extension_does_not_matter(reader):
    (reader.folder / "red.jpg").write_bytes(encoded())
    (reader.folder / "page.png").write_bytes(b"<html></html>")
    assert reader.read("red.jpg").open().size == (6, 4)
    with pytest.raises(ImageError, match="is not of the formats"):
        reader.read("page.png")


def test_the_size_is_that_of_the_turned_picture(reader):
    file, exif = BytesIO(), Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (6, 4)).save(file, "JPEG", exif=exif)
    reference = reader.read(file.getvalue())
    assert (reference["width"], reference["height"]) == reference.open().size == (4, 6)


def test_16_bit_gray_is_scaled():
    file = BytesIO()
    Image.new("I;16", (2, 1), 65535).save(file, "PNG")
    assert decode_image(file.getvalue()).getpixel((0, 0)) == (255, 255, 255)
    file = BytesIO()
    Image.new("I;16", (2, 1), 256 * 10).save(file, "PNG")
    assert decode_image(file.getvalue()).getpixel((0, 0)) == (10, 10, 10)
