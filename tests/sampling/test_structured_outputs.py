"""Structured output: whatever the logits, what comes out is in the language, and ends there."""

from __future__ import annotations

import ast
import builtins
import json
import re
from types import SimpleNamespace

import pytest
import torch

from llmlab.sampling.params import SamplingParams, StructuredOutputsParams
from llmlab.sampling.sampler import Sampler

xgrammar = pytest.importorskip("xgrammar", reason="the optional package xgrammar is not installed")
jsonschema = pytest.importorskip("jsonschema")

PIECES = ("true", "false", "null", '{"', '":', "positive", "neg", " ", "  ", '", "', "ab", "}}", "日", "12", '"a"')
NEWLINE = ord("\n")


@pytest.fixture(scope="module")
def tokenizer(request):
    from llmlab import bpe
    from llmlab.pretokenize import LLAMA3_PATTERN, PreTokenizer
    from llmlab.tokenizer import Tokenizer

    vocab = {bytes([i]): i for i in range(256)}
    for piece in PIECES:
        vocab.setdefault(piece.encode(), len(vocab))
    added = [bpe.AddedToken(len(vocab) + i, text) for i, text in enumerate(("<eos>", "<eot>"))]
    return Tokenizer.load(bpe.Tokenizer(vocab, {}, PreTokenizer.from_pattern(LLAMA3_PATTERN), added_tokens=added))


@pytest.fixture(scope="module")
def sampler(tokenizer) -> Sampler:
    """Two EOS ids, and a vocabulary padded past the tokenizer's."""
    eos = {tokenizer.vocab_size - 2, tokenizer.vocab_size - 1}
    return Sampler(tokenizer.vocab_size + 7, eos, tokenizer, seed=0)


def complete(
    kit, sampler: Sampler, structured: StructuredOutputsParams, seed: int, limit: int = 400, **params
) -> str | None:
    """The text of one output under random logits, None if it did not end within the limit. Other requests run beside it."""
    request = kit.request(sampler, structured_outputs=structured, seed=seed, max_tokens=None, **params)
    others = [kit.request(sampler, seed=1, max_tokens=None), kit.request(sampler, temperature=0, max_tokens=None)]
    generator = torch.Generator().manual_seed(seed)
    for step in range(limit):
        batch = [others[0], request, others[1]] if step % 2 else [request, others[1]]
        logits = torch.randn(len(batch), sampler.vocab_size, generator=generator) * 2
        logits[:, sampler.eos_token_ids] += 3.0  # so that outputs end
        logits[:, ord('"')] += 2.0
        out = sampler(logits, batch)
        assert not out.errors
        for one, token_id in zip(batch, out.token_ids, strict=True):
            one.append_output_token_id(token_id)
        if request.output_token_ids[-1] in sampler.eos_token_ids:
            return sampler.tokenizer.decode(request.output_token_ids)
    return None


SCHEMAS = [
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["a", "b"]},
    {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", 3, None]}}, "minProperties": 1},
    {"type": "array", "items": {"type": "number", "minimum": -2.5, "exclusiveMaximum": 7}, "minItems": 2, "maxItems": 4},
    {"type": "array", "prefixItems": [{"type": "null"}, {"type": "boolean"}], "items": False},
    {"type": "integer", "minimum": -13, "maximum": 200},
    {"type": "integer", "multipleOf": 7},
    {"type": "string", "minLength": 2, "maxLength": 4},
    {"type": "string", "pattern": "^[a-c]+-\\d{2}$"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "ipv4"},
    {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    {"oneOf": [{"type": "string", "maxLength": 3}, {"type": "number"}]},
    {"const": {"deep": [1, "x"]}},
    {"type": "string", "enum": ["positive", "neutral", "negative"]},
    {"type": ["integer", "string"], "minimum": 3, "maxLength": 2},
    {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 3},
    {"type": "object", "patternProperties": {"^k[0-9]$": {"type": "integer"}}, "additionalProperties": False},
    {
        "$defs": {"node": {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}}},
        "$ref": "#/$defs/node",
    },
]  # fmt: skip


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda s: json.dumps(s)[:60])
def test_json_always_parses_and_holds_to_its_schema(kit, sampler, schema):
    ended = 0
    for seed in range(12):
        text = complete(kit, sampler, StructuredOutputsParams(json=schema), seed)
        if text is not None:
            jsonschema.validate(json.loads(text), schema)
            ended += 1
    assert ended >= 3


def test_a_schema_may_come_as_text(kit, sampler):
    text = complete(kit, sampler, StructuredOutputsParams(json=json.dumps(SCHEMAS[0])), 0)
    assert set(json.loads(text)) == {"a", "b"}


def test_any_json_object(kit, sampler):
    texts = [complete(kit, sampler, StructuredOutputsParams(json_object=True), seed) for seed in range(10)]
    assert all(isinstance(json.loads(t), dict) for t in texts if t is not None) and any(texts)


