"""The JSON schema of run files: core's sections and the options of every installed plugin."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel

from rlhf_core.config.load import PLUGIN_SECTIONS
from rlhf_core.config.sections import EvalSetOptions, PromptsConfig, RewardEntry, RunConfig
from rlhf_core.config.select import DEFAULT_PLUGINS, shared_options
from rlhf_core.errors import PluginError
from rlhf_core.plugins.discovery import check_clash, discover
from rlhf_core.plugins.functions import PLAIN
from rlhf_core.plugins.selected import Selected, has_options, load_ref

Schema = dict[str, Any]


def run_schema() -> tuple[Schema, list[PluginError]]:
    """The schema (JSON Schema 2020-12), and the errors of plugins that are left out of it."""
    left_out: list[PluginError] = []
    definitions: Schema = {}
    document = _take(RunConfig, definitions)
    properties: Schema = document["properties"]
    for section, kind in PLUGIN_SECTIONS.items():
        plugins = _installed(kind, left_out)
        shared = shared_options(kind)
        properties[section] = _choice(
            plugins, shared, definitions, default=DEFAULT_PLUGINS.get(section), any_name=kind in PLAIN
        )
    schedules = _choice(_installed("schedules", left_out), None, definitions, default="constant")
    for choice in properties["optimizer"]["anyOf"][1:]:
        choice["properties"]["schedule"] = schedules
    properties["rewards"] = {
        "type": "array",
        "description": "What a good answer is: the weighted sum of these.",
        "items": _choice(_installed("rewards", left_out), RewardEntry, definitions, any_name=True),
    }
    _list_plugins(definitions["HooksConfig"], _installed("hooks", left_out), definitions, any_name=True)
    _list_plugins(definitions["LoggingConfig"], _installed("loggers", left_out), definitions)
    prompts = _choice(_installed("prompts", []), PromptsConfig, definitions, any_name=True)
    evaluation = definitions["EvalConfig"]["properties"]
    evaluation["prompts"] = {"anyOf": [prompts, {"type": "null"}]}
    named = _take(EvalSetOptions, definitions)
    named["properties"] |= {"prompts": prompts, "rewards": {"anyOf": [properties["rewards"], {"type": "null"}]}}
    evaluation["sets"] = {
        "type": "object",
        "description": "Further sets by name, each with prompts and, where they differ, rewards and sampling.",
        "additionalProperties": {**named, "required": ["prompts"]},
    }
    for plugin in _installed("sections", left_out):
        *parents, last = plugin.name.split(".")
        places = [document]
        for parent in parents:
            places = [found for each in places for found in _objects(each["properties"].get(parent, {}), definitions)]
        selects = getattr(plugin.component.config, "selects", None)
        if selects is None:
            schema = _take(plugin.component.config, definitions)
        else:
            schema = _choice(_installed(selects, left_out), plugin.component.config, definitions, any_name=True)
        for place in places:
            place["properties"][last] = {"anyOf": [schema, {"type": "null"}]}
    document["required"] = ["model"]
    document["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    document["title"] = "rlhf run file"
    return {**document, "$defs": definitions}, left_out


def _installed(kind: str, left_out: list[PluginError]) -> list[Selected]:
    found: list[Selected] = []
    for ref in discover(kind).values():
        try:
            check_clash(ref)
            if has_options(ref):
                found.append(load_ref(ref))
        except PluginError as error:
            left_out.append(PluginError(error.message, where=error.where or ref.label))
    return found


def _objects(schema: Schema, definitions: Schema) -> Iterator[Schema]:
    """The schemas of mappings with known keys that a schema allows."""
    if "$ref" in schema:
        yield from _objects(definitions[schema["$ref"].removeprefix("#/$defs/")], definitions)
    for each in schema.get("anyOf", ()):
        yield from _objects(each, definitions)
    if "properties" in schema:
        yield schema


def _list_plugins(section: Schema, plugins: Sequence[Selected], definitions: Schema, *, any_name: bool = False) -> None:
    """Add the plugins to a section that lists them by name: each with its options, true or false."""
    for plugin in plugins:
        options = _take(plugin.component.config, definitions)
        options = {key: options[key] for key in ("properties", "required") if key in options}
        choice: list[Schema] = [{"type": "object", **options, "additionalProperties": False}, {"type": "boolean"}]
        section["properties"][plugin.name] = {"description": plugin.component.summary, "anyOf": choice}
    if any_name:
        section["patternProperties"] = {r"\.py:\w+$": {"type": ["object", "boolean"]}}


def _choice(
    plugins: Sequence[Selected],
    core: type[BaseModel] | None,
    definitions: Schema,
    *,
    default: str | None = None,
    any_name: bool = False,
) -> Schema:
    """Any of the plugins by name alone, or one of them with its options."""
    core_properties = _take(core, definitions)["properties"] if core else {}
    options: list[Schema] = [{"type": "string", "description": "A plugin by its name alone."}]
    for plugin in plugins:
        own = _take(plugin.component.config, definitions)
        named = [] if plugin.name == default else ["name"]
        name = {"const": plugin.name, "description": plugin.component.summary}
        options.append(
            {
                "type": "object",
                "title": plugin.name,
                "properties": {**core_properties, **own.get("properties", {}), "name": name},
                "required": [*named, *own.get("required", [])],
                "additionalProperties": False,
            }
        )
    if any_name:
        name = {"type": "string", "pattern": r"\.py:\w+$"}
        options.append(
            {"type": "object", "title": "FILE.py:FUNCTION", "properties": {"name": name}, "required": ["name"]}
        )
    return {"anyOf": options}


def _take(model: type[BaseModel], definitions: Schema) -> Schema:
    """The schema of `model`; its references are moved to `definitions` under unique names."""
    owner = (
        "" if model.__module__.startswith("rlhf_core.config.sections") else f"{model.__module__}.{model.__qualname__}."
    )
    schema = model.model_json_schema(ref_template=f"#/$defs/{owner}{{model}}")
    definitions.update({f"{owner}{name}": each for name, each in schema.pop("$defs", {}).items()})
    return schema
