"""Every installed prompt source keeps the contract."""

from __future__ import annotations

import json

from rlhf_testing.contracts import PromptsContract, contracts_for

LINES = [
    {"prompt": "2 + 2 = ", "answer": "4"},
    {"prompt": "3 + 3 = ", "answer": "6", "source": "by hand"},
    {"prompt": "one more: ", "answer": None},
]


class FromFile(PromptsContract):
    """For sources that read a file of records."""

    @classmethod
    def make_options(cls, folder):
        (folder / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
        return {"path": "lines.jsonl"}


class TestJsonl(FromFile):
    plugin = "jsonl"


class TestHfDataset(FromFile):
    plugin = "hf-dataset"


class TestTasks(PromptsContract):
    plugin = "tasks"
    may_be_empty = True


class TestMixture(FromFile):
    plugin = "mixture"

    @classmethod
    def make_options(cls, folder):
        lines = {"name": "jsonl", **super().make_options(folder)}
        return {"sources": [lines, {"name": "sort-digits", "size": 9, "weight": 3}]}


ABOVE = dict.fromkeys(("jsonl", "hf-dataset", "tasks", "mixture"), "above")

OPTIONS = {
    "sort-digits": {"options": {"size": 50}},
    "reasoning-gym": {"options": {"task": "chain_sum", "size": 20}},  # skipped where the library is missing
}

globals().update(contracts_for(PromptsContract, options=OPTIONS, skip=ABOVE))
