"""The arguments of a tool: every parameter and the body of an operation in one object. Sends nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from toolspace.providers.openapi.bodies import Body
from toolspace.providers.openapi.document import Json
from toolspace.providers.openapi.parameters import PLACES, Parameter
from toolspace.providers.openapi.schemas import Refs, Schemas, with_definitions


class Inputs(msgspec.Struct, frozen=True, kw_only=True):
    """Which argument goes where."""

    parameters: tuple[tuple[str, Parameter], ...]
    """Each with the name of its argument."""
    body: Body | None
    body_argument: str | None
    """The argument that is the whole body; None where each field of the body is an argument."""
    schema: Json


def inputs_of(parameters: Iterable[Parameter], body: Body | None, schemas: Schemas) -> Inputs:
    """The arguments, and the schema that describes them. Raises `Broken`."""
    named = _named(parameters)
    properties: Json = {argument: parameter.schema for argument, parameter in named.items()}
    required = [argument for argument, parameter in named.items() if parameter.required]
    refs: Refs = {name: None for parameter in named.values() for name in parameter.refs}
    schema: Json = {"type": "object", "properties": properties, "additionalProperties": False}
    body_argument = None
    if body is not None:
        if body.fields is not None and properties.keys().isdisjoint(body.fields):
            properties.update(body.fields)
            refs |= body.field_refs
            if body.required:
                required += body.needed
            elif body.needed:
                # The body may be left out, but whoever gives a part of it gives all that it needs.
                schema["dependentRequired"] = {field: list(body.needed) for field in body.fields}
        else:
            body_argument = "body"
            while body_argument in properties:
                body_argument = f"request_{body_argument}"
            properties[body_argument] = body.schema
            refs |= body.refs
            if body.required:
                required.append(body_argument)
    if required:
        schema["required"] = required
    return Inputs(
        parameters=tuple(named.items()),
        body=body,
        body_argument=body_argument,
        schema=with_definitions(schema, schemas.definitions(refs)) if refs else schema,
    )


def _named(parameters: Iterable[Parameter]) -> dict[str, Parameter]:
    """Parameters by the names of their arguments: two of one name in different places have to differ."""
    given = list(parameters)
    names = [parameter.name for parameter in given]
    if len(set(names)) == len(names):
        return dict(zip(names, given, strict=True))
    named: dict[str, Parameter] = {}
    taken: set[Any] = set(names)
    for parameter in sorted(given, key=lambda one: PLACES.index(one.place)):
        argument = parameter.name
        if argument in named:
            argument = f"{argument}_{parameter.place}"
            while argument in taken:
                argument += "_"
            taken.add(argument)
        named[argument] = parameter
    return named
