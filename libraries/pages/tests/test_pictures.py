"""Pictures of samples: reading of untrusted files, and the card that shows them."""

import json
import os
import shutil
import subprocess

import pytest

from rlhf_pages import MAX_PICTURE_BYTES, picture_names, picture_path, read_picture, sample_card_script

NAME = "00112233445566aa"
PNG = b"\x89PNG\r\n\x1a\nrest"
NODE = shutil.which("node")
CARD = """
class Box {
  constructor(tag) { Object.assign(this, { tag, children: [] }); }
  append(...nodes) { this.children.push(...nodes); }
  replaceChildren(...nodes) { this.children = nodes; }
  setAttribute() {}
  addEventListener() {}
  set textContent(text) { this.children = [String(text)]; }
}
globalThis.document = { createElement: (tag) => new Box(tag) };
const shown = (node) => {
  if (node.tag === "img") return { img: node.src };
  return node.children === undefined ? node : node.children.map(shown);
};
SampleCard.showPictures(async (name) => (name === "00112233445566aa" ? "data:one" : null));
const card = SampleCard.make({ prompt: PROMPT, completion: "7" });
setImmediate(() => console.log(JSON.stringify(shown(card.children[0].children[0]))));
"""


def test_a_picture_is_read_by_its_name(tmp_path):
    path = picture_path(tmp_path, NAME)
    path.parent.mkdir()
    path.write_bytes(PNG)
    assert read_picture(tmp_path, NAME) == PNG


@pytest.mark.parametrize("name", ["../../secret", NAME + "/", NAME.upper(), NAME[:-1], "", f"{NAME}\n"])
def test_other_names_are_not_read(tmp_path, name):
    assert read_picture(tmp_path, name) is None


def test_other_files_are_not_read(tmp_path):
    path = picture_path(tmp_path, NAME)
    assert read_picture(tmp_path, NAME) is None
    path.parent.mkdir()
    for content in (b"<svg/>", PNG + bytes(MAX_PICTURE_BYTES)):
        path.write_bytes(content)
        assert read_picture(tmp_path, NAME) is None
    path.unlink()
    (tmp_path / "other.png").write_bytes(PNG)
    path.symlink_to(tmp_path / "other.png")
    assert read_picture(tmp_path, NAME) is None
    path.unlink()
    os.mkfifo(path)
    assert read_picture(tmp_path, NAME) is None


def test_names_are_found_in_prompts_and_turns():
    other = NAME.replace("a", "b")
    samples = [{"prompt": f"<image:{NAME}>?", "turns": [{"text": f"<image:{other}>"}, "broken"]}, {"prompt": None}]
    assert picture_names(samples) == [NAME, other]


@pytest.mark.skipif(NODE is None, reason="node is not installed")
def test_the_card_shows_pictures_in_place_of_their_markers():
    missing = "ff" * 8
    prompt = f"<b><image:{NAME}>Which?<image:{missing}>"
    script = f"{sample_card_script()}\nconst PROMPT = {json.dumps(prompt)};\n{CARD}"
    done = subprocess.run([NODE, "-e", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["<b>", [{"img": "data:one"}], "Which?", [f"<image:{missing}>"], ""]
