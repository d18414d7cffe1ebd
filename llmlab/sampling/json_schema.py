"""Which JSON schemas the grammar compiler enforces in full; the others are refused rather than half obeyed.

xgrammar accepts some keywords, and some combinations, without enforcing them, and writes a pattern's quote unescaped into the
JSON string. The rules below were found by trying, and the tests hold outputs of every accepted kind to an independent
validator. Keywords that constrain nothing (title, description, unknown ones) are fine everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

_STRING = ("minLength", "maxLength", "pattern", "format")
_RANGE = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_ARRAY = ("items", "prefixItems", "minItems", "maxItems", "unevaluatedItems")
_OBJECT = (
    "properties required additionalProperties minProperties maxProperties patternProperties propertyNames "
    "unevaluatedProperties"
).split()
_OF_TYPE: dict[str, tuple[str, ...]] = {
    "string": _STRING,
    "integer": (*_RANGE, "multipleOf"),
    "number": _RANGE,
    "array": _ARRAY,
    "object": tuple(_OBJECT),
    "boolean": (),
    "null": (),
}
_ALONE = ("$ref", "anyOf", "oneOf", "allOf", "const", "enum")
_NEVER = (
    "not if then else uniqueItems contains minContains maxContains dependentRequired dependentSchemas dependencies "
    "additionalItems contentEncoding contentMediaType contentSchema $dynamicRef $recursiveRef"
).split()
_CONSTRAINING = {*_ALONE, *_NEVER, "type", *(k for keywords in _OF_TYPE.values() for k in keywords)}
_FORMATS = (
    "email date time date-time duration ipv4 ipv6 hostname uuid uri uri-reference uri-template json-pointer "
    "relative-json-pointer"
).split()
_IN_JSON_STRINGS = re.compile(r'"|\\[^dDwWsS.^$*+?()\[\]{}|/\-]|[\x00-\x1f]')
_PYTHON_TYPES = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "array": list,
    "object": dict,
    "boolean": bool,
    "null": type(None),
}


def check_schema(schema: Any, where: str = "#") -> None:
    """Raise ValueError, naming the place and the keyword, if an output could break the schema or be no JSON."""
    if schema is True:
        return
    if not isinstance(schema, dict):
        raise _refusal(where, f"must be an object or true, got {schema!r}")
    keywords = [k for k in schema if k in _CONSTRAINING and not (k == "uniqueItems" and schema[k] is False)]
    for keyword in keywords:
        if keyword in _NEVER:
            raise _refusal(where, f"{keyword!r} can't be enforced")
    for name in ("$defs", "definitions"):
        for key, value in _members(schema, name, where):
            check_schema(value, f"{where}/{name}/{key}")
    alone = [k for k in keywords if k in _ALONE]
    if alone:
        _check_alone(schema, alone[0], [k for k in keywords if k != alone[0]], where)
    else:
        _check_typed(schema, keywords, where)


def _check_alone(schema: dict[str, Any], keyword: str, others: list[str], where: str) -> None:
    if keyword in ("const", "enum"):
        values = [schema["const"]] if keyword == "const" else schema["enum"]
        if not isinstance(values, list) or not values:
            raise _refusal(where, f"'enum' must be a list of values, got {values!r}")
        if others == ["type"]:
            others = [] if all(_is_of_type(v, schema["type"]) for v in values) else others
    if others:
        raise _refusal(where, f"{others[0]!r} beside {keyword!r} can't be enforced")
    if keyword in ("anyOf", "oneOf", "allOf"):
        branches = schema[keyword]
        if not isinstance(branches, list) or not branches:
            raise _refusal(where, f"{keyword!r} must be a list of schemas, got {branches!r}")
        if keyword == "allOf" and len(branches) > 1:
            raise _refusal(where, "'allOf' with more than one schema can't be enforced")
        if keyword == "oneOf" and len(branches) > 1:
            types = [b.get("type") if isinstance(b, dict) else None for b in branches]
            if None in types or not all(isinstance(t, str) for t in types) or not _disjoint(types):
                raise _refusal(
                    where, "'oneOf' can't be enforced unless its schemas are of different types; try 'anyOf'"
                )
        for i, branch in enumerate(branches):
            check_schema(branch, f"{where}/{keyword}/{i}")


def _check_typed(schema: dict[str, Any], keywords: list[str], where: str) -> None:
    types = schema.get("type")
    if types is None:  # the compiler infers these two, and no others
        types = "object" if "properties" in schema else "array" if "items" in schema or "prefixItems" in schema else []
    types = [types] if isinstance(types, str) else types
    if not isinstance(types, list) or not all(isinstance(t, str) and t in _OF_TYPE for t in types):
        raise _refusal(where, f"'type' must be among {', '.join(_OF_TYPE)}, got {schema.get('type')!r}")
    for keyword in keywords:
        if keyword != "type" and not any(keyword in _OF_TYPE[t] for t in types):
            raise _refusal(where, f"{keyword!r} can't be enforced for type {schema.get('type')!r}")
    if "string" in types:
        _check_string(schema, where)
    if "multipleOf" in schema and ("number" in types or any(k in schema for k in _RANGE)):
        raise _refusal(where, "'multipleOf' can't be enforced for numbers, nor beside a range")
    if "array" in types:
        for name in ("items", "unevaluatedItems"):
            if schema.get(name) not in (None, False):
                check_schema(schema[name], f"{where}/{name}")
        for i, value in enumerate(schema.get("prefixItems", ())):
            check_schema(value, f"{where}/prefixItems/{i}")
    if "object" in types:
        _check_object(schema, where)


def _check_string(schema: dict[str, Any], where: str) -> None:
    kinds = [k for k in ("pattern", "format") if k in schema]
    if len(kinds) > 1 or (kinds and ("minLength" in schema or "maxLength" in schema)):
        raise _refusal(where, "only one of a pattern, a format and lengths can be enforced")
    if "format" in schema and schema["format"] not in _FORMATS:
        raise _refusal(where, f"format {schema['format']!r} can't be enforced; known are {', '.join(_FORMATS)}")
    _check_pattern(schema.get("pattern", ""), where)


def _check_object(schema: dict[str, Any], where: str) -> None:
    properties = dict(_members(schema, "properties", where))
    missing = [name for name in schema.get("required", ()) if name not in properties]
    if missing:
        raise _refusal(where, f"required {missing[0]!r} can't be enforced, as 'properties' does not have it")
    if properties and ("patternProperties" in schema or "propertyNames" in schema):
        raise _refusal(where, "patternProperties and propertyNames can't be enforced beside 'properties'")
    for name, value in properties.items():
        check_schema(value, f"{where}/properties/{name}")
    for pattern, value in _members(schema, "patternProperties", where):
        _check_pattern(pattern, where)
        check_schema(value, f"{where}/patternProperties/{pattern}")
    for name in ("additionalProperties", "unevaluatedProperties", "propertyNames"):
        if schema.get(name) not in (None, False):
            check_schema(schema[name], f"{where}/{name}")


def _check_pattern(pattern: Any, where: str) -> None:
    if not isinstance(pattern, str):
        raise _refusal(where, f"a pattern must be a string, got {pattern!r}")
    if found := _IN_JSON_STRINGS.search(pattern):
        raise _refusal(where, f"pattern {pattern!r} may match what a JSON string must escape ({found[0]!r})")


def _members(schema: dict[str, Any], name: str, where: str) -> Iterable[tuple[str, Any]]:
    members = schema.get(name, {})
    if not isinstance(members, dict):
        raise _refusal(where, f"{name!r} must be an object, got {members!r}")
    return members.items()


def _is_of_type(value: Any, types: Any) -> bool:
    names = [types] if isinstance(types, str) else types
    return any(
        isinstance(value, _PYTHON_TYPES[name]) and (name == "boolean" or not isinstance(value, bool))
        for name in names
        if name in _PYTHON_TYPES
    )


def _disjoint(types: list[str]) -> bool:
    broad = ["number" if t == "integer" else t for t in types]
    return len(set(broad)) == len(broad)


def _refusal(where: str, what: str) -> ValueError:
    return ValueError(f"structured_outputs.json at {where}: {what}")
