"""Finds the errors of a JSON schema that would otherwise appear only when an answer meets them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jsonschema
from jsonschema_specifications import REGISTRY  # type: ignore[import-untyped]
from referencing import Registry, Specification
from referencing.exceptions import Unresolvable
from referencing.jsonschema import specification_with

_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_SAME_VALUE = ("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas", "dependencies")
"""Keywords whose schemas are applied to the value that their own schema is applied to."""
_PART_OF_VALUE = (
    *("properties", "patternProperties", "additionalProperties", "unevaluatedProperties", "propertyNames"),
    *("items", "prefixItems", "additionalItems", "unevaluatedItems", "contains"),
)
_NAMED = ("dependentSchemas", "dependencies", "properties", "patternProperties")


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
        _Walk(specification_with(kind.ID_OF(kind.META_SCHEMA))).visit_all(schema)
    except jsonschema.SchemaError as error:
        raise ValueError(f"the schema is no JSON schema: {error.message}") from error
    except RecursionError:
        raise ValueError("the schema is nested too deeply") from None
    return kind(schema, registry=Registry())  # an empty registry: nothing is fetched from outside


class _Walk:
    """Visits each schema that validation can reach once, and follows references as validation does."""

    def __init__(self, specification: Specification[Any]) -> None:
        self._specification = specification
        self._open: list[int] = []
        """Schemas being applied to one value, by id, outermost first."""
        self._visited: set[int] = set()
        self._waiting: list[tuple[Any, Any]] = []
        """Schemas of parts of the value, each with the resolver of the schema that contains it."""

    def visit_all(self, root: object) -> None:
        self._waiting = [(root, REGISTRY.resolver_with_root(self._specification.create_resource(root)))]
        while self._waiting:
            self._visit(*self._waiting.pop())

    def _visit(self, schema: Any, resolver: Any, reference: str = "") -> None:
        if id(schema) in self._open:
            raise ValueError(f"the schema's reference {reference!r} leads back to itself without end")
        if not isinstance(schema, Mapping) or id(schema) in self._visited:
            return
        self._visited.add(id(schema))
        self._open.append(id(schema))
        resolver = resolver.in_subresource(self._specification.create_resource(schema))
        for target, where, name in self._targets(schema, resolver):
            self._visit(target, where, name)
        for each in _inner(schema, _SAME_VALUE):
            self._visit(each, resolver, reference)
        self._waiting += [(each, resolver) for each in _inner(schema, _PART_OF_VALUE)]
        self._open.pop()

    def _targets(self, schema: Mapping[str, Any], resolver: Any) -> Iterator[tuple[Any, Any, str]]:
        for name in (schema[keyword] for keyword in _REFERENCES if keyword in schema):
            try:
                target = resolver.lookup(name)
            except Unresolvable:
                raise ValueError(f"the schema's reference {name!r} leads nowhere; none is fetched") from None
            yield target.contents, target.resolver, name


def _inner(schema: Mapping[str, Any], keywords: tuple[str, ...]) -> Iterator[Any]:
    for keyword in keywords:
        value = schema.get(keyword)
        if keyword in _NAMED and isinstance(value, Mapping):
            yield from value.values()
        else:
            yield from value if isinstance(value, list) else [value]
