"""Write the tasks of this recipe: `python recipes/shell-agent/tasks.py > recipes/shell-agent/tasks.jsonl`.

A record has a prompt with one example, the files of the working folder, and as `answer` a shell condition that holds
once the task is done. The example is of another kind than the task.
"""

import json
import random

WORDS = "apple river stone cloud tiger lemon piano candle garden window silver rocket".split()
NAMES = "notes list data log draft plan memo index report table".split()
NUM_TASKS = 400


def make_task(kind: str, rng: random.Random) -> tuple[str, str, dict[str, str], str]:
    """Return text, solution, files and condition of one task."""
    word, other = rng.sample(WORDS, 2)
    file, second = (f"{name}.txt" for name in rng.sample(NAMES, 2))
    if kind == "write":
        return f"Write {word} to {file}.", f"echo {word} > {file}", {}, f'test "$(cat {file})" = {word}'
    if kind == "append":
        files = {file: f"{other}\n"}
        condition = f'test "$(tr "\\n" " " < {file})" = "{other} {word} "'
        return f"Append {word} to {file}.", f"echo {word} >> {file}", files, condition
    if kind == "copy":
        files, condition = {file: f"{word}\n"}, f"cmp {file} {second}"
        return f"Copy {file} to {second}.", f"cp {file} {second}", files, condition
    if kind == "rename":
        files, condition = {file: f"{word}\n"}, f'test ! -e {file} && test "$(cat {second})" = {word}'
        return f"Rename {file} to {second}.", f"mv {file} {second}", files, condition
    files = {file: f"{word}\n", second: f"{other}\n"}
    return f"Delete {file}.", f"rm {file}", files, f"test ! -e {file} && test -e {second}"


def main() -> None:
    """Print a record for each task."""
    kinds = ["write", "append", "copy", "rename", "delete"]
    rng = random.Random(0)
    seen = set()
    while len(seen) < NUM_TASKS:
        kind, shown = rng.sample(kinds, 2)
        text, _, files, condition = make_task(kind, rng)
        if text in seen:
            continue
        seen.add(text)
        example, solution, _, _ = make_task(shown, rng)
        prompt = f"Answer with one shell command.\n\nTask: {example}\n$ {solution}\n\nTask: {text}"
        record = {"prompt": [{"role": "user", "content": prompt}], "answer": condition, "files": files, "kind": kind}
        print(json.dumps(record))


if __name__ == "__main__":
    main()
