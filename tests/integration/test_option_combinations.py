"""Options of learning from samples x strategy, transport, adapter and quantized weights: each starts, or is refused.

Combinations cover all pairs of values (`pairwise.py`). What one process learns is compared elsewhere
(`test_combinations.py`, `test_adapter_combinations.py`, and tests beside the plugins). Here a run of two episodes
learns something finite from log-probs that the trainer agrees with.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from option_runs import EXCLUDED, Files, columns_of, excludes, run_file, write_records
from pairwise import pairs_of, pairwise
from quick_ray import quick_workers
from run_files import lines, start
from scoring_server import scoring_server
from transformers import AutoModelForSequenceClassification

from rlhf_core import train
from rlhf_core.errors import ConfigError
from rlhf_testing.models import CHARACTERS, builtin_model, tiny_model, tiny_tokenizer
from rlhf_testing.runs import tiny_run

pytestmark = [pytest.mark.usefixtures("no_plots"), pytest.mark.timeout(300)]
NOWHERE = Files(*(Path(name) for name in ("records", "reward-model", "teacher", "recorded")), "http://localhost:1/v1")
NAMES = {column: tuple(values) for column, values in columns_of(NOWHERE).items()}
COVER = pairwise(NAMES, excludes=excludes)
PLAINEST = {column: values[0] for column, values in NAMES.items()} | {"algorithm": "rejection"}
COLUMN_OF = {value: column for column, values in NAMES.items() for value in values}
LEFT_OUT = ("all-weights", "none", "plain", "constant", "adamw", "local", "single")
"""Values that are not part of a test's name."""
GAP_KEY = "rollout/logprob_gap_max"
GAP = {"gemini": 0.2}
"""Strategy -> largest difference of a log-prob of engine and trainer. This one computes in 16 bits."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, ray_worker_source: None) -> Iterator[Files]:
    """What options refer to. All runs of this module have one thread and one Ray."""
    from rlhf_ray.cluster import connect
    from rlhf_ray.config import RayConfig

    folder = tmp_path_factory.mktemp("files")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    model, tokenizer = builtin_model()
    with scoring_server(model) as server, quick_workers(), connect(RayConfig()):
        server.tokenizer = tokenizer
        found = Files(*(folder / path.name for path in NOWHERE[:-1]), server.url)
        write_records(found.records)
        scores = copy.deepcopy(model.config)
        scores.num_labels = 1
        AutoModelForSequenceClassification.from_config(scores).save_pretrained(found.reward_model)
        tokenizer.save_pretrained(found.reward_model)
        other = tiny_tokenizer(CHARACTERS[::-1])
        tiny_model(other).save_pretrained(found.teacher)
        other.save_pretrained(found.teacher)
        recording = {"algorithm": {"name": "grpo"}, "logging": {"sample_tokens": True}}
        start({**run_file(found, PLAINEST), **recording}, found.recorded)
        yield found
    torch.set_num_threads(before)


def test_every_pair_is_tried_or_refused() -> None:
    tried = {pair for row in COVER for pair in pairs_of(row)}
    choices = [[(column, value) for value in values] for column, values in NAMES.items()]
    for ours, theirs in itertools.combinations(choices, 2):
        for pair in itertools.product(ours, theirs):
            assert (pair in tried) != excludes(*pair), pair
    assert len(COLUMN_OF) == sum(map(len, NAMES.values())), "names of values are unique"
    assert len(COVER) < 120, "the pairs of the two largest columns, and few more"


@pytest.mark.slow
@pytest.mark.parametrize(
    "row", [pytest.param(row, id="-".join(each for each in row.values() if each not in LEFT_OUT)) for row in COVER]
)
def test_it_trains(row: dict[str, str], files: Files, tmp_path: Path) -> None:
    start(run_file(files, row), tmp_path / "run")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "done"
    found = lines(tmp_path / "run" / "metrics.jsonl")
    assert len(found) == 2 and any(line["policy/grad_norm"] > 0 for line in found)
    assert all(math.isfinite(value) for line in found for value in line.values() if isinstance(value, float))
    if row["part"] == "replay":
        return  # its log-probs are those of the recorded run's weights (test_replay.py)
    gaps = [line[GAP_KEY] for line in found if GAP_KEY in line]
    assert gaps and max(gaps) < GAP.get(row["strategy"], 1e-4)


@pytest.mark.parametrize(("one", "other"), EXCLUDED)
def test_it_is_refused_by_name(one: str, other: str, tmp_path: Path) -> None:
    chosen = {**PLAINEST, COLUMN_OF[one]: one, COLUMN_OF[other]: other}
    write_records(tmp_path / "records")
    with pytest.raises(ConfigError, match=EXCLUDED[one, other]):
        train(tiny_run(run_file(NOWHERE._replace(records=tmp_path / "records"), chosen)), dry_run=True)
