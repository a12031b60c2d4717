"""Every output that an accepted schema allows is valid according to jsonschema and Python's `re`."""

from __future__ import annotations

import json
import math
import random
import time
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from areal_agents.core.completion import Grammar
from areal_agents.core.schemas import unenforced
from areal_agents.errors import RequestError
from areal_agents.inference.embedded.scheduling import grammar as grammar_limits
from areal_agents.inference.embedded.scheduling.grammar import Grammars, TokenMatcher

EOS = 0
CHARACTERS = [*map(chr, range(32, 127)), "\n", "\t", "é", "日", "\u00a0"]
VOCABULARY = {"</s>": EOS, **{char: number for number, char in enumerate(CHARACTERS, 1)}}
LONGEST = 300
ENDS = [VOCABULARY[char] for char in '"}]']
INTEGER, BOOLEAN = {"type": "integer"}, {"type": "boolean"}


def a_tokenizer() -> Tokenizer:
    """Return a tokenizer with one token for each character."""
    model = {"type": "WordLevel", "vocab": VOCABULARY, "unk_token": "</s>"}
    return Tokenizer.from_str(json.dumps({"version": "1.0", "model": model}))


GRAMMARS = Grammars(a_tokenizer(), len(VOCABULARY), (EOS,))


def matcher_of(schema: Any) -> TokenMatcher:
    return GRAMMARS.matcher(Grammar("json_schema", json.dumps(schema)), ())


def output(schema: Any, seed: int) -> str | None:
    """Return a random output that the schema allows, or None if it does not end."""
    draw = random.Random(seed)
    matcher = matcher_of(schema)
    text = ""
    while len(text) < LONGEST:
        allowed = np.flatnonzero(matcher.allowed()).tolist()
        if not allowed:
            return None
        ends = [token for token in (EOS, *ENDS) if token in allowed]
        token = ends[0] if ends and draw.random() < len(text) / 60 else draw.choice(allowed)
        matcher.accept(token)
        if matcher.ended:
            return text
        text += CHARACTERS[token - 1]
    return None


def takes(schema: Any, text: str) -> bool:
    """Return whether the text is a possible output."""
    matcher = matcher_of(schema)
    for char in text:
        matcher.accept(VOCABULARY[char])
        if matcher.stuck:
            return False
    return bool(matcher.allowed()[EOS])


def fits(schema: Any, text: str) -> bool:
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return jsonschema.Draft202012Validator(schema).is_valid(value)


names = st.sampled_from(["a", "b", "xa", "k"])
small = st.integers(0, 3)
values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-20, 20),
    st.sampled_from([0.5, 1.0, "a", "b", 'q"', "é", [1], {"a": 1}]),
)
numbers = st.one_of(st.integers(-30, 30), st.floats(-30, 30).map(lambda number: round(number, 3)))
patterns = st.sampled_from(
    [
        "^a+$",
        "b",
        "^x[ab]?$",
        r"^\d{2}-\w$",
        "^a|b$",
        "^[^a]$",
        "^.{2}$",
        r"^[\]\[!-~]$",
        r"\u00e9|\/",
        "(?:ab){1,2}",
    ]
    + ["^(?=a).$", 'a"', r"^\S$", "a$b", r"\bfoo"]
)


