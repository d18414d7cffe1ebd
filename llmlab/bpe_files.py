"""Tokenizers on disk: Hugging Face's tokenizer.json (read and written) and tiktoken's rank files (read).

A tokenizer.json is a pipeline with many switches, and a switch that is overlooked gives ids that are almost right.
So every switch is either understood or refused with its name.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmlab.pretokenize import Normalizer, PreTokenizer, byte_alphabet

if TYPE_CHECKING:
    from llmlab.bpe import Tokenizer


def read(
    cls: type[Tokenizer], path: str | os.PathLike[str], pattern: str | None, special_tokens: Mapping[str, int] | None
) -> Tokenizer:
    """What `Tokenizer.from_file` does."""
    data = Path(path).read_bytes()
    if data.lstrip()[:1] == b"{":
        if pattern is not None or special_tokens is not None:
            raise ValueError(f"{path} is a tokenizer.json: it brings its own pattern and special tokens")
        try:
            tokenizer = _from_json(cls, json.loads(data))
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            reason = f"{type(error).__name__} {error}" if isinstance(error, KeyError) else error
            raise ValueError(f"{path} can't be read as a byte-level BPE tokenizer: {reason}") from error
    else:
        if pattern is None:
            raise ValueError(f"{path} is not JSON; a tiktoken rank file holds no pattern, so pass pattern=…")
        try:
            tokenizer = _from_ranks(cls, data, pattern, special_tokens or {})
        except ValueError as error:
            raise ValueError(f"{path} can't be read as a tiktoken rank file: {error}") from error
    return tokenizer


def _from_json(cls: type[Tokenizer], config: Mapping[str, Any]) -> Tokenizer:
    from llmlab.bpe import AddedToken

    model = config["model"]
    _refuse_unsupported(config, model)
    added = []
    for entry in config.get("added_tokens", []):
        for flag in ("single_word", "lstrip", "rstrip"):
            if entry.get(flag):
                raise ValueError(f"added token {entry['content']!r} with {flag}=true is not supported")
        if model["vocab"].get(entry["content"], entry["id"]) != entry["id"]:
            raise ValueError(f"added token {entry['content']!r} has two ids")
        added.append(
            AddedToken(entry["id"], entry["content"], entry.get("special", False), entry.get("normalized", True))
        )

    to_byte = {char: byte for byte, char in byte_alphabet().items()}
    spelled = {  # a vocabulary entry outside the byte alphabet can be no merge: it is there as an added token
        token: bytes(to_byte[char] for char in token)
        for token in model["vocab"]
        if all(char in to_byte for char in token)
    }
    unreachable = model["vocab"].keys() - spelled.keys() - {token.content for token in added}
    if unreachable:
        raise ValueError(f"token {min(unreachable)!r} of the vocabulary is not written in the byte alphabet")
    merges = {}
    for rank, merge in enumerate(model["merges"]):
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        missing = [token for token in (left, right, left + right) if token not in model["vocab"]]
        if missing:
            raise ValueError(f"merge {merge!r} needs {missing[0]!r}, which is not in the vocabulary")
        ids = model["vocab"][left], model["vocab"][right]
        merges[ids] = (rank, model["vocab"][left + right])
    prefix_ids, suffix_ids = _template_ids(config.get("post_processor"))
    unk_token = model.get("unk_token")
    return cls(
        {raw: model["vocab"][token] for token, raw in spelled.items()},
        merges,
        PreTokenizer(config.get("pre_tokenizer")),
        normalizer=Normalizer(config.get("normalizer")),
        added_tokens=added,
        ignore_merges=bool(model.get("ignore_merges")),
        prefix_ids=prefix_ids,
        suffix_ids=suffix_ids,
        unk_id=None if unk_token is None else model["vocab"][unk_token],
    )


def _refuse_unsupported(config: Mapping[str, Any], model: Mapping[str, Any]) -> None:
    if model.get("type", "BPE") != "BPE":
        raise ValueError(f"model type {model['type']!r} is not supported (supported: BPE)")
    for switch in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "fuse_unk"):
        if model.get(switch) and not (switch == "fuse_unk" and model.get("unk_token") is None):
            raise ValueError(f"model switch {switch}={model[switch]!r} is not supported")
    for section in ("truncation", "padding"):
        if config.get(section) is not None:
            raise ValueError(f"{section} is not supported: it would change what encode returns")
    decoder = config.get("decoder")
    if decoder is not None and decoder.get("type") != "ByteLevel":
        raise ValueError(f"decoder {decoder.get('type')!r} is not supported (supported: ByteLevel)")


def _template_ids(config: Mapping[str, Any] | None) -> tuple[list[int], list[int]]:
    """The ids that a post_processor puts before and after a single text."""
    prefix: list[int] = []
    suffix: list[int] = []
    if config is None or config["type"] == "ByteLevel":  # this one only moves offsets
        return prefix, suffix
    if config["type"] == "Sequence":
        for step in config["processors"]:
            before, after = _template_ids(step)
            prefix, suffix = before + prefix, suffix + after
        return prefix, suffix
    if config["type"] != "TemplateProcessing":
        raise ValueError(
            f"post_processor {config['type']!r} is not supported (supported: ByteLevel, TemplateProcessing)"
        )
    seen_text = False
    for item in config["single"]:
        if "Sequence" in item:
            seen_text = True
        else:
            (suffix if seen_text else prefix).extend(config["special_tokens"][item["SpecialToken"]["id"]]["ids"])
    return prefix, suffix


def _from_ranks(cls: type[Tokenizer], data: bytes, pattern: str, special_tokens: Mapping[str, int]) -> Tokenizer:
    """Lines of "base64(token) rank". tiktoken merges any two tokens whose join is a token, the join's rank first."""
    from llmlab.bpe import AddedToken

    vocab: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), start=1):
        if line.strip():
            try:
                encoded, rank = line.split()
                vocab[base64.b64decode(encoded, validate=True)] = int(rank)
            except (ValueError, binascii.Error) as error:
                raise ValueError(f"line {number} is not a base64 token and a rank: {line[:40]!r}") from error
    if not vocab:
        raise ValueError("it is empty")
    taken = {i: token for token, i in vocab.items()}
    for content, i in special_tokens.items():
        if i in taken:
            raise ValueError(f"special token {content!r} has the id {i} of {taken[i]!r}")
    merges = {
        (vocab[token[:cut]], vocab[token[cut:]]): (rank, rank)
        for token, rank in vocab.items()
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    }
    return cls(
        vocab,
        merges,
        PreTokenizer.from_pattern(pattern),
        added_tokens=[AddedToken(i, content) for content, i in special_tokens.items()],
        ignore_merges=True,
    )


