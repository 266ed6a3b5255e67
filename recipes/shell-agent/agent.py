#!/usr/bin/env python3
"""A small shell agent: it requests commands from a model, runs them in this folder, and returns
their output to the model.

Usage: `agent.py TASK`. OPENAI_BASE_URL is the address of the model, with the key OPENAI_API_KEY. It needs only Python.
"""

import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request

MAX_STEPS = 8
EXAMPLES = [
    {"role": "system", "content": "Reply with a shell command."},
    {"role": "user", "content": "Make the folder photos."},
    {"role": "assistant", "content": "$ mkdir photos"},
    {"role": "user", "content": "Delete old.txt."},
    {"role": "assistant", "content": "$ rm old.txt"},
    {"role": "user", "content": "Copy cat.txt to dog.txt."},
    {"role": "assistant", "content": "$ cp cat.txt dog.txt"},
]
"""The first messages of each conversation, which show the model the form of a reply."""
_COMMAND = re.compile(r"```(?:sh|bash)?\s*\n(.*?)```|^\$ ([^\n]+)$", re.DOTALL | re.MULTILINE)
_MAX_OUTPUT = 500
_COMMAND_SECONDS = 10
_MODEL_SECONDS = 3600
_REFUSED = 400


def ask(messages: list[dict[str, str]]) -> str:
    """Return the model's next message. Raises `urllib.error.HTTPError` if it refuses to answer."""
    body = {"model": os.environ.get("OPENAI_MODEL", "policy"), "messages": messages}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=_MODEL_SECONDS) as response:
        return str(json.load(response)["choices"][0]["message"]["content"])


def command_of(text: str) -> str | None:
    """Return the first command of a message, in a block of code or after a dollar sign. None ends the work."""
    found = _COMMAND.search(text)
    return None if found is None else (found[1] or found[2] or "").strip() or None


def run(command: str) -> str:
    """Run a command in a shell and return its output as the model gets it."""
    try:
        done = subprocess.run(
            ["sh", "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_COMMAND_SECONDS,
            text=True,
            errors="replace",
        )
    except subprocess.TimeoutExpired:
        return f"the command did not end within {_COMMAND_SECONDS} s"
    return f"exit code {done.returncode}\n{done.stdout[:_MAX_OUTPUT]}"


def main(task: str) -> None:
    """Work on a task until the model replies without a command, or no step is left."""
    messages = [*EXAMPLES, {"role": "user", "content": task}]
    for step in range(MAX_STEPS):
        try:
            text = ask(messages)
        except urllib.error.HTTPError as error:
            if step and error.code == _REFUSED:
                return  # no turn or token is left
            print(error.read().decode(errors="replace"), file=sys.stderr)
            raise
        command = command_of(text)
        if command is None:
            return
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": run(command)}]


if __name__ == "__main__":
    main(sys.argv[1])
