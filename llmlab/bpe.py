"""Byte-level byte-pair encoding, written to be read: training, encoding, decoding.

Text is cut into pieces (llmlab.pretokenize), each piece is a row of UTF-8 bytes, and a token is a byte string. Training
merges the most frequent pair of neighbouring tokens, over and over; encoding replays those merges on new text, earliest
merge first. Sennrich et al. 2016, "Neural Machine Translation of Rare Words with Subword Units", section 3.2; on bytes:
Radford et al. 2019 (GPT-2), section 2.2.
"""

from __future__ import annotations

import heapq
import os
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from llmlab import bpe_files
from llmlab.pretokenize import LLAMA3_PATTERN, Normalizer, PreTokenizer

Pair = tuple[int, int]

CACHED_PIECES = 65_536  # distinct pieces whose tokens are remembered, per tokenizer
CACHED_PIECE_LENGTH = 64  # characters; longer pieces hardly ever come twice


class Merge(NamedTuple):
    """One step of training: `pair` occurred `count` times and became the token `new_id`, which spells `token`."""

    pair: Pair
    new_id: int
    token: bytes
    count: int


def merge_pair(ids: Sequence[int], pair: Pair, new_id: int) -> list[int]:
    """Replace `pair` by `new_id`, left to right, without overlap: aaa with (a, a) → X becomes X a."""
    merged: list[int] = []
    i = 0
    while i < len(ids):
        if i + 1 < len(ids) and (ids[i], ids[i + 1]) == pair:
            merged.append(new_id)
            i += 2
        else:
            merged.append(ids[i])
            i += 1
    return merged


class Trainer:
    """Byte-pair training, one merge a step: iterate over it, or call `step()` and look at the state in between.

    The text is stored as its distinct pieces (`words`, as token ids) and how often each occurs (`word_counts`). A merge
    touches only the words that hold the pair, so the counts of all pairs (`pair_counts`) are kept and corrected instead
    of counted afresh. Of equally frequent pairs the one with the smallest ids wins, so training is deterministic.
    """

    def __init__(
        self, text: str | Iterable[str], pattern: str = LLAMA3_PATTERN, special_tokens: Collection[str] = ()
    ) -> None:
        pre_tokenizer = PreTokenizer.from_pattern(pattern)
        pieces: Counter[str] = Counter()
        for document in [text] if isinstance(text, str) else text:
            for part in split_at(document, special_tokens):
                if part not in special_tokens:
                    pieces.update(pre_tokenizer.split(part))
        self.words = [list(piece.encode()) for piece in pieces]
        self.word_counts = list(pieces.values())
        self.vocab = [bytes([byte]) for byte in range(256)]
        self.merges: list[Merge] = []
        self.pair_counts: Counter[Pair] = Counter()
        self._words_with: defaultdict[Pair, set[int]] = defaultdict(set)
        for index, word in enumerate(self.words):
            self._count_pairs(index, word, self.word_counts[index])
        # Entries may be out of date, but never too low: a count that falls leaves its old entry, one that rises adds one.
        self._queue = [(-count, pair) for pair, count in self.pair_counts.items()]
        heapq.heapify(self._queue)

    def __iter__(self) -> Iterator[Merge]:
        while (merge := self.step()) is not None:
            yield merge

    def step(self) -> Merge | None:
        """Merge the most frequent pair everywhere. None when no pair is left: every piece is one token."""
        pair = self._most_frequent_pair()
        if pair is None:
            return None
        count = self.pair_counts[pair]
        token = self.vocab[pair[0]] + self.vocab[pair[1]]
        # The spelling is new: equal stretches of bytes merge alike until one is merged across its border, so no second
        # merge can spell what an earlier one spelled.
        new_id = len(self.vocab)
        self.vocab.append(token)
        changed: set[Pair] = set()
        for index in self._words_with.pop(pair):
            word, occurrences = self.words[index], self.word_counts[index]
            self._count_pairs(index, word, -occurrences)
            self.words[index] = merge_pair(word, pair, new_id)
            self._count_pairs(index, self.words[index], occurrences)
            changed.update(new_pair for new_pair in pairwise(self.words[index]) if new_id in new_pair)
        for new_pair in changed:
            heapq.heappush(self._queue, (-self.pair_counts[new_pair], new_pair))
        self.merges.append(Merge(pair, new_id, token, count))
        return self.merges[-1]

    def _most_frequent_pair(self) -> Pair | None:
        while self._queue:
            queued, pair = heapq.heappop(self._queue)
            count = self.pair_counts[pair]
            if count == -queued:
                return pair
            if count > 0:
                heapq.heappush(self._queue, (-count, pair))
        return None

    def _count_pairs(self, index: int, word: list[int], occurrences: int) -> None:
        for pair in pairwise(word):
            self.pair_counts[pair] += occurrences
            if occurrences > 0:
                self._words_with[pair].add(index)


