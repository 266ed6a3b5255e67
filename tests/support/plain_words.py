"""Check docstrings, comments, messages and pages for habits of speech that readers stumble over (`make lint`).

`CONTRIBUTING.md`, "Plain words", explains what to write instead. `plain_words.toml` lists accepted phrases and reasons.

usage: plain_words.py [PATH...]    only these files or folders (default: everything)
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
CODE = ("rlhf_core/**", "cli/**", "start/**", "libraries/*/src/**", "plugins/*/*/src/**")
SOURCES = tuple(
    f"{folder}/*.py" for folder in (*CODE, "examples/*/src/**", "examples/seed", "examples/sweep", "recipes/**", "docs")
)
PAGES = (
    "*.md",
    "*/README.md",
    "*/*/README.md",
    "plugins/*/*/README.md",
    "docs/**/*.md",
    "changes/*.md",
    "benchmarks/*.md",
)
SKIPPED = ("docs/reference/", "/templates/")
MESSAGES = ("hint", "description", "help", "summary")
"""Keyword arguments that users read."""


class Habit(NamedTuple):
    pattern: str
    instead: str


HABITS = {
    "where": Habit(
        r"\bwhere (it|there|they|that|the|a|an|one|none|no|nothing|this|its|all|some|several|what)\b", "if, when"
    ),
    "what": Habit(r"\b[Ww]hat (it|they|is|was|comes|came|a|the|no|each|has|had|must|may|can|others|one)\b", "a noun"),
    "says": Habit(r"\b(says?|said)\b", "sets, specifies, contains"),
    "asks": Habit(r"\b(asks?|asked)\b", "calls, requests"),
    "is no": Habit(r"\b(is|are|was) no \w+", "is not"),
    "takes no": Habit(r"\b(takes?|gives?|has|have) (no|none)\b", "does not take, without"),
    "of its own": Habit(r"\bof (its|their|his|one's) own\b", "its own"),
    "beside": Habit(r"\bbeside\b", "alongside, next to"),
    "told": Habit(r"\b(told|tells?)\b", "reports, logs, warns"),
    "goes on": Habit(r"\b(go|goes|went|gone|going) on\b", "continues"),
    "behind": Habit(r"\bbehind\b", "after"),
    "stands": Habit(r"\bstands?\b", "is, stays"),
    "nobody": Habit(r"\bnobody\b|\banew\b|\b(is|are) gone\b", "no one, again, lost"),
    "so many": Habit(r"\bso (many|long|much)\b(?! (that|as))", "this many, for that long"),
    "let go": Habit(r"\blets? go\b", "releases"),
    "is to": Habit(r"\b(is|are) to (have|be|do|call|give|take|go|learn|come|get|end)\b", "should, must"),
    "is there": Habit(r"\b(is|are|was|were) there\b(?! (a|an|any|no))", "exists"),
    "Most": Habit(r"^(Most|Longest|Least|Largest) ", "Maximum, minimum"),
    "What": Habit(r"^(What|Of|Whose|Where) ", "a noun phrase or an imperative sentence"),
    "he": Habit(r"\b(he|his|him)\b", "they, their"),
    "semicolon": Habit(r";", "two sentences"),
}


class Text(NamedTuple):
    path: str
    line: int
    text: str


def texts_of(path: Path) -> Iterator[Text]:
    """Docstrings, comments and messages of a source file, or the lines of a page outside its code blocks."""
    name = str(path.relative_to(ROOT))
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        in_code = False
        for number, line in enumerate(source.splitlines(), 1):
            in_code ^= line.startswith("```")
            if not in_code and line.strip():
                yield Text(name, number, line)
        return
    for node in ast.walk(ast.parse(source)):
        # A string that is a statement is a docstring, of a module, class, function or attribute.
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield Text(name, node.lineno, inspect.cleandoc(node.value.value))
        if isinstance(node, ast.Call):
            shown = [keyword.value for keyword in node.keywords if keyword.arg in MESSAGES]
            if ast.unparse(node.func).endswith("Error"):
                shown += node.args[:1]
            yield from (Text(name, each.lineno, ast.unparse(each)) for each in shown)
    with path.open(encoding="utf-8") as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type == tokenize.COMMENT:
                yield Text(name, token.start[0], token.string)


def files(chosen: list[str]) -> list[Path]:
    """All sources and pages, or those at or below the chosen paths."""
    found = {path for pattern in (*SOURCES, *PAGES) for path in ROOT.glob(pattern)}
    kept = [path for path in sorted(found) if not any(part in str(path.relative_to(ROOT)) for part in SKIPPED)]
    places = [Path(each).resolve() for each in chosen]
    return [path for path in kept if not places or any(path.is_relative_to(place) for place in places)]


def accepted_phrases() -> re.Pattern[str]:
    entries = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))["accepted"]
    assert all(entry["reason"].strip() for entry in entries), "each accepted phrase needs a reason"
    return re.compile("|".join(entry["phrase"] for entry in entries))


def main() -> int:
    accepted, counts = accepted_phrases(), Counter[str]()
    for path in files(sys.argv[1:]):
        for name, line, text in texts_of(path):
            rest = accepted.sub("", text)
            for habit, (pattern, instead) in HABITS.items():
                if found := re.search(pattern, rest):
                    counts[habit] += 1
                    around = " ".join(rest[max(0, found.start() - 50) : found.end() + 50].split())
                    print(f"{name}:{line}: {habit!r} ({instead}): {around}")
    if counts:
        print(f"{sum(counts.values())} places: {dict(counts.most_common())}")
    return int(bool(counts))


if __name__ == "__main__":
    sys.exit(main())
