"""The program that scores answers in the sandbox; the text of `library.py` stands before it.

Its input is JSON, `{"seconds", "answers": [{"task", "task_options", "entry", "answer"}]}`; it prints a list of scores.
Each answer is scored in a separate process with a deadline, so no answer can affect another's score.
"""

import json
import os
import select
import signal
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .library import make_dataset, score


def score_apart(dataset: Any, job: Mapping[str, Any], seconds: float) -> float:
    """The score of one answer; 0 where its process reports none in time."""
    if "__" in job["answer"]:
        # No task's answer needs these, but they lead from an expression to all of Python, and so to setting the score.
        return 0.0
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # ignore what it prints
            told = score(dataset, job["task"], job["entry"], job["answer"])
            os.write(write, json.dumps(told).encode())
        finally:
            os._exit(0)
    os.close(write)
    try:
        ready, _, _ = select.select([read], [], [], seconds)
        said = os.read(read, 64) if ready else b""
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(read)
    try:
        return float(json.loads(said))
    except (ValueError, TypeError):
        return 0.0


def main() -> None:
    """Score all answers in the job."""
    order = json.loads(sys.stdin.read())
    datasets = {}
    scores = []
    for job in order["answers"]:
        key = json.dumps([job["task"], job["task_options"]])
        if key not in datasets:
            datasets[key] = make_dataset(job["task"], job["task_options"])
        scores.append(score_apart(datasets[key], job, order["seconds"]))
    print(json.dumps(scores), flush=True)


main()
