"""As much of JSON Schema as moetor/bench/schema.json uses."""

import json
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

SCHEMA = json.loads((files("moetor.bench") / "schema.json").read_text(encoding="utf-8"))
TYPES = {"object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "boolean": bool}
KNOWN = {
    *("$schema", "$defs", "$ref", "title", "description", "type", "const", "enum", "minimum", "exclusiveMinimum"),
    *("required", "properties", "additionalProperties", "items"),
}


def problems(data: Any) -> list[str]:
    """What in it does not fit, each with its place; nothing if all does."""
    return list(_problems(data, SCHEMA, ""))


def _problems(data: Any, schema: Any, place: str) -> Iterator[str]:
    if "$ref" in schema:
        schema = SCHEMA["$defs"][schema["$ref"].removeprefix("#/$defs/")]
    assert schema.keys() <= KNOWN, schema.keys() - KNOWN
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(_is(data, kind) for kind in kinds):
        yield f"{place}: {data!r} is no {' or '.join(kinds)}"
        return
    if "const" in schema and data != schema["const"]:
        yield f"{place}: {data!r} is not {schema['const']!r}"
    if "enum" in schema and data not in schema["enum"]:
        yield f"{place}: {data!r} is none of {schema['enum']}"
    if "minimum" in schema and data < schema["minimum"]:
        yield f"{place}: {data!r} is less than {schema['minimum']}"
    if "exclusiveMinimum" in schema and data <= schema["exclusiveMinimum"]:
        yield f"{place}: {data!r} is not more than {schema['exclusiveMinimum']}"
    if isinstance(data, list):
        for i, item in enumerate(data):
            yield from _problems(item, schema["items"], f"{place}/{i}".lstrip("/"))
    if isinstance(data, dict):
        yield from _of_object(data, schema, place)


def _of_object(data: dict[str, Any], schema: Any, place: str) -> Iterator[str]:
    yield from (f"{place}: lacks {key}" for key in schema.get("required", ()) if key not in data)
    known, more = schema.get("properties", {}), schema.get("additionalProperties", {})
    for key, value in data.items():
        if key not in known and more is False:
            yield f"{place}: does not know {key}"
        else:
            yield from _problems(value, known.get(key, more), f"{place}/{key}".lstrip("/"))


def _is(data: Any, kind: str) -> bool:
    if kind == "null" or data is None:
        return data is None and kind == "null"
    return isinstance(data, TYPES[kind]) and (kind == "boolean" or not isinstance(data, bool))
