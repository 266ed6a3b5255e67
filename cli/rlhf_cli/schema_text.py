"""Options of a plugin as table rows, from the JSON schema of its config model."""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel

_BOUNDS = {
    "minimum": ">=",
    "exclusiveMinimum": ">",
    "maximum": "<=",
    "exclusiveMaximum": "<",
    "minLength": "length >=",
    "maxLength": "length <=",
    "minItems": "items >=",
    "maxItems": "items <=",
    "pattern": "like",
}


def option_rows(model: type[BaseModel]) -> list[list[str]]:
    """Return a row for each option: name, type with bounds, default, description.

    Example:
        >>> from pydantic import Field
        >>> from rlhf_core import Section
        >>> class Options(Section):
        ...     size: int = Field(4, ge=1, description="Number of rows.")
        >>> option_rows(Options)
        [['size', 'integer >= 1', '4', 'Number of rows.']]
    """
    schema = model.model_json_schema()
    required = schema.get("required", [])
    return [
        [name, type_text(option), _default(option, name in required), option.get("description", "")]
        for name, option in schema.get("properties", {}).items()
    ]


def _default(option: dict[str, Any], required: bool) -> str:
    if required:
        return "required"
    return json.dumps(option["default"], ensure_ascii=False) if "default" in option else "derived"


def type_text(option: dict[str, Any]) -> str:
    """Return the type of an option with its bounds.

    Example:
        >>> type_text({"type": "integer", "minimum": 1}), type_text({"enum": ["a", "b"]})
        ('integer >= 1', 'a | b')
        >>> type_text({"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "null"}]})
        'number > 0 | null'
    """
    if "anyOf" in option:
        return " | ".join(type_text(each) for each in option["anyOf"])
    if "enum" in option:
        return " | ".join(map(str, option["enum"]))
    if "const" in option:
        return str(option["const"])
    if "$ref" in option:
        return str(option["$ref"]).rpartition("/")[2]
    text = str(option.get("type", "any"))
    if text == "array" and "items" in option:
        text = f"list of {type_text(option['items'])}"
    return " ".join([text, *(f"{sign} {option[key]}" for key, sign in _BOUNDS.items() if key in option)])
