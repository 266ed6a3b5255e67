"""The steps of a page that a reader follows from top to bottom: files to save and lines to type.

A Python or YAML block is a file, and begins with a comment with its name (`# run.yaml`). A shell block has one command
per line. If the text before it ends in `in another terminal:` (a remark in brackets may precede the colon), it is typed
while the last command of the previous shell block is running.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_SHELL = {"", "bash", "sh"}
_FILES = {"python", "yaml"}
_MEANWHILE = re.compile(r"in another\s+terminal(?:\s+\([^)]*\))?:\s*\Z")


@dataclass(frozen=True, slots=True)
class File:
    """A file that the reader saves."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Commands:
    """Lines that the reader types one after the other."""

    lines: tuple[str, ...]
    in_another_terminal: bool = False
    """Whether they are typed while the last line before them is running."""


def page_steps(text: str) -> list[File | Commands]:
    """Return the steps of a page, in order.

    Args:
        text: The page, in Markdown.

    Raises:
        ValueError: A Python or YAML block does not begin with the name of its file.

    Example:
        >>> page_steps("Type:\\n\\n```\\nrlhf version\\n```\\n")
        [Commands(lines=('rlhf version',), in_another_terminal=False)]
    """
    steps: list[File | Commands] = []
    for block in _BLOCK.finditer(text):
        language, content = block[1], block[2]
        if language in _SHELL:
            lines = tuple(line for line in content.replace("\\\n", " ").splitlines() if line.strip())
            steps.append(Commands(lines, bool(_MEANWHILE.search(text[: block.start()]))))
        elif language in _FILES:
            name = re.match(r"# ([\w.-]+\.(?:py|yaml))\n", content)
            if name is None:
                raise ValueError(f"a block does not begin with its file's name, as in `# run.yaml`:\n{content}")
            steps.append(File(name[1], content))
    return steps
