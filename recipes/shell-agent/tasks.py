"""Write the tasks of this recipe to `tasks.jsonl` next to this file: `python recipes/shell-agent/tasks.py`.

A record has a prompt, the files of the working folder, and as `answer` a shell condition that holds once the task is
done.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

_WORDS = """
apple river stone cloud tiger lemon piano candle garden window silver bridge forest island market pocket rabbit school
spring summer winter yellow purple orange butter castle desert engine flower guitar hammer jacket kitten ladder mirror
needle oyster pepper rocket saddle
"""
_NAMES = """
notes list data log draft plan memo index report table budget letter recipe story poem essay menu diary map score photo
song test task week month guide paper page book chart summary agenda invoice backup names dates words lines rules
"""
WORDS, NAMES = _WORDS.split(), _NAMES.split()
KINDS = ("create", "copy", "rename", "delete")
NUM_OF_KIND = 40


def make_task(kind: str, rng: random.Random) -> tuple[str, dict[str, str], str]:
    """Return text, files and condition of one task."""
    word, other = rng.sample(WORDS, 2)
    file, second = (f"{name}.txt" for name in rng.sample(NAMES, 2))
    if kind == "create":
        return f"Create the file {file}.", {}, f"test -f {file}"
    if kind == "copy":
        files, condition = {file: f"{word}\n"}, f"cmp {file} {second}"
        return f"Copy {file} to {second}.", files, condition
    if kind == "rename":
        files, condition = {file: f"{word}\n"}, f'test ! -e {file} && test "$(cat {second})" = {word}'
        return f"Rename {file} to {second}.", files, condition
    files = {file: f"{word}\n", second: f"{other}\n"}
    return f"Delete {file}.", files, f"test ! -e {file} && test -e {second}"


def make_records() -> list[dict[str, object]]:
    """Return a record for each task, as many of each kind. No two tasks have the same text."""
    rng = random.Random(0)
    records: list[dict[str, object]] = []
    for kind in KINDS:
        tasks: dict[str, tuple[str, dict[str, str], str]] = {}
        while len(tasks) < NUM_OF_KIND:
            task = make_task(kind, rng)
            tasks.setdefault(task[0], task)
        records += [
            {"prompt": [{"role": "user", "content": text}], "answer": condition, "files": files, "kind": kind}
            for text, files, condition in tasks.values()
        ]
    rng.shuffle(records)
    return records


def write_tasks(path: Path) -> None:
    """Write the records to a file with one JSON value on each line."""
    path.write_text("".join(json.dumps(each) + "\n" for each in make_records()), encoding="utf-8")


if __name__ == "__main__":
    write_tasks(Path(__file__).with_name("tasks.jsonl"))
