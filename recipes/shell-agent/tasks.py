"""Write the tasks of this recipe to `tasks.jsonl` next to this file: `python recipes/shell-agent/tasks.py`.

A record has a prompt, the files of the working folder, and as `answer` a shell condition that holds once the task is
done.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

WORDS = ["apple", "river", "stone", "cloud", "tiger", "lemon", "piano", "candle", "garden", "window", "silver"]
NAMES = ["notes", "list", "data", "log", "draft", "plan", "memo", "index", "report", "table"]
KINDS = ["write", "append", "copy", "rename", "delete"]
NUM_TASKS = 300


def make_task(kind: str, rng: random.Random) -> tuple[str, dict[str, str], str]:
    """Return text, files and condition of one task."""
    word, other = rng.sample(WORDS, 2)
    file, second = (f"{name}.txt" for name in rng.sample(NAMES, 2))
    if kind == "write":
        return f"Write {word} to {file}.", {}, f'test "$(cat {file})" = {word}'
    if kind == "append":
        files = {file: f"{other}\n"}
        condition = f'test "$(tr "\\n" " " < {file})" = "{other} {word} "'
        return f"Append {word} to {file}.", files, condition
    if kind == "copy":
        files, condition = {file: f"{word}\n"}, f"cmp {file} {second}"
        return f"Copy {file} to {second}.", files, condition
    if kind == "rename":
        files, condition = {file: f"{word}\n"}, f'test ! -e {file} && test "$(cat {second})" = {word}'
        return f"Rename {file} to {second}.", files, condition
    files = {file: f"{word}\n", second: f"{other}\n"}
    return f"Delete {file}.", files, f"test ! -e {file} && test -e {second}"


def make_records() -> list[dict[str, object]]:
    """Return a record for each task. No two tasks have the same text."""
    rng = random.Random(0)
    records: dict[str, dict[str, object]] = {}
    while len(records) < NUM_TASKS:
        kind = rng.choice(KINDS)
        text, files, condition = make_task(kind, rng)
        prompt = [{"role": "user", "content": text}]
        record = {"prompt": prompt, "answer": condition, "files": files, "kind": kind}
        records.setdefault(text, record)
    return list(records.values())


def write_tasks(path: Path) -> None:
    """Write the records to a file with one JSON value on each line."""
    path.write_text("".join(json.dumps(each) + "\n" for each in make_records()), encoding="utf-8")


if __name__ == "__main__":
    write_tasks(Path(__file__).with_name("tasks.jsonl"))