def test_a_weak_model_cannot_write_whitespace_for_ever(kit, sampler):
    """Logits that want nothing but spaces and newlines; the object is finished all the same."""
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    request = kit.request(sampler, structured_outputs=StructuredOutputsParams(json=schema), temperature=0)
    logits = torch.zeros(1, sampler.vocab_size)
    logits[0, [NEWLINE, ord(" "), ord("\t")]] = 50.0
    for _ in range(20):
        request.append_output_token_id(sampler(logits, [request]).token_ids[0])
        if request.output_token_ids[-1] in sampler.eos_token_ids:
            break
    assert set(json.loads(sampler.tokenizer.decode(request.output_token_ids))) == {"a"}


@pytest.mark.parametrize("regex", [r"[a-c]{2,5}\d", r"(foo|bar)+", r"\d{4}-\d{2}", r"日*x"])
def test_regex(kit, sampler, regex):
    texts = [complete(kit, sampler, StructuredOutputsParams(regex=regex), seed) for seed in range(8)]
    assert all(re.fullmatch(regex, t) for t in texts if t is not None) and any(texts)


@pytest.mark.parametrize(
    "choices",
    [
        ["positive", "negative", "neutral"],
        ["A", "B", "C", "D"],
        ['say "hi"', "back\\slash", "new\nline", "日本", "a|b", "a"],
    ],
)
def test_choice(kit, sampler, choices):
    texts = {complete(kit, sampler, StructuredOutputsParams(choice=choices), seed) for seed in range(40)}
    assert texts <= set(choices) and len(texts) >= len(choices) - 1


def test_classification_takes_the_likeliest_label(kit, sampler):
    structured = StructuredOutputsParams(choice=["positive", "neutral", "negative"])
    request = kit.request(sampler, structured_outputs=structured, temperature=0)
    logits = torch.zeros(1, sampler.vocab_size)
    logits[0, [ord("z"), ord("p"), 256 + PIECES.index("neg")]] = torch.tensor([90.0, 3.0, 5.0])
    for _ in range(10):
        request.append_output_token_id(sampler(logits, [request]).token_ids[0])
        if request.output_token_ids[-1] in sampler.eos_token_ids:
            break
    assert sampler.tokenizer.decode(request.output_token_ids) == "negative"


def test_ebnf_grammar(kit, sampler):
    grammar = 'root ::= term (" + " term)*\nterm ::= [1-9] | "(" root ")"'
    texts = [complete(kit, sampler, StructuredOutputsParams(grammar=grammar), seed) for seed in range(8)]
    for text in filter(None, texts):
        ast.parse(text, mode="eval")
    assert any(texts)


def test_after_the_end_only_eos_is_left(kit, sampler):
    """Whoever goes on past EOS (ignore_eos) gets EOS, and no error."""
    structured = StructuredOutputsParams(choice=["ab"])
    request = kit.request(sampler, structured_outputs=structured, ignore_eos=True, max_tokens=None)
    for _ in range(6):
        request.append_output_token_id(sampler(torch.zeros(1, sampler.vocab_size), [request]).token_ids[0])
    text = sampler.tokenizer.decode(request.output_token_ids, skip_special_tokens=True)
    assert text == "ab" and set(request.output_token_ids[-3:]) <= set(sampler.eos_token_ids)


def test_user_stop_tokens_stay_ordinary_tokens_of_the_grammar(kit, sampler):
    structured = StructuredOutputsParams(json={"type": "array", "items": {"type": "null"}, "minItems": 2})
    request = kit.request(sampler, structured_outputs=structured, stop_token_ids=[ord(",")], temperature=0)
    logits = torch.zeros(1, sampler.vocab_size)
    logits[0, ord(",")] = 9.0
    kit.generate(sampler, [request], lambda r: logits[0], 12)
    assert ord(",") in request.output_token_ids


def test_a_grammar_and_min_tokens_that_leave_nothing_fail_alone(kit, sampler):
    stuck = kit.request(sampler, structured_outputs=StructuredOutputsParams(choice=["a"]), min_tokens=5, temperature=0)
    other = kit.request(sampler, temperature=0)
    stuck.append_output_token_id(sampler(torch.zeros(2, sampler.vocab_size), [stuck, other]).token_ids[0])
    out = sampler(torch.zeros(2, sampler.vocab_size), [stuck, other])
    assert list(out.errors) == [0] and "constraints" in out.errors[0]


def test_requests_with_one_schema_share_the_compiled_grammar_and_not_the_matcher(kit, sampler):
    structured = StructuredOutputsParams(choice=["aaaa", "bbbb"])
    requests = [kit.request(sampler, structured_outputs=structured, temperature=0) for _ in range(2)]
    logits = torch.zeros(2, sampler.vocab_size)
    logits[0, ord("a")] = logits[1, ord("b")] = 5.0
    for _ in range(4):
        for request, token_id in zip(requests, sampler(logits, requests).token_ids, strict=True):
            request.append_output_token_id(token_id)
    assert [sampler.tokenizer.decode(r.output_token_ids) for r in requests] == ["aaaa", "bbbb"]


