"""Structured output: at each step only the tokens that a grammar allows next.

xgrammar (Dong et al. 2024, arXiv:2411.15100) compiles a JSON schema, a regular expression, a choice or an EBNF grammar
against the vocabulary, and matches. It is an optional package, imported when the first request asks for it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from llmlab.sampling.json_schema import check_schema

if TYPE_CHECKING:
    from llmlab.sampling.params import StructuredOutputsParams
    from llmlab.tokenizer import Tokenizer

CACHE_LIMIT_BYTES = 256 * 2**20


class Grammar:
    """One request's matcher. It must see each kept token once, in order."""

    def __init__(self, compiled: Any, stop_token_ids: Sequence[int]):
        from xgrammar import GrammarMatcher

        self._matcher = GrammarMatcher(compiled, override_stop_tokens=list(stop_token_ids))
        self._stop_token_ids = list(stop_token_ids)

    def fill(self, bitmask: Tensor, row: int) -> None:
        """Write the tokens allowed next into a row of ``bitmask`` [rows, ceil(vocab_size / 32)] int32; at the end, EOS alone."""
        if not self._matcher.is_terminated():
            self._matcher.fill_next_token_bitmask(bitmask, row)
            return
        words = bitmask[row].zero_().numpy().view("uint32")
        for token_id in self._stop_token_ids:
            words[token_id // 32] |= 1 << token_id % 32

    def accept(self, token_id: int) -> bool:
        """Advance by a token; False if the grammar does not allow it. After the end any stop token is fine."""
        if self._matcher.is_terminated():
            return token_id in self._stop_token_ids
        return self._matcher.accept_token(token_id)


class GrammarCompiler:
    """Makes grammars for one vocabulary; what was compiled is kept, up to 256 MiB for JSON and as much for the rest.

    Raises:
        ValueError: xgrammar is not installed; there is no EOS token to end the output with; there is no tokenizer, or it is
            one whose text is not its tokens' bytes in a row.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: Collection[int]):
        try:
            import xgrammar  # noqa: F401 (only whether it is there)
        except ImportError as error:
            raise ValueError("structured_outputs need the package xgrammar: pip install 'llmlab[grammar]'") from error
        if tokenizer is None:
            raise ValueError("structured_outputs need a tokenizer, and this sampler has none")
        if not tokenizer.is_bytewise:
            raise ValueError(
                "structured_outputs need a tokenizer whose text is its tokens' bytes, and this one's is not"
            )
        if not eos_token_ids:
            raise ValueError("structured_outputs need an EOS token to end with, and the model names none")
        self._eos_token_ids = sorted(eos_token_ids)
        special = tokenizer.special_token_ids | set(eos_token_ids)
        self._vocabulary = [b"" if t in special else tokenizer.token_bytes(t) for t in range(vocab_size)]

    @cached_property
    def _text(self) -> Any:
        return self._compiler(self._vocabulary)

    @cached_property
    def _json(self) -> Any:
        # JSON has no raw control character but as whitespace between values, which is not written here; xgrammar would
        # let some into strings with a length limit.
        return self._compiler([b"" if any(byte < 0x20 for byte in raw) else raw for raw in self._vocabulary])

    def _compiler(self, vocabulary: list[bytes]) -> Any:
        """Over these tokens; one without bytes is never allowed as text."""
        import xgrammar

        info = xgrammar.TokenizerInfo(vocabulary, vocab_size=len(vocabulary), stop_token_ids=self._eos_token_ids)
        return xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=CACHE_LIMIT_BYTES)

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        """A fresh matcher. ValueError for what can't be compiled, or would not be enforced."""
        try:
            if params.kind == "json":
                compiled = self._compile_json(_schema(params.json))
            elif params.kind == "json_object":
                compiled = self._compile_json({"type": "object"})
            elif params.kind == "regex":
                compiled = self._text.compile_regex(params.regex)
            elif params.kind == "choice":
                compiled = self._text.compile_grammar(choice_grammar(params.choice))
            else:
                compiled = self._text.compile_grammar(params.grammar)
        except RuntimeError as error:
            reason = re.sub(r"^\[[\d:]+\] \S+: ", "", str(error)).strip()
            raise ValueError(f"structured_outputs.{params.kind} can't be compiled: {reason}") from error
        return Grammar(compiled, self._eos_token_ids)

    def _compile_json(self, schema: dict[str, Any]) -> Any:
        return self._json.compile_json_schema(json.dumps(schema), any_whitespace=False)


class GrammarMask:
    """The bitmasks of a batch's grammars, applied as one edit of the logits. Rows without a grammar stay all ones."""

    def __init__(self, grammars: Sequence[tuple[int, Grammar]], num_reqs: int, vocab_size: int):
        from xgrammar import allocate_token_bitmask

        self._grammars = grammars
        self._rows = [row for row, _ in grammars]
        self._bitmask = allocate_token_bitmask(num_reqs, vocab_size).fill_(-1)

    def update(self, requests: Sequence[Any], num_outputs: Any) -> bool:
        for row, grammar in self._grammars:
            grammar.fill(self._bitmask, row)
        return True

    def apply(self, logits: Tensor) -> None:
        """−inf for what no grammar allows, in place."""
        if logits.device.type == "cpu":
            from xgrammar import apply_token_bitmask_inplace

            apply_token_bitmask_inplace(logits, self._bitmask, indices=self._rows)
            return
        words = self._bitmask[self._rows].to(logits.device)
        bits = words[:, :, None] >> torch.arange(32, device=logits.device)
        allowed = (bits & 1).bool().flatten(1)[:, : logits.shape[1]]
        logits[self._rows] = logits[self._rows].masked_fill(~allowed, float("-inf"))


def choice_grammar(choices: Sequence[str]) -> str:
    """An EBNF grammar whose language is exactly these strings."""
    return "root ::= " + " | ".join('"' + "".join(map(_escaped, choice)) + '"' for choice in choices)


def _escaped(char: str) -> str:
    if char in '"\\':
        return "\\" + char
    return char if char.isprintable() else f"\\U{ord(char):08x}"


def _schema(schema: str | dict[str, Any]) -> dict[str, Any]:
    """The schema as a dict, after a check that all of it will be enforced."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except ValueError as error:
            raise ValueError(f"structured_outputs.json is not JSON: {error}") from error
    if not isinstance(schema, dict):
        raise ValueError(f"structured_outputs.json must be a schema object, got {schema!r}")
    check_schema(schema)
    return schema
