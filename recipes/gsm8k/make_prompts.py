"""GSM8K as prompts: problems as chat messages, with the number after `####` as the answer.

.venv/bin/python recipes/gsm8k/make_prompts.py            # from a model hub, with the package datasets
.venv/bin/python recipes/gsm8k/make_prompts.py --from DIR   # train.jsonl and test.jsonl of the dataset
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ASK = "Think step by step, and put the final number within \\boxed{}."


def record(problem: Mapping[str, str]) -> dict[str, Any]:
    """Return a line for the prompt source `jsonl`. Raises `ValueError` for a solution without a number."""
    _, marked, number = problem["answer"].rpartition("####")
    if not marked or not number.strip():
        raise ValueError(f"no number after #### in the answer to {problem['question'][:60]!r}")
    return {
        "prompt": [{"role": "user", "content": f"{problem['question'].strip()}\n{ASK}"}],
        "answer": number.strip().replace(",", ""),
    }


def problems(folder: Path | None, split: str) -> Iterable[Mapping[str, str]]:
    """Return the problems of a folder of JSON Lines files, or of the hub's dataset."""
    if folder is not None:
        return [json.loads(line) for line in (folder / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()]
    from datasets import load_dataset

    found: Iterable[Mapping[str, str]] = load_dataset("openai/gsm8k", "main", split=split)
    return found


def main() -> None:
    """Write train.jsonl and test.jsonl."""
    parser = argparse.ArgumentParser(description="GSM8K as prompts of a run.")
    parser.add_argument("--from", dest="folder", type=Path, metavar="DIR", help="a folder with both splits")
    parser.add_argument("--to", type=Path, default=HERE, metavar="DIR", help="target folder")
    given = parser.parse_args()
    given.to.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        try:
            lines = [json.dumps(record(problem)) for problem in problems(given.folder, split)]
        except (OSError, ValueError, KeyError, ImportError) as error:
            print(f"make_prompts.py: {split}: {error}", file=sys.stderr)
            sys.exit(2)
        (given.to / f"{split}.jsonl").write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        print(f"wrote {given.to / f'{split}.jsonl'}: {len(lines)} problems")


if __name__ == "__main__":
    main()
