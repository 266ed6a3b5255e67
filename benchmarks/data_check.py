"""CPU time of checking a JSON Lines file of prompts, compared with parsing its lines with `json`.

    python benchmarks/data_check.py [LINES]

The check covers shape and types of every line, the token counts of 1,000, and a digest of the file.
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
    """Minimum CPU seconds of several runs."""
    times = []
    for _ in range(REPEATS):
        started = time.process_time()
        run()
        times.append(time.process_time() - started)
    return min(times)


def parse_lines(path: Path) -> int:
    """Parse the lines, the minimum work of any script."""
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