# ---- refused at the door ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "structured",
    [
        {"json": "{"},
        {"json": "[]"},
        {"json": {"type": "strin"}},
        {"json": {"type": "object", "properties": 5}},
        {"json": {"$ref": "#/nope"}},
        {"json": {"type": "string", "pattern": "["}},
        {"regex": "["},
        {"regex": "a{3"},
        {"regex": "(?=a)b"},
        {"grammar": "root ::="},
        {"grammar": 'foo ::= "a"'},
        {"grammar": "root ::= bar"},
    ],
)
def test_what_cannot_be_compiled_is_refused(kit, sampler, structured):
    with pytest.raises(ValueError, match=f"structured_outputs.{next(iter(structured))}") as caught:
        kit.request(sampler, structured_outputs=StructuredOutputsParams(**structured))
    assert "/project/" not in str(caught.value)


UNENFORCED = [
    ({"not": {"type": "string"}}, '"a"'),
    ({"if": {"type": "integer"}, "then": {"minimum": 3}}, "1"),
    ({"allOf": [{"type": "integer"}, {"minimum": 5}]}, "3"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "3"),
    ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "[1, 1]"),
    ({"type": "array", "items": {"type": "integer"}, "contains": {"const": 1}}, "[2]"),
    ({"type": "number", "multipleOf": 0.5}, "0.3"),
    ({"type": "string", "format": "frobnicate"}, '"xx"'),
    ({"type": "string", "pattern": "^a+$", "maxLength": 2}, '"aaaa"'),
    ({"type": "string", "pattern": '^"$'}, '"""'),
    ({"minimum": 3}, "1"),
    ({"minLength": 3}, '"a"'),
    ({"type": "integer", "anyOf": [{"minimum": 5}]}, "3"),
    ({"$defs": {"i": {"type": "integer"}}, "$ref": "#/$defs/i", "minimum": 5}, "3"),
    ({"type": "string", "const": 3}, "3"),
    ({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a", "z"]}, '{"a": 1}'),
    ({"type": "object", "properties": {"a": {"type": "integer"}}, "patternProperties": {"a": {"type": "null"}}}, '{"a": 1}'),
    ({"type": "object", "properties": {"b": {"type": "integer"}}, "propertyNames": {"pattern": "^a$"}}, '{"b": 1}'),
    ({"type": "object", "properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}}, '{"a": 1}'),
]  # fmt: skip


@pytest.mark.parametrize(
    ("schema", "breach"), UNENFORCED, ids=lambda v: v if isinstance(v, str) else json.dumps(v)[:50]
)
def test_what_would_not_be_enforced_is_refused(kit, sampler, schema, breach):
    """Each of these breaks its schema (or is no JSON), and xgrammar would let it through."""
    with pytest.raises(ValueError, match="structured_outputs.json at #"):
        kit.request(sampler, structured_outputs=StructuredOutputsParams(json=schema))
    matcher = xgrammar.GrammarMatcher(
        sampler._grammar_compiler._text.compile_json_schema(json.dumps(schema), any_whitespace=False)
    )
    assert matcher.accept_string(breach) and matcher.is_completed()
    with pytest.raises((jsonschema.ValidationError, json.JSONDecodeError)):
        jsonschema.validate(json.loads(breach), schema, format_checker=jsonschema.FormatChecker())
        if "format" in schema:  # an unknown format: no validator can tell
            raise json.JSONDecodeError("unknown format", breach, 0)


def test_without_xgrammar_the_error_says_how_to_get_it(kit, tokenizer, monkeypatch):
    real_import = builtins.__import__

    def without_xgrammar(name, *args, **kwargs):
        if name.partition(".")[0] == "xgrammar":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_xgrammar)
    sampler = Sampler(tokenizer.vocab_size, {tokenizer.vocab_size - 1}, tokenizer)
    kit.request(sampler)  # everything else works
    with pytest.raises(ValueError, match=r"pip install 'llmlab\[grammar\]'"):
        kit.request(sampler, structured_outputs=StructuredOutputsParams(regex="a"))


def test_a_model_without_tokenizer_or_eos_cannot_have_structured_outputs(kit, tokenizer):
    opaque = SimpleNamespace(is_bytewise=False)
    samplers = [
        (Sampler(300, {1}), "has none"),
        (Sampler(300, (), tokenizer), "EOS"),
        (Sampler(300, {1}, opaque), "bytes"),
    ]
    for sampler, message in samplers:
        with pytest.raises(ValueError, match=message):
            kit.request(sampler, structured_outputs=StructuredOutputsParams(regex="a"))


def test_structured_outputs_survive_a_copy_of_the_parameters(kit, sampler):
    params = SamplingParams(n=2, structured_outputs=StructuredOutputsParams(choice=["a", "b"]))
    assert params.for_output(1).structured_outputs == params.structured_outputs
