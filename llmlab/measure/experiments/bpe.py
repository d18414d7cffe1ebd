"""Byte-pair encoding: the tree of merges in a word, Hugging Face's trainer and tiktoken as oracles, compression and speed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from llmlab.bpe import Tokenizer, Trainer
from llmlab.measure.timer import Comparison, compare, measure_in_turns
from llmlab.pretokenize import LLAMA3_PATTERN, PreTokenizer

if TYPE_CHECKING:
    import tiktoken


def stories(held_out: float = 0.1) -> tuple[str, str]:
    """The corpus of the tiny model, cut at a line into a part to train on and a held-out end.

    Raises FileNotFoundError where there is no checkout: an installed package carries no corpus.
    """
    path = Path(__file__).resolve().parents[3] / "data" / "tiny_corpus.txt"
    if not path.is_file():
        raise FileNotFoundError(f"{path.name} is part of a checkout of the repository, not of the installed package")
    text = path.read_text(encoding="utf-8")
    cut = text.index("\n", int(len(text) * (1 - held_out))) + 1
    return text[:cut], text[cut:]


def merge_steps(tokenizer: Tokenizer, piece: str) -> pd.DataFrame:
    """How the bytes of one piece become tokens: one row a merge, in order.

    Columns: step (from 1), rank (of the merge, from 0), left, right, token (byte strings), start, middle, end (byte offsets:
    ``token`` spans start to end, its halves meet at middle). Written out plainly, quadratic in the length of the piece.
    """
    ids = [tokenizer.vocab[bytes([byte])] for byte in piece.encode()]
    starts = list(range(len(ids) + 1))
    rows = []
    while True:
        found = [(tokenizer.merges[pair][0], i) for i, pair in enumerate(pairwise(ids)) if pair in tokenizer.merges]
        if not found:
            break
        rank, i = min(found)  # the lowest rank, and of equals the leftmost
        left, right = ids[i : i + 2]
        ids[i : i + 2] = [tokenizer.merges[left, right][1]]
        start, middle, end = starts[i : i + 3]
        del starts[i + 1]
        parts = [tokenizer.token_bytes(token) for token in (left, right, ids[i])]
        rows.append((len(rows) + 1, rank, *parts, start, middle, end))
    return pd.DataFrame(rows, columns=["step", "rank", "left", "right", "token", "start", "middle", "end"])


def hf_merges(text: str, count: int, pattern: str = LLAMA3_PATTERN) -> list[tuple[bytes, bytes]]:
    """The first ``count`` merges that Hugging Face's own trainer makes of the text.

    That trainer breaks ties by the order of the characters in its alphabet. Here byte b is the character U+4E00 + b, so
    that its order is that of the bytes, as ours; the pieces are cut by the pattern beforehand.
    """
    from tokenizers import Tokenizer as HfTokenizer
    from tokenizers import models, pre_tokenizers, trainers

    spell = lambda raw: "".join(chr(0x4E00 + byte) for byte in raw)
    oracle = HfTokenizer(models.BPE())
    oracle.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    alphabet = [spell(bytes([byte])) for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=256 + count, initial_alphabet=alphabet, show_progress=False)
    pieces = PreTokenizer.from_pattern(pattern).split(text)
    oracle.train_from_iterator([" ".join(spell(piece.encode()) for piece in pieces)], trainer)
    merges = json.loads(oracle.to_str())["model"]["merges"]
    raw = lambda spelling: bytes(ord(character) - 0x4E00 for character in spelling)
    return [(raw(left), raw(right)) for left, right in merges]


def as_tiktoken(tokenizer: Tokenizer, pattern: str = LLAMA3_PATTERN) -> tiktoken.Encoding:
    """The same vocabulary as a tiktoken encoding: a token's id is its rank, so no merges are needed.

    Raises ValueError if an id is not the rank: of two merges the earlier must have the lower id.
    """
    import tiktoken

    ids = [new_id for _, new_id in sorted(tokenizer.merges.values())]
    if ids != sorted(ids):
        raise ValueError("tiktoken takes ids for ranks, and this vocabulary's ids are not in the order of its merges")
    return tiktoken.Encoding(
        "llmlab", pat_str=pattern, mergeable_ranks=tokenizer.vocab, special_tokens=tokenizer.special_tokens
    )


def compression(
    train: str, texts: Mapping[str, str], vocab_sizes: Sequence[int], pattern: str = LLAMA3_PATTERN
) -> tuple[pd.DataFrame, Tokenizer]:
    """Bytes a token over the size of the vocabulary, from one run of the trainer; and the largest tokenizer.

    Returns one row a text and size: text, vocab_size, merges, bytes, tokens, bytes_per_token. ``vocab_sizes`` in ascending
    order, the first at least 256; sizes that the text is too short for are left out.
    """
    trainer = Trainer(train, pattern)
    rows, tokenizer = [], None
    for vocab_size in vocab_sizes:
        while len(trainer.vocab) < vocab_size and trainer.step() is not None:
            pass
        if len(trainer.vocab) < vocab_size:
            break
        tokenizer = _tokenizer(trainer, pattern)
        for name, text in texts.items():
            nbytes, tokens = len(text.encode()), len(tokenizer.encode(text))
            rows.append((name, vocab_size, vocab_size - 256, nbytes, tokens, nbytes / tokens))
    columns = ["text", "vocab_size", "merges", "bytes", "tokens", "bytes_per_token"]
    return pd.DataFrame(rows, columns=columns), tokenizer or _tokenizer(trainer, pattern)


def _tokenizer(trainer: Trainer, pattern: str) -> Tokenizer:
    vocab = {token: i for i, token in enumerate(trainer.vocab)}
    merges = {merge.pair: (rank, merge.new_id) for rank, merge in enumerate(trainer.merges)}
    return Tokenizer(vocab, merges, PreTokenizer.from_pattern(pattern))


def encode_speed(
    encoders: Mapping[str, Callable[[str], object]], text: str, max_seconds: float = 4.0
) -> tuple[pd.DataFrame, list[Comparison]]:
    """Clock several encoders on the same text, in turns; the first is compared with each of the others.

    Returns one row an encoder: name, seconds, low, high, bytes_per_s; and how many times as fast the first is.
    """
    runs = {name: lambda encode=encode: encode(text) for name, encode in encoders.items()}
    taken = measure_in_turns(runs, warmup=1, repeats=15, max_seconds=max_seconds)
    size = len(text.encode())
    rows = [(name, m.median, m.low, m.high, size / m.median) for name, m in taken.items()]
    first, *others = taken
    compared = [compare(first, taken[first], other, taken[other]) for other in others]
    return pd.DataFrame(rows, columns=["encoder", "seconds", "low", "high", "bytes_per_s"]), compared