def _schemas(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return schemas with every keyword in various combinations, many of which are refused."""
    keywords: dict[str, st.SearchStrategy[Any]] = {
        "type": st.one_of(
            st.sampled_from(["object", "array", "string", "integer", "number", "boolean", "null"]),
            st.lists(st.sampled_from(["object", "array", "string", "integer", "null"]), max_size=2),
        ),
        "enum": st.lists(values, max_size=3),
        "const": values,
        "properties": st.dictionaries(names, inner, max_size=3),
        "required": st.lists(names, max_size=2),
        "additionalProperties": st.one_of(st.booleans(), inner),
        "unevaluatedProperties": st.one_of(st.booleans(), inner),
        "patternProperties": st.dictionaries(patterns, inner, max_size=2),
        "propertyNames": inner,
        "minProperties": small,
        "maxProperties": small,
        "items": st.one_of(st.booleans(), inner),
        "prefixItems": st.lists(inner, max_size=2),
        "unevaluatedItems": st.one_of(st.booleans(), inner),
        "minItems": small,
        "maxItems": small,
        "uniqueItems": st.booleans(),
        "contains": inner,
        "minLength": small,
        "maxLength": small,
        "pattern": patterns,
        "format": st.sampled_from(["date", "ipv4", "uuid", "json-pointer", "regex"]),
        "minimum": numbers,
        "maximum": numbers,
        "exclusiveMinimum": numbers,
        "exclusiveMaximum": numbers,
        "multipleOf": st.integers(1, 3),
        "anyOf": st.lists(inner, max_size=3),
        "oneOf": st.lists(inner, max_size=3),
        "allOf": st.lists(inner, max_size=2),
        "not": inner,
        "$ref": st.sampled_from(["#", "#/$defs/x", "#/$defs/y", "#x", "https://a.example/b", "x.json"]),
        "title": st.just("t"),
    }
    groups = [
        ("type", "title"),
        ("type", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
        ("type", "minLength", "maxLength", "pattern", "format"),
        (
            "type",
            "items",
            "prefixItems",
            "unevaluatedItems",
            "minItems",
            "maxItems",
            "uniqueItems",
            "contains",
        ),
        ("type", "properties", "required", "additionalProperties", "minProperties", "maxProperties"),
        ("type", "patternProperties", "propertyNames", "unevaluatedProperties", "properties"),
        ("type", "enum", "const", "minimum", "pattern"),
        ("type", "anyOf", "oneOf", "allOf", "not", "$ref", "properties"),
    ]
    fixed = {1: "number", 2: "string", 3: "array", 4: "object", 5: "object"}

    @st.composite
    def one(draw: st.DrawFn) -> Any:
        group = draw(st.integers(0, len(groups) - 1))
        chosen = draw(st.sets(st.sampled_from(groups[group]), min_size=1, max_size=3))
        schema = {keyword: draw(keywords[keyword]) for keyword in sorted(chosen)}
        if group in fixed and draw(st.integers(0, 5)):
            schema["type"] = fixed[group]
        return schema

    return one()


schemas = st.recursive(
    st.sampled_from([INTEGER, BOOLEAN, {"type": "string"}, {}, True]), _schemas, max_leaves=6
)
roots = st.builds(
    lambda schema, x: {**schema, "$defs": {"x": x}},
    _schemas(schemas),
    schemas,
)


@settings(max_examples=400)
@given(roots, st.lists(values.map(json.dumps), max_size=3), st.integers(0, 10**6))
def test_every_possible_output_fits_its_schema(schema: Any, texts: list[str], seed: int) -> None:
    assume(unenforced(schema) is None)
    try:
        matcher_of(schema)
    except RequestError:  # no output is valid, or the compiler refuses a bound
        return
    for text in [*(output(schema, seed + number) for number in range(3)), *texts]:
        if text is not None and all(char in VOCABULARY for char in text) and takes(schema, text):
            assert fits(schema, text), text


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "object", "properties": {"a": INTEGER}, "additionalProperties": True}, '{"\\u0061":true}'),
        ({"type": "object", "properties": {"a": INTEGER}, "required": ["b"]}, "{}"),
        ({"type": "object", "patternProperties": {"^x": INTEGER, "^xy": BOOLEAN}}, '{"xy":true,"x":1}'),
        ({"type": "object", "patternProperties": {"^x": INTEGER}, "minProperties": 2}, '{"x":1,"x":2}'),
        ({"type": "object", "properties": {"zz": INTEGER}, "propertyNames": {"maxLength": 1}}, '{"zz":1}'),
        ({"minLength": 2}, '"a"'),
        ({"type": []}, "1"),
        ({"type": "string", "enum": ["a", 1]}, "1"),
        ({"enum": [5], "minimum": 6}, "5"),
        ({"oneOf": [INTEGER, {"type": "number"}]}, "1"),
        ({"type": "string", "anyOf": [INTEGER, {"type": "string"}]}, "1"),
        ({"type": "string", "$ref": "#/$defs/x", "$defs": {"x": INTEGER}}, "1"),
        ({"$ref": "https://a.example/b"}, "1"),
        ({"$ref": "b.json#/x"}, "1"),
        ({"$ref": "#x", "$defs": {"x": {"$anchor": "x", **INTEGER}}}, '"a"'),
        ({"type": "string", "pattern": "^(?!b)[bc]$"}, '"b"'),
        ({"type": "string", "pattern": "^(?=.*a)b+$"}, '"b"'),
        ({"type": "string", "pattern": '^a"b$'}, '"a"b"'),
        ({"type": "string", "pattern": "^a$b$"}, '"ab"'),
        ({"type": "string", "pattern": r"^\S$"}, '"\u00a0"'),
        ({"type": "string", "format": "json-pointer"}, '"/\\"'),
        ({"properties": {"propertyNames": {"maxLength": 1}}}, '{"propertyNames":"ab"}'),
        ({"$ref": "#/x/y", "x": {"y": {"multipleOf": 2}}}, "3"),
    ],
)
def test_a_schema_that_the_grammar_would_not_enforce_is_refused(schema: dict[str, Any], text: str) -> None:
    """Before these schemas were refused, they led to outputs such as `text`."""
    with pytest.raises(RequestError, match="^json_schema cannot be compiled: ") as refused:
        matcher_of(schema)
    assert " supported" in refused.value.message or "properties does not have" in refused.value.message
    assert refused.value.status == 400


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"oneOf": [INTEGER, {"type": "string", "maxLength": 1}]}, ["1", '"a"'], ['"ab"', "null"]),
        (
            {
                "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
                "$defs": {
                    name: {"type": "object", "properties": {"kind": {"const": name}}, "required": ["kind"]}
                    for name in ("cat", "dog")
                },
            },
            ['{"kind":"cat"}', '{"kind":"dog"}'],
            ['{"kind":"cow"}', "{}"],
        ),
        ({"type": "number", "anyOf": [INTEGER, {"type": "number"}]}, ["1", "1.5"], ['"a"']),
        ({"type": ["string", "null"], "enum": ["a", None]}, ['"a"', "null"], ['"b"']),
        ({"type": "object", "propertyNames": {"maxLength": 1}}, ['{"a":1}', "{}"], ['{"ab":1}']),
        ({"type": "array", "items": INTEGER, "uniqueItems": False}, ["[1,1]"], ["[true]"]),
        ({"type": "string", "pattern": "^(?:ab){2}|c$"}, ['"abab"', '"c"'], ['"ab"']),
    ],
)
def test_a_supported_schema_is_enforced(schema: dict[str, Any], good: list[str], bad: list[str]) -> None:
    assert [text for text in (*good, *bad) if takes(schema, text)] == good
    assert [text for text in (*good, *bad) if fits(schema, text)] == good


def nested(depth: int) -> dict[str, Any]:
    return INTEGER if not depth else {"type": "array", "items": nested(depth - 1)}


def branching(depth: int) -> dict[str, Any]:
    """Return a schema with two references from each level to the next, thus 2^depth paths."""
    levels = {str(level): {"anyOf": [{"$ref": f"#/$defs/{level + 1}"}] * 2} for level in range(depth)}
    same = {"$ref": "#/$defs/0"}
    return {"oneOf": [same, same], "$defs": {**levels, str(depth): INTEGER}}


@pytest.mark.parametrize(
    ("grammar", "limit"),
    [
        (Grammar("json_schema", json.dumps({"enum": list(range(50_000))})), "at most"),
        (Grammar("json_schema", json.dumps({"enum": list(range(5_001))})), "5001 values, at most 5000"),
        (Grammar("json_schema", json.dumps(nested(200))), "nested more than 128"),
        (Grammar("json_schema", '{"const":' + "[" * 50_000 + "]" * 50_000 + "}"), "nested more than 128"),
        (
            Grammar("json_schema", '{"type":"string","maxLength":1000000}'),
            "maxLength is 1000000, at most 10000",
        ),
        (Grammar("json_schema", '{"type":"array","items":{},"minItems":1e9}'), "minItems is"),
        (Grammar("json_schema", json.dumps({"anyOf": [INTEGER] * 5_001})), "5001 properties and branches"),
        (Grammar("json_schema", json.dumps({"title": "x" * 300_000})), "characters, at most 262144"),
        (Grammar("json_schema", json.dumps({"type": "string", "pattern": "(" * 50_000})), "2000 groups"),
        (
            Grammar("json_schema", json.dumps({"type": "string", "pattern": "a{9999}"})),
            "repetition count above 1000",
        ),
        (Grammar("json_schema", json.dumps(branching(40))), "oneOf"),
        (Grammar("json_schema", json.dumps({"oneOf": [{"const": n} for n in range(65)]})), "64 branches"),
        (Grammar("regex", "(" * 50_000 + "a" + ")" * 50_000), "2000 groups"),
        (Grammar("regex", "(?=b)a"), "a lookahead"),
        (Grammar("ebnf", "root ::= " + "(" * 50_000 + '"a"' + ")" * 50_000), "2000 groups"),
        (
            Grammar(
                "structural_tag",
                json.dumps({"type": "structural_tag", "format": {"type": "regex", "pattern": "(?!a)b"}}),
            ),
            "a lookahead",
        ),
        (
            Grammar(
                "structural_tag",
                json.dumps(
                    {
                        "type": "structural_tag",
                        "format": {"type": "json_schema", "json_schema": {"enum": list(range(5_001))}},
                    }
                ),
            ),
            "5001 values",
        ),
    ],
)
def test_a_grammar_that_would_become_too_large_is_refused_at_once(grammar: Grammar, limit: str) -> None:
    GRAMMARS.matcher(Grammar("regex", "a"), ())  # so that the vocabulary has been read
    began = time.process_time()
    with pytest.raises(RequestError, match=limit) as refused:
        GRAMMARS.matcher(grammar, ())
    assert refused.value.status == 400
    assert time.process_time() - began < 5


def test_schemas_at_the_limits_are_accepted() -> None:
    for schema in ({"enum": list(range(5_000))}, nested(60), {"type": "string", "maxLength": 10_000}):
        assert matcher_of(schema).allowed().any()


def test_a_grammar_whose_compiled_form_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_limits, "MOST_COMPILED_BYTES", 1)
    with pytest.raises(RequestError, match="bytes compiled, at most 1 are supported"):
        matcher_of({"type": "object", "properties": {"compiled": BOOLEAN}})


def test_bounds_of_numbers_are_enforced() -> None:
    schema = {"type": "number", "minimum": 0.125, "exclusiveMaximum": 2}
    for text in ("0.125", "0.124", "1.9999", "2", "2.0", "1e9", "0.2e1"):
        assert not takes(schema, text) or (fits(schema, text) and math.isfinite(float(text)))
    assert takes(schema, "0.125") and takes(schema, "1.5")
