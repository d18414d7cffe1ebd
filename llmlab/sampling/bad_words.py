"""Words never to be written, in whatever way they are cut into tokens.

A tokenizer has one way to encode a word, but a model has many to write it: ``describe``, or ``desc`` and ``ribe``. So a word
is its bytes here, and a place inside it that the output has reached, token by token from the word's start, is a state of a
small automaton; the tokens that complete the word from a reached place are banned. What the tokenizer itself makes of the
word is banned too, since not every vocabulary spells its text byte for byte. A word begins and ends where tokens do,
as in vLLM: banning ``he`` bans the tokens ``he`` and ``␣he``, and not the token ``hello``. Only output counts, no prompt.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmlab.tokenizer import Tokenizer

Place = tuple[int, int]
"""(which spelling, how many of its bytes, or of its tokens, are written)."""


class TokenIndex:
    """Byte string → ids of the ordinary tokens that spell it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        self.ids: dict[bytes, list[int]] = defaultdict(list)
        special = tokenizer.special_token_ids
        for token_id in range(vocab_size):
            raw = b"" if token_id in special else tokenizer.token_bytes(token_id)
            if raw:
                self.ids[raw].append(token_id)
        self.longest = max(map(len, self.ids), default=0)

    def __getitem__(self, raw: bytes) -> Sequence[int]:
        return self.ids.get(raw, ())


def with_leading_space(words: Iterable[str]) -> list[str]:
    """Each word without and with a space before it."""
    forms = (form for word in words for form in (word.lstrip() or word, " " + word.lstrip()))
    return list(dict.fromkeys(forms))


class BadWords:
    """The automaton of one request's words.

    Args:
        words: what must not be written, as bytes. sequences: token ids that must not follow one another.

    Attributes:
        always: tokens that are such a word by themselves, banned at every step.
    """

    def __init__(self, words: Sequence[bytes], index: TokenIndex, sequences: Sequence[Sequence[int]] = ()):
        self._moves: dict[int, list[tuple[Place, Place]]] = defaultdict(list)
        self._closing: dict[Place, set[int]] = defaultdict(set)
        for w, word in enumerate(words):
            for begin in range(len(word)):
                for end in range(begin + 1, min(begin + index.longest, len(word)) + 1):
                    for token_id in index[word[begin:end]]:
                        self._add((w, begin), token_id, None if end == len(word) else (w, end))
        for w, sequence in enumerate(sequences, start=len(words)):
            for i, token_id in enumerate(sequence):
                self._add((w, i), token_id, None if i == len(sequence) - 1 else (w, i + 1))
        self.always = sorted({t for (_, begin), ids in self._closing.items() if begin == 0 for t in ids})
        self._reached: list[Place] = []
        self._num_read = 0

    def banned_after(self, output_token_ids: Sequence[int]) -> list[int]:
        """Tokens that would complete a word begun before, besides ``always``. The output may only have grown since."""
        for token_id in output_token_ids[self._num_read :]:
            moves = self._moves.get(token_id, ())
            self._reached = [end for begin, end in moves if begin[1] == 0 or begin in self._reached]
        self._num_read = len(output_token_ids)
        return [t for place in self._reached for t in self._closing.get(place, ())]

    def _add(self, begin: Place, token_id: int, end: Place | None) -> None:
        if end is None:
            self._closing[begin].add(token_id)
        else:
            self._moves[token_id].append((begin, end))
