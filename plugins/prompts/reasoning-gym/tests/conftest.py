"""A library of one task, in place of the real one."""

import sys
from pathlib import Path

import pytest

FAKE = {
    "__init__.py": """
from .factory import create_dataset
""",
    "factory.py": """
import random
class Dataset:
    def __init__(self, seed, size, most=9):
        assert most > 0, "most must be positive"
        self.seed, self.size, self.most = seed, size, most
    def __getitem__(self, index):
        print("thinking")
        if self.most == 13:
            raise SystemExit(3)
        a, b = (random.Random(self.seed + index).randint(0, self.most) for _ in "ab")
        metadata = {"terms": (a, b), "order": list({"x", "y", "z"})}
        return {"question": f"{a}+{b}?", "answer": str(a + b), "metadata": metadata}
    def score_answer(self, answer, entry):
        return float(int(answer) == sum(entry["metadata"]["terms"]))
Dataset.__module__ = __name__
DATASETS = {"sum": (Dataset, None), "sum_more": (Dataset, None)}
def create_dataset(name, **options):
    return DATASETS[name][0](**options)
""",
    "composite.py": """
class DatasetSpec: ...
""",
}


@pytest.fixture
def fake_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`reasoning_gym` is a module with the tasks `sum` and `sum_more`, here and in processes started from here."""
    from rlhf_reasoning_gym import reward

    folder = tmp_path / "fake" / "reasoning_gym"
    folder.mkdir(parents=True)
    for name, text in FAKE.items():
        (folder / name).write_text(text)
    for name in [name for name in sys.modules if name.partition(".")[0] == "reasoning_gym"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(folder.parent)
    monkeypatch.setenv("PYTHONPATH", str(folder.parent))
    reward._dataset.cache_clear()
    reward._runs_answers.cache_clear()
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "reasoning_gym"]:
        del sys.modules[name]
    reward._dataset.cache_clear()
    reward._runs_answers.cache_clear()
