"""Finds the errors of a JSON schema that would otherwise appear only when an answer meets them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import jsonschema
from jsonschema_specifications import REGISTRY  # type: ignore[import-untyped]
from referencing import Registry, Specification
from referencing.exceptions import Unresolvable
from referencing.jsonschema import specification_with

from .processor_time import TimeUp, within

_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")


def make_validator(schema: object) -> Any:
    """The jsonschema validator of a schema; remote references are not fetched.

    Raises:
        ValueError: it is not a schema, or its references cannot be resolved or lead back to where they began, so that
            no value could ever be checked.
    """
    if not isinstance(schema, Mapping | bool):
        raise ValueError(f"the schema is no JSON schema: it is of type {type(schema).__name__}")
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema)
        _check_references(schema, specification_with(kind.ID_OF(kind.META_SCHEMA)))
    except jsonschema.SchemaError as error:
        raise ValueError(f"the schema is no JSON schema: {error.message}") from error
    except RecursionError:
        raise ValueError("the schema is nested too deeply") from None
    validator = kind(schema, registry=Registry())  # an empty registry: nothing is fetched from outside
    try:
        with suppress(TimeUp):  # references that branch on and on: its answers will be said to be slow
            within(1.0, lambda: list(validator.iter_errors([None])))
    except RecursionError:
        raise ValueError("the schema has a reference that leads back to itself without end") from None
    return validator


def _check_references(schema: object, specification: Specification[Any]) -> None:
    """Look up the references of each schema that a schema holds or refers to."""
    visited: set[int] = set()
    waiting = [(schema, REGISTRY.resolver_with_root(specification.create_resource(schema)))]
    while waiting:
        schema, resolver = waiting.pop()
        if not isinstance(schema, Mapping) or id(schema) in visited:
            continue
        visited.add(id(schema))
        resource = specification.create_resource(schema)
        resolver = resolver.in_subresource(resource)
        for name in (schema[keyword] for keyword in _REFERENCES if keyword in schema):
            try:
                target = resolver.lookup(name)
            except Unresolvable:
                raise ValueError(f"the schema's reference {name!r} leads nowhere; none is fetched") from None
            waiting.append((target.contents, target.resolver))
        waiting += [(each.contents, resolver) for each in resource.subresources()]
