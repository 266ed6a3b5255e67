"""Inputs made by chance: values from the schemas, nearly right run files, broken bytes, hostile answers."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

HOSTILE: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 10**40, 0.5, -0.5, 1e-300, 1e308, float("inf"), float("nan")),
    *("", " ", "x" * 300, "\x1b[2J", "\u202e", "../..", "/dev/zero", "~nobody/x", "builtin:", "builtin:none", "***"),
    *("http://a:b@c", "x.py:f", ".py:", "env:NO_SUCH_NAME", "$(id)", "{}", "null", "1e3", "\U0001f600"),
    *([], {}, [[]], {"name": None}, {"name": "ppo"}, [1, "a"], {"a": {"b": {"c": []}}}),
)
_PIECES = (
    *("\\boxed{", "}", "{", "(", ")", "[", "]", "$", "^", "9", "10**", "\\frac", "<think>", "</think>", "<answer>"),
    *(
        "</answer>",
        "```python\n",
        "```",
        "\x00",
        "\x1b]0;x\x07",
        "\u202e",
        "\ud800",
        "\n",
        " ",
        "a",
        "\\",
        '"',
        ":",
        ",",
    ),
    *(
        "\\",
        '"',
        ":",
        ",",
        "null",
        "NaN",
        "1e999",
        "-",
        "/",
        "import os\n",
        "while True: pass\n",
        "\U0001f600",
        "0",
        "=",
    ),
)
"""What answers are made of, to rules that parse them."""
_WHOLE = (b"", b"\x00" * 64, b"\xff\xfe", b"[" * 20000, b'{"a":' * 20000, b"9" * 6000, b"\xef\xbb\xbf{}")


def made(schema: Mapping[str, Any], definitions: Mapping[str, Any], chance: random.Random, depth: int = 0) -> Any:
    """A value that the schema asks for, or nearly."""
    if depth > 6 or chance.random() < 0.06:
        return chance.choice(HOSTILE)
    if "$ref" in schema:
        return made(definitions[schema["$ref"].rpartition("/")[2]], definitions, chance, depth + 1)
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return made(chance.choice(schema[key]), definitions, chance, depth + 1)
    if "const" in schema or "enum" in schema:
        return schema["const"] if "const" in schema else chance.choice(schema["enum"])
    kind = schema.get("type")
    if kind == "object":
        properties = schema.get("properties", {})
        few = [name for name in properties if name in schema.get("required", ()) or chance.random() < 0.2]
        return {name: made(properties[name], definitions, chance, depth + 1) for name in few}
    if kind == "array":
        items = schema.get("items", {})
        return [made(items, definitions, chance, depth + 1) for _ in range(chance.randrange(3))]
    if kind in ("integer", "number"):
        bounds = [
            schema[key] for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum") if key in schema
        ]
        near = [bound + step for bound in bounds for step in (-1, 0, 1)]
        return chance.choice([*near, 0, 1, 2, 3, 7] if kind == "integer" else [*near, 0.0, 0.5, 1.0, 1e-6])
    return {"boolean": chance.random() < 0.5, "null": None}.get(
        str(kind), chance.choice(("a", "mean", "auto", "x.jsonl"))
    )


def changed(run: Any, document: Mapping[str, Any], chance: random.Random) -> dict[str, Any]:
    """A run that is right, with some sections made anew or spoilt."""
    result = json.loads(json.dumps(run))
    for section in chance.sample(sorted(document["properties"]), chance.randrange(1, 4)):
        value = made(document["properties"][section], document["$defs"], chance)
        old = result.get(section)
        is_mixed = isinstance(value, dict) and isinstance(old, dict) and chance.random() < 0.6
        result[section] = {**old, **value} if is_mixed else value
    if chance.random() < 0.1:
        result[chance.choice(("modle", "", "a.b", "eval ", "\u202e"))] = chance.choice(HOSTILE)
    return result


def text_of(run: Mapping[str, Any], chance: random.Random) -> bytes:
    """The run as a file (JSON is YAML), now and then with broken bytes."""
    content = json.dumps(run, ensure_ascii=chance.random() < 0.5).encode("utf-8", "surrogatepass")
    return spoilt(content, chance) if chance.random() < 0.2 else content


def spoilt(content: bytes, chance: random.Random) -> bytes:
    """The content with some bytes changed, cut, doubled or replaced as a whole."""
    how = chance.randrange(8)
    if how == 0:
        return content[: chance.randrange(len(content) + 1)]
    if how == 1:
        return content * 2
    if how == 2:
        return json.dumps(chance.choice(HOSTILE)).encode()
    if how == 3:
        return chance.choice(
            (b"", b"\x00" * 64, b"\xff\xfe", b"[" * 20000, b'{"a":' * 20000, b"9" * 6000, b"\xef\xbb\xbf{}")
        )
    result = bytearray(content)
    for _ in range(chance.randrange(1, 6)):
        place = chance.randrange(len(result) + 1)
        result[place : place + chance.randrange(3)] = bytes(chance.choices(b'{}[]":,&*!|>%@\x00\xff\t#-\n9', k=2))
    return bytes(result)


def answer(chance: random.Random) -> str:
    """What a model might write to hurt a rule."""
    text = "".join(chance.choices(_PIECES, k=chance.randrange(12)))
    return text * chance.choice((1, 1, 1, 50, 2000))
