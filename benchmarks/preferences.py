"""Learning from the quickstart's preference pairs: held-out pairs in the right order, and right answers, as a table.

Each cell is a separate run of the command on `sort-digits`, with pairs of the right answer and a near miss. A pair is
in the right order if the right answer has the higher log-prob, measured on 1,000 pairs not used in training. `right` is
greedy exact match on the same prompts. All runs of one seed start from one warm start. Finished runs are not repeated:
pass the folder of an interrupted table as `--output` to continue it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

RUN_TIMEOUT_SECONDS = 3600
ALGORITHMS = ("dpo", "kto", "orpo", "simpo")
NUM_PAIRS = 1000


def summary(folder: Path) -> dict[str, Any]:
    """Summary of a run that ended as expected, otherwise empty."""
    path = folder / "summary.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found if found.get("status") == "done" else {}


def run(algorithm: str, seed: int, root: Path) -> Path:
    """Train, unless the run is already finished."""
    folder, warm_start = root / f"{algorithm}-{seed}", root / f"warm-start-{seed}"
    if not summary(folder):
        shutil.rmtree(folder, ignore_errors=True)
        if warm_start.exists():
            shutil.copytree(warm_start, folder / "warm-start")
        command = [str(Path(sys.executable).parent / "rlhf"), "train", "--algorithm", algorithm, "--quiet"]
        command += ["--set", f"train.seed={seed}", "--set", "eval.every_episodes=120", "--output", str(folder)]
        subprocess.run(command, check=True, timeout=RUN_TIMEOUT_SECONDS)
        if not warm_start.exists():
            shutil.copytree(folder / "warm-start", warm_start)
    return folder


def pair_accuracy(run_folder: Path, model_folder: Path) -> float:
    """Share of held-out pairs whose chosen answer has the higher log-prob."""
    import torch

    from rlhf_core.components import AlgorithmContext
    from rlhf_core.config.resolve import resolve
    from rlhf_core.runfolder.folder import RunFolder
    from rlhf_core.types import SamplingParams
    from rlhf_core.wiring import RunInputs
    from rlhf_models import load_policy, load_tokenizer
    from rlhf_offline.config import DPOConfig
    from rlhf_offline.dpo import DPO

    resolved = resolve(RunFolder(run_folder).read_config())
    config = resolved.run.model.model_copy(update={"path": str(model_folder)})
    tokenizer = load_tokenizer(config)
    model = load_policy(config, dtype=torch.float32, seed=0).eval()
    context = AlgorithmContext(sampling=SamplingParams(), samples_per_prompt=1, tokenizer=tokenizer)
    dpo = DPO(DPOConfig(), context)
    records = RunInputs(resolved).prompts.evaluation_records()
    pairs = [pair for record in records if (pair := dpo.encode(record, tokenizer)) is not None][:NUM_PAIRS]
    right = 0
    with torch.no_grad():
        for start in range(0, len(pairs), 100):
            batch = dpo.collate(pairs[start : start + 100])
            chosen, rejected = batch.pairs(dpo.values(model, batch))
            right += int((chosen > rejected).sum())
    return right / len(pairs)


def table(results: dict[str, list[tuple[float, float, float, float]]]) -> str:
    """Markdown table of algorithm x pairs and right answers, before -> after, for each seed."""
    lines = ["| algorithm | pairs told apart | right |", "|---|---|---|"]
    for algorithm, seeds in results.items():
        pairs = " ".join(f"{before:.3f}→{after:.3f}" for before, after, _, _ in seeds)
        right = " ".join(f"{before:.3f}→{after:.3f}" for _, _, before, after in seeds)
        lines.append(f"| `{algorithm}` | {pairs} | {right} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=ALGORITHMS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output", type=Path, default=Path("runs") / f"preferences-{time.strftime('%Y%m%d-%H%M%S')}")
    options = parser.parse_args()
    results: dict[str, list[tuple[float, float, float, float]]] = {}
    for algorithm in options.algorithms:
        for seed in options.seeds:
            folder = run(algorithm, seed, options.output)
            pairs = [pair_accuracy(folder, folder / part) for part in ("warm-start/model", "model")]
            scores = summary(folder)
            row = (pairs[0], pairs[1], float(scores["eval_before"]), float(scores["eval_after"]))
            results.setdefault(algorithm, []).append(row)
    (options.output / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    print(table(results))


if __name__ == "__main__":
    main()
