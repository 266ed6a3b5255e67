"""Finds errors of a JSON schema that would otherwise appear only when certain answers are checked."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import jsonschema
from jsonschema_specifications import REGISTRY  # type: ignore[import-untyped]
from referencing import Registry, Specification
from referencing.exceptions import Unresolvable
from referencing.jsonschema import specification_with

_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_SAME_VALUE = ("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas", "dependencies")
"""Keywords whose schemas are applied to the same value as the schema that contains them."""
_DEFINITIONS = ("$defs", "definitions")
"""Keywords whose schemas are applied only through references."""


def make_validator(schema: object) -> Any:
    """Return the jsonschema validator of a schema. Remote references are not fetched.

    Raises:
        ValueError: if it is not a schema, or its references cannot be resolved or form an endless cycle, so that values
            cannot be checked.
    """
    if not isinstance(schema, Mapping | bool):
        raise ValueError(f"the schema is not a JSON schema: it is of type {type(schema).__name__}")
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema)
        _follow_references(schema, specification_with(kind.ID_OF(kind.META_SCHEMA)))
    except jsonschema.SchemaError as error:
        raise ValueError(f"the schema is not a JSON schema: {error.message}") from error
    except RecursionError:
        raise ValueError("the schema is nested too deeply") from None
    return kind(schema, registry=Registry())  # an empty registry, so that nothing is fetched


def _follow_references(root: object, specification: Specification[Any]) -> None:
    """Visit each schema once: those applied to a value before those applied to parts of the value.

    Raises `ValueError` for a reference that cannot be resolved or leads back to a schema applied to the same value.
    """
    resource = specification.create_resource
    visited: set[int] = set()
    at_root: tuple[Any, Any, str, frozenset[int]] = (root, REGISTRY.resolver_with_root(resource(root)), "", frozenset())
    waiting = deque([at_root])
    while waiting:
        schema, resolver, reference, applied = waiting.pop()
        if id(schema) in applied:
            raise ValueError(f"the schema's reference {reference!r} leads back to itself")
        if not isinstance(schema, Mapping) or id(schema) in visited:
            continue
        visited.add(id(schema))
        applied |= {id(schema)}
        resolver = resolver.in_subresource(resource(schema))
        same_value = {key: schema[key] for key in schema if key in _SAME_VALUE}
        of_parts = {key: schema[key] for key in schema if key not in (*_SAME_VALUE, *_DEFINITIONS)}
        waiting.extendleft((each.contents, resolver, "", frozenset()) for each in resource(of_parts).subresources())
        waiting.extend((each.contents, resolver, reference, applied) for each in resource(same_value).subresources())
        for name in (schema[keyword] for keyword in _REFERENCES if keyword in schema):
            try:
                target = resolver.lookup(name)
            except Unresolvable:
                raise ValueError(f"the schema's reference {name!r} cannot be resolved (none is fetched)") from None
            waiting.append((target.contents, target.resolver, name, applied))
