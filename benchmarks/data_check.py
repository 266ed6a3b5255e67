"""What a check of a JSON Lines file of prompts costs, beside parsing its lines with `json`, in CPU time.

Of every line shape and types are checked, of 1,000 also the length in tokens; a digest of the file is taken.
Usage: python benchmarks/data_check.py [LINES]
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rlhf_core.prompts.jsonl import JsonlSource
from rlhf_testing.episodes import prompt_stream
from rlhf_testing.models import tiny_tokenizer

REPEATS = 5
MEASURED = 1000


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 200_000
    tokenizer = tiny_tokenizer("abcdefghijklmnopqrstuvwxyz 0123456789")
    with tempfile.TemporaryDirectory() as folder:
        for name, make in {"short": short, "text": text, "chat": chat}.items():
            path = Path(folder) / f"{name}.jsonl"
            draw = random.Random(0)
            with path.open("w") as file:
                file.writelines(json.dumps(make(draw)) + "\n" for _ in range(count))
            tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
            parse = best(lambda path=path: parse_lines(path))
            check = best(lambda path=path: prompt_stream(JsonlSource(path), tokenizer, seed=0, measured=MEASURED))
            size = path.stat().st_size / count
            print(
                f"{name:>6}: {count:,} lines of {size:.0f} bytes: json {parse:.2f} s, check {check:.2f} s, "
                f"ratio {check / parse:.2f}"
            )


def best(run: Callable[[], object]) -> float:
    """Least CPU seconds of several runs."""
    times = []
    for _ in range(REPEATS):
        started = time.process_time()
        run()
        times.append(time.process_time() - started)
    return min(times)


def parse_lines(path: Path) -> int:
    """What a script would do at the least."""
    with path.open(encoding="utf-8") as file:
        return sum(len(json.loads(line)) for line in file)


def words(draw: random.Random, count: int) -> str:
    return " ".join("".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=5)) for _ in range(count))


def short(draw: random.Random) -> dict[str, object]:
    return {"prompt": f"{draw.randrange(10**8)}>", "answer": str(draw.randrange(10**8))}


def text(draw: random.Random) -> dict[str, object]:
    return {"prompt": words(draw, 50), "answer": words(draw, 3), "level": draw.randrange(5), "source": "made up"}


def chat(draw: random.Random) -> dict[str, object]:
    messages = [{"role": "system", "content": words(draw, 10)}, {"role": "user", "content": words(draw, 40)}]
    return {"prompt": messages, "answer": words(draw, 3)}


if __name__ == "__main__":
    main()
