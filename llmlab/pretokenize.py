"""Text → pieces: what a byte-level BPE does before the first merge.

A tokenizer first normalizes the text (Qwen2 does, most do not), then cuts it into pieces; no token crosses the border
of two pieces. How to cut is a configuration of a Hugging Face tokenizer.json ("pre_tokenizer"), and the configuration
is what is kept here, so that a tokenizer can be written back as it was read. What is not understood raises.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import regex

GPT2_PATTERN = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_PATTERN = LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")

Stage = Callable[[str], Iterable[str]]  # one piece of text → smaller pieces


def byte_alphabet() -> dict[int, str]:
    """Byte → the printable character that stands for it in vocabularies and merges of tokenizer.json (GPT-2's map).

    Printable Latin-1 bytes stand for themselves; the 68 others get the characters from U+0100 on, in order: a space is
    "Ġ", a newline "Ċ".
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + i) for i, byte in enumerate(others)}


class PreTokenizer:
    """Cuts text into pieces as the tokenizer.json section `config` says; `config` must end in a byte-level stage.

    Understood: ByteLevel, Split (behaviour Isolated, or Removed with invert: only the matches), Digits, Sequence.
    Raises ValueError naming anything else.
    """

    def __init__(self, config: Mapping[str, Any] | None) -> None:
        stages = [config] if config is None or config.get("type") != "Sequence" else config["pretokenizers"]
        if not any(stage and stage.get("type") == "ByteLevel" for stage in stages):
            raise ValueError(f"pre_tokenizer {config!r} has no ByteLevel stage: only byte-level BPE is supported")
        self.config = config
        self._stages: list[Stage] = [_stage(stage) for stage in stages]

    @classmethod
    def from_pattern(cls, pattern: str) -> PreTokenizer:
        """Cuts at the matches of one regular expression (what lies between two matches is a piece too)."""
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        return cls({"type": "Sequence", "pretokenizers": [split, byte_level]})

    def split(self, text: str) -> list[str]:
        """The pieces of `text`, in order, none of them empty."""
        pieces = [text] if text else []
        for stage in self._stages:
            pieces = [part for piece in pieces for part in stage(piece)]
        return pieces


def _stage(config: Mapping[str, Any]) -> Stage:
    """One entry of a tokenizer.json "pre_tokenizer" → a function that cuts one piece into smaller ones."""
    kind = config.get("type")
    if kind == "ByteLevel":
        pattern = compile_pattern(GPT2_PATTERN) if config.get("use_regex", True) else None
        return lambda text: _byte_level(text, pattern, config.get("add_prefix_space", False))
    if kind == "Digits":
        pattern = compile_pattern(r"\p{N}" if config.get("individual_digits", False) else r"\p{N}+")
        return lambda text: _isolate(pattern, text)
    if kind == "Split":
        behavior, invert = config.get("behavior"), config.get("invert", False)
        [(syntax, source)] = config["pattern"].items()
        pattern = compile_pattern(source if syntax == "Regex" else regex.escape(source))
        if (behavior, invert) == ("Isolated", False):
            return lambda text: _isolate(pattern, text)
        if (behavior, invert) == ("Removed", True):
            return lambda text: [match[0] for match in pattern.finditer(text) if match[0]]
        raise ValueError(f"pre_tokenizer Split with behavior={behavior!r}, invert={invert!r} is not supported")
    raise ValueError(
        f"pre_tokenizer {kind!r} is not supported (supported: ByteLevel, Split, Digits, Sequence of these)"
    )


def compile_pattern(pattern: str) -> regex.Pattern[str]:
    """Compile a pattern of a tokenizer.json. ValueError if it is malformed or would mean something else here.

    tokenizers reads patterns as Ruby does: ^ and $ match at every line, and x{1,3}+ is a repeated x{1,3}, where the
    regex module (and tiktoken) reads a possessive one. The last is refused, since the two cut differently.
    """
    if regex.search(r"\{\d*,?\d*\}\+", pattern):
        raise ValueError(f"pattern {pattern!r}: x{{m,n}}+ is ambiguous; write (?>x{{m,n}}) or (?:x{{m,n}})+")
    try:
        return regex.compile(pattern, regex.MULTILINE)
    except regex.error as error:
        raise ValueError(f"pattern {pattern!r} is not a regular expression: {error}") from error


def _byte_level(text: str, pattern: regex.Pattern[str] | None, add_prefix_space: bool) -> list[str]:
    if add_prefix_space and not text.startswith(" "):
        text = " " + text
    return _isolate(pattern, text) if pattern else [text]


def _isolate(pattern: regex.Pattern[str], text: str) -> list[str]:
    """The matches and the stretches between them, in order: nothing of the text is lost."""
    pieces, end = [], 0
    for match in pattern.finditer(text):
        start, stop = match.span()
        if end < start:
            pieces.append(text[end:start])
        if start < stop:
            pieces.append(text[start:stop])
        end = stop
    if end < len(text):
        pieces.append(text[end:])
    return pieces


class Normalizer:
    """Unicode normal forms, as the tokenizer.json section `config` names them (None: leaves text alone).

    Understood: NFC, NFD, NFKC, NFKD, Sequence of these. Raises ValueError naming anything else. The tables are those
    of Python's unicodedata; characters newer than a library's tables are where two libraries may differ.
    """

    def __init__(self, config: Mapping[str, Any] | None) -> None:
        self.config = config
        self.forms: list[str] = []
        steps = [config] if config and config.get("type") != "Sequence" else (config or {}).get("normalizers", [])
        for step in steps:
            if step.get("type") not in ("NFC", "NFD", "NFKC", "NFKD"):
                raise ValueError(f"normalizer {step.get('type')!r} is not supported (supported: NFC, NFD, NFKC, NFKD)")
            self.forms.append(step["type"])

    def __call__(self, text: str) -> str:
        for form in self.forms:
            text = unicodedata.normalize(form, text)
        return text
