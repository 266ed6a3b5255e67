"""Every installed prompt source keeps the contract."""

from __future__ import annotations

import json

import pytest
from PIL import Image

from rlhf_testing.contracts import PromptsContract, contracts_for

LINES = [
    {"prompt": "2 + 2 = ", "answer": "4"},
    {"prompt": "3 + 3 = ", "answer": "6", "source": "by hand"},
    {"prompt": "one more: ", "answer": None},
]


class TestJsonl(PromptsContract):
    plugin = "jsonl"

    @classmethod
    def make_options(cls, folder):
        (folder / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
        return {"path": "lines.jsonl"}


class TestImages(PromptsContract):
    plugin = "images"

    @classmethod
    def make_options(cls, folder):
        Image.new("L", (8, 8)).save(folder / "black.png")
        content = [{"type": "text", "text": "What is this?"}, {"type": "image", "image": "black.png"}]
        lines = [{"prompt": [{"role": "user", "content": content}], "answer": "black"}, *LINES]
        (folder / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return {"of": {"name": "jsonl", "path": "lines.jsonl"}}


class TestTasks(PromptsContract):
    plugin = "tasks"
    may_be_empty = True


ELSEWHERE = dict.fromkeys(("jsonl", "tasks", "images"), "above") | dict.fromkeys(
    ("hf-dataset", "mixture"), "plugins/prompts/data/tests"
)

OPTIONS = {
    "sort-digits": {"options": {"size": 50}},
    "drawn-digits": {"options": {"size": 50}},
    "reasoning-gym": {"options": {"task": "chain_sum", "size": 20}},  # skipped where the library is missing
}

globals().update(contracts_for(PromptsContract, options=OPTIONS, skip=ELSEWHERE))
pytest.mark.slow(globals()["TestReasoningGym"])  # each source is built in another process
