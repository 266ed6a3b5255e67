"""The JSON schema of run files: a pydantic model of core's sections and the options of every installed plugin."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any, Literal, Union, get_args

from pydantic import BaseModel, Field, create_model

from rlhf_core.config.load import PLUGIN_SECTIONS
from rlhf_core.config.sections import EvalConfig, EvalSetOptions, HooksConfig, LoggingConfig, RunConfig, Section
from rlhf_core.config.select import DEFAULT_PLUGINS, mixed, shared_options
from rlhf_core.errors import PluginError
from rlhf_core.plugins.discovery import check_clash, discover
from rlhf_core.plugins.functions import PLAIN
from rlhf_core.plugins.selected import SelectedPlugin, has_options, load_ref

_FILE_PATTERN = r"\.py:\w+$"


class _FromFile(BaseModel, title="FILE.py:FUNCTION"):
    name: str = Field(pattern=_FILE_PATTERN)


class _Hooks(HooksConfig, json_schema_extra={"patternProperties": {_FILE_PATTERN: {"type": ["object", "boolean"]}}}):
    pass


def run_schema(distributions: Collection[str] | None = None) -> tuple[dict[str, Any], list[PluginError]]:
    """Return the schema (JSON Schema 2020-12), and the errors of plugins that it omits.

    distributions: those whose plugins the schema includes. None includes every installed plugin.
    """
    errors: dict[str, PluginError] = {}

    def installed(kind: str) -> list[SelectedPlugin]:
        plugins: list[SelectedPlugin] = []
        for ref in discover(kind).values():
            if distributions is not None and ref.distribution not in distributions:
                continue
            try:
                check_clash(ref)
                if has_options(ref):
                    plugins.append(load_ref(ref))
            except PluginError as error:
                errors[ref.label] = PluginError(error.message, where=error.where or ref.label)
        return plugins

    def named(kind: str, default: str | None = None, shared: type[Section] | None = None, **fields: Any) -> Any:
        """Return the type of a plugin: its name alone, or a mapping with its options and the `shared` ones."""
        others = shared or shared_options(kind) or Section
        models = [_with_name(each, others, default, dict(fields)) for each in installed(kind)]
        return _union(str, *models, *([_FromFile] if kind in PLAIN else []))

    def with_nested(path: str, kind: Any) -> Any:
        """Add the plugin sections nested in the section `path` to its type."""
        places = [(each, each.name.rpartition(".")) for each in installed("sections")]
        inside = {last: _optional(section(each)) for each, (place, _, last) in places if place == path}
        return _extended(kind, inside) if inside else kind

    def section(plugin: SelectedPlugin) -> Any:
        config: Any = plugin.component.config
        if config.selects:
            return with_nested(plugin.name, named(config.selects, shared=config))
        if config.short_option:
            field = config.model_fields[config.short_option]
            return _union(with_nested(plugin.name, config), Annotated[field.annotation, *field.metadata])
        return with_nested(plugin.name, config) | bool

    schedule = named("schedules", default="constant")
    rewards, prompts = list[named("rewards")], named("prompts")  # type: ignore[misc]
    a_set = create_model("EvalSet", __base__=EvalSetOptions, prompts=(prompts, ...), rewards=_optional(rewards))
    sections: dict[str, Any] = {key: field.annotation for key, field in RunConfig.model_fields.items()}
    for key, kind in PLUGIN_SECTIONS.items():
        own: dict[str, Any] = {"schedule": _optional(schedule)} if key == "optimizer" else {}
        sections[key] = named(kind, DEFAULT_PLUGINS.get(key), **own)
    sections["rewards"] = Annotated[rewards, Field(description="The score of an answer is the weighted sum of these.")]
    sections["hooks"] = _extended(_Hooks, {each.name: _switch(each) for each in installed("hooks")})
    sections["logging"] = _extended(LoggingConfig, {each.name: _switch(each) for each in installed("loggers")})
    sections["eval"] = (
        _extended(EvalConfig, {"prompts": _optional(prompts), "sets": _optional(dict[str, a_set])}) | None
    )
    fields = {key: (with_nested(key, kind), Field(... if key == "model" else None)) for key, kind in sections.items()}
    # Without the base `Section`, since a section of a plugin may have the name of one of its methods.
    options: dict[str, Any] = {"__config__": RunConfig.model_config, "__doc__": RunConfig.__doc__, **fields}
    whole: Any = create_model("RunConfig", **options)
    document = with_nested("", whole).model_json_schema()
    document |= {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "rlhf run file"}
    return document, list(errors.values())


def _union(*kinds: Any) -> Any:
    return Union[kinds]  # noqa: UP007 - of a tuple


def _optional(kind: Any) -> tuple[Any, None]:
    """Return the type and default of a field that may be absent."""
    return kind | None, None


def _switch(plugin: SelectedPlugin) -> tuple[Any, Any]:
    """Return the field of a plugin that a section lists: its options, true or false."""
    return _union(plugin.component.config, bool), Field(False, description=plugin.component.summary)


def _with_name(
    plugin: SelectedPlugin, others: type[Section], default: str | None, fields: dict[str, Any]
) -> type[BaseModel]:
    text = plugin.component.summary
    name = Field(plugin.name, description=text) if plugin.name == default else Field(description=text)
    fields["name"] = (Literal[plugin.name], name)
    return create_model(plugin.name, __base__=mixed(plugin.component.config, others), **fields)


def _extended(kind: Any, fields: dict[str, Any]) -> Any:
    """Add fields to a model, or to each model of a union."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return create_model(kind.__name__, __base__=kind, __doc__=kind.__doc__, **fields)
    parts = get_args(kind)
    return _union(*(_extended(each, fields) for each in parts)) if parts else kind