def write(tokenizer: Tokenizer, path: str | os.PathLike[str]) -> None:
    """What `Tokenizer.save` does."""
    alphabet = byte_alphabet()
    vocab = {"".join(alphabet[byte] for byte in token): i for token, i in tokenizer.vocab.items()}
    spelling = {i: token for token, i in vocab.items()}
    ranked = sorted((rank, pair) for pair, (rank, _) in tokenizer.merges.items())
    # tokenizers numbers added tokens on from the size of the vocabulary; one with another id must be in the vocabulary.
    added = sorted(tokenizer.added_tokens.values(), key=lambda token: token.id)
    for token in added:
        if vocab.get(token.content, token.id) != token.id:
            raise ValueError(f"added token {token.content!r} can't be saved: a tokenizer.json spells a byte like that")
    outside = [token for token in added if token.content not in vocab]
    if [token.id for token in outside] != list(range(len(vocab), len(vocab) + len(outside))):
        vocab |= {token.content: token.id for token in outside}
    unk_token = next((token for token, i in vocab.items() if i == tokenizer.unk_id), None)
    flags = {"single_word": False, "lstrip": False, "rstrip": False}
    config = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": token.id, "content": token.content, "normalized": token.normalized, "special": token.special} | flags
            for token in added
        ],
        "normalizer": tokenizer.normalizer.config,
        "pre_tokenizer": tokenizer.pre_tokenizer.config,
        "post_processor": _template_config(tokenizer),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": unk_token,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": tokenizer.ignore_merges,
            "vocab": dict(sorted(vocab.items(), key=lambda item: item[1])),
            "merges": [[spelling[left], spelling[right]] for _, (left, right) in ranked],
        },
    }
    Path(path).write_text(json.dumps(config, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def _template_config(tokenizer: Tokenizer) -> dict[str, Any] | None:
    """The TemplateProcessing section that adds prefix_ids and suffix_ids; None if there are none."""
    ids = tokenizer.prefix_ids + tokenizer.suffix_ids
    if not ids:
        return None
    content = {token.id: token.content for token in tokenizer.added_tokens.values()}
    before = [{"SpecialToken": {"id": content[i], "type_id": 0}} for i in tokenizer.prefix_ids]
    after = [{"SpecialToken": {"id": content[i], "type_id": 0}} for i in tokenizer.suffix_ids]
    return {
        "type": "TemplateProcessing",
        "single": [*before, {"Sequence": {"id": "A", "type_id": 0}}, *after],
        "pair": [*before, {"Sequence": {"id": "A", "type_id": 0}}, *after, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {content[i]: {"id": content[i], "ids": [i], "tokens": [content[i]]} for i in ids},
    }