def split_at(text: str, markers: Collection[str]) -> list[str]:
    """Cut `text` before and after every marker; where markers overlap, the leftmost and then the longest wins."""
    if not markers:
        return [text] if text else []
    pattern = "|".join(re.escape(marker) for marker in sorted(markers, key=len, reverse=True))
    return [part for part in re.split(f"({pattern})", text) if part]


@dataclass(frozen=True)
class AddedToken:
    """A token outside the merges, cut out of the text before anything else.

    A `special` one (an end-of-text mark) is plain text in `encode` unless allowed; any other is always recognised.
    A `normalized` one is looked for after the normalizer, the usual one in the text as it came.
    """

    id: int
    content: str
    special: bool = True
    normalized: bool = False


class Tokenizer:
    """A byte-level BPE tokenizer, equal id for id to Hugging Face tokenizers (and tiktoken) over the same vocabulary.

    `vocab`: byte string → id. `merges`: pair of ids → (rank, id of the merged token), the lowest rank merged first.
    `ignore_merges` (Llama 3): a piece that is itself in the vocabulary becomes that one token, whatever the merges say.
    `prefix_ids`, `suffix_ids`: what `encode(..., add_special_tokens=True)` puts round the text, such as a BOS.
    `unk_id`: stands for bytes without a token of their own; without it `encode` drops such bytes, as tokenizers does,
    but warns. A vocabulary that `train` made has all bytes; some published ones lack a few control characters.
    """

    def __init__(
        self,
        vocab: Mapping[bytes, int],
        merges: Mapping[Pair, tuple[int, int]],
        pre_tokenizer: PreTokenizer,
        *,
        normalizer: Normalizer | None = None,
        added_tokens: Sequence[AddedToken] = (),
        ignore_merges: bool = False,
        prefix_ids: Sequence[int] = (),
        suffix_ids: Sequence[int] = (),
        unk_id: int | None = None,
    ) -> None:
        self.vocab = dict(vocab)
        self.merges = dict(merges)
        self.pre_tokenizer = pre_tokenizer
        self.normalizer = normalizer or Normalizer(None)
        self.added_tokens = {token.content: token for token in added_tokens}
        self.ignore_merges = ignore_merges
        self.prefix_ids = list(prefix_ids)
        self.suffix_ids = list(suffix_ids)
        self.unk_id = unk_id
        self._token_bytes = {i: token for token, i in self.vocab.items()}
        for token in added_tokens:
            content = self.normalizer(token.content) if token.normalized else token.content
            self._token_bytes[token.id] = content.encode()
        self._byte_ids = [self.vocab.get(bytes([byte]), unk_id) for byte in range(256)]
        self._cache: dict[str, list[int]] = {}

    @classmethod
    def train(
        cls,
        text: str | Iterable[str],
        vocab_size: int,
        pattern: str = LLAMA3_PATTERN,
        special_tokens: Sequence[str] = (),
    ) -> Tokenizer:
        """Train on `text` up to `vocab_size` tokens: 256 bytes, then merges in order, then the special tokens.

        Stops early, with a smaller vocabulary, when no pair is left. Special tokens are cut out of the training text.
        ValueError if `vocab_size` can't hold the bytes and the special tokens.
        """
        if "" in special_tokens or len(set(special_tokens)) != len(special_tokens):
            raise ValueError(f"special_tokens must be distinct and not empty, got {list(special_tokens)!r}")
        if vocab_size < 256 + len(special_tokens):
            raise ValueError(f"vocab_size={vocab_size} is below 256 bytes + {len(special_tokens)} special tokens")
        trainer = Trainer(text, pattern, special_tokens)
        while len(trainer.vocab) < vocab_size - len(special_tokens):
            if trainer.step() is None:
                break
        return cls(
            {token: i for i, token in enumerate(trainer.vocab)},
            {merge.pair: (rank, merge.new_id) for rank, merge in enumerate(trainer.merges)},
            PreTokenizer.from_pattern(pattern),
            added_tokens=[AddedToken(len(trainer.vocab) + i, content) for i, content in enumerate(special_tokens)],
        )

    @classmethod
    def from_file(
        cls, path: str | os.PathLike[str], pattern: str | None = None, special_tokens: Mapping[str, int] | None = None
    ) -> Tokenizer:
        """Read a tokenizer.json, or a tiktoken rank file (which needs `pattern`, and holds no `special_tokens`).

        FileNotFoundError if there is no such file; ValueError naming what is malformed or not supported.
        """
        return bpe_files.read(cls, path, pattern, special_tokens)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a tokenizer.json that `from_file` and Hugging Face's tokenizers load."""
        bpe_files.write(self, path)

    @property
    def vocab_size(self) -> int:
        """The number of rows an embedding table needs: the highest id + 1."""
        return max(self._token_bytes, default=-1) + 1

    @property
    def special_tokens(self) -> dict[str, int]:
        """Text → id of the special tokens."""
        return {token.content: token.id for token in self.added_tokens.values() if token.special}

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for. ValueError if there is no such token."""
        try:
            return self._token_bytes[token_id]
        except KeyError:
            raise ValueError(f"no token has the id {token_id!r} (ids go up to {self.vocab_size - 1})") from None

    def encode(
        self, text: str, allowed_special: str | Collection[str] = (), add_special_tokens: bool = False
    ) -> list[int]:
        """Text → token ids. Special tokens in the text are plain text, but for those in `allowed_special` ("all": every
        one); of overlapping ones the longest wins. `add_special_tokens` adds the tokenizer's own BOS, EOS or the like.
        ValueError if a name in `allowed_special` is no special token.
        """
        special = self.special_tokens
        allowed = special.keys() if allowed_special == "all" else allowed_special
        if isinstance(allowed, str) or not special.keys() >= set(allowed):
            raise ValueError(f'allowed_special={allowed_special!r} must be "all" or among {sorted(special)!r}')
        active = [token for token in self.added_tokens.values() if not token.special or token.content in allowed]
        ids: list[int] = []
        for part in split_at(text, [token.content for token in active if not token.normalized]):
            if (token := self.added_tokens.get(part)) in active:
                ids.append(token.id)
                continue
            ids += self._encode_normalized(self.normalizer(part), [token for token in active if token.normalized])
        return [*self.prefix_ids, *ids, *self.suffix_ids] if add_special_tokens else ids

    def _encode_normalized(self, text: str, active: Sequence[AddedToken]) -> list[int]:
        ids_of = {self.normalizer(token.content): token.id for token in active}
        ids: list[int] = []
        for part in split_at(text, ids_of.keys()):
            if part in ids_of:
                ids.append(ids_of[part])
                continue
            for piece in self.pre_tokenizer.split(part):
                known = self._cache.get(piece)
                ids += self._encode_piece(piece) if known is None else known
        return ids

    def _encode_piece(self, piece: str) -> list[int]:
        raw = piece.encode()
        if self.ignore_merges and raw in self.vocab:
            ids = [self.vocab[raw]]
        else:
            known = [i for byte in raw if (i := self._byte_ids[byte]) is not None]
            if len(known) < len(raw):
                lost = [f"{byte:#04x}" for byte in raw if self._byte_ids[byte] is None]
                warnings.warn(f"the vocabulary has no token for the bytes {lost} of {piece!r}: they are dropped")
            ids = self._apply_merges(known)
        if len(piece) <= CACHED_PIECE_LENGTH and len(self._cache) < CACHED_PIECES:
            self._cache[piece] = ids
        return ids

    def _apply_merges(self, ids: list[int]) -> list[int]:
        """Merge the pair of lowest rank, the leftmost of equals, until no pair of neighbours is in `merges`.

        A linked list and a queue of pairs make this O(n log n): a piece may be one long run of letters.
        """
        end = len(ids)
        following = list(range(1, end + 1))  # following[i]: where the token after the one at i starts
        preceding = list(range(-1, end - 1))
        queue: list[tuple[int, int, Pair, int]] = []  # (rank, position, pair, merged id)

        def consider(left: int) -> None:
            if left >= 0 and (right := following[left]) < end:
                pair = (ids[left], ids[right])
                if pair in self.merges:
                    rank, new_id = self.merges[pair]
                    heapq.heappush(queue, (rank, left, pair, new_id))

        for position in range(end):
            consider(position)
        while queue:
            _, left, pair, new_id = heapq.heappop(queue)
            right = following[left]
            if right >= end or (ids[left], ids[right]) != pair:
                continue  # one of the two has been merged with its other neighbour since
            ids[left], ids[right] = new_id, -1
            following[left] = following[right]
            if following[right] < end:
                preceding[following[right]] = left
            consider(preceding[left])
            consider(left)
        return [i for i in ids if i >= 0]

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """Token ids → text; bytes that are not UTF-8 become U+FFFD. ValueError if an id is not in the vocabulary.

        decode(encode(text)) == text for every text, unless a normalizer or add_prefix_space changed it first, or the
        vocabulary lacks bytes.
        """
        skipped = set(self.special_tokens.values()) if skip_special_tokens else set()
        return b"".join(self.token_bytes(i) for i in ids if i not in skipped).decode("utf-8", errors="replace")
