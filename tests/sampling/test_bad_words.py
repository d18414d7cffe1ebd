"""Bad words: with and without a leading space, in every way to cut them into tokens, in the output alone."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmlab.sampling.bad_words import BadWords, TokenIndex, with_leading_space
from llmlab.sampling.sampler import Sampler


def banned(words: BadWords, output: list[int]) -> set[int]:
    return {*words.always, *words.banned_after(output)}


@pytest.fixture
def make(kit):
    def build(words: list[str], *tokens: str):
        tokenizer = kit.tokenizer(*tokens)
        index = TokenIndex(tokenizer, tokenizer.vocab_size)
        ids = {raw: token_id for raw, (token_id, *_) in index.ids.items()}
        return BadWords([w.encode() for w in with_leading_space(words)], index), lambda *t: [ids[x.encode()] for x in t]

    return build


def test_spaced_forms():
    assert with_leading_space(["ab", " cd", "ab", "  "]) == ["ab", " ab", "cd", " cd", "  ", " "]


def test_a_word_of_one_token_and_its_spaced_form_of_two(make):
    words, ids = make(["ab"], "ab", " a")
    assert banned(words, []) == set(ids("ab"))
    assert banned(words, ids(" a")) == {*ids("ab"), *ids("b")}
    words, ids = make(["ab"], "ab", " a")
    assert banned(words, ids(" ")) == set(ids("ab"))  # " " + "ab" is covered by "ab" itself
    words, ids = make(["ab"], "ab", " a")
    assert banned(words, ids("a")) == {*ids("ab"), *ids("b")}


def test_the_last_token_of_a_sequence_is_banned_only_after_the_others(make):
    words, ids = make(["xyz"], "xy", "yz")
    x, y, z, xy, yz = ids("x", "y", "z", "xy", "yz")
    assert words.always == []
    for output, expected in (([], set()), ([x], {yz}), ([x, y], {z}), ([x, y, y], set()), ([xy], {z}), ([z, x], {yz})):
        words, _ = make(["xyz"], "xy", "yz")
        assert banned(words, output) == expected


def test_a_word_that_repeats_itself_is_followed_from_every_start(make):
    words, ids = make(["aab"])
    a, b = ids("a", "b")
    assert banned(words, [a, a, a]) == {b}


def test_a_longer_token_that_holds_the_word_is_another_word(make):
    words, ids = make(["he"], "hello", "he")
    assert set(ids("hello")).isdisjoint(banned(words, []))


def test_token_sequences_of_the_tokenizer_itself():
    class Opaque:
        """A vocabulary whose bytes say nothing."""

        special_token_ids = frozenset()

        def token_bytes(self, token_id: int) -> bytes:
            return b""

    words = BadWords([b"ab"], TokenIndex(Opaque(), 10), [[5, 6], [7]])
    assert words.always == [7]
    assert words.banned_after([5]) == [6]
    assert words.banned_after([5, 1]) == []


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.data())
def test_no_way_to_spell_a_word_is_left_open(data):
    """Random walks through tokens that are never banned: the words' bytes never appear from token to token."""
    alphabet = [b"a", b"b", b" ", b"ab", b"ba", b"aa", b" a", b"abb"]
    text = st.text("ab", min_size=1, max_size=4)
    words = data.draw(st.lists(text, min_size=1, max_size=3))

    class Letters:
        special_token_ids = frozenset()

        def token_bytes(self, token_id: int) -> bytes:
            return alphabet[token_id]

    forms = [w.encode() for w in with_leading_space(words)]
    automaton = BadWords(forms, TokenIndex(Letters(), len(alphabet)))
    output: list[int] = []
    for _ in range(12):
        open_ids = sorted(set(range(len(alphabet))) - {*automaton.always, *automaton.banned_after(output)})
        # And exactly the closing tokens are banned, no others.
        closing = {
            t
            for t in range(len(alphabet))
            if any(b"".join(alphabet[i] for i in (*output[start:], t)) in forms for start in range(len(output) + 1))
        }
        assert set(open_ids) == set(range(len(alphabet))) - closing
        if not open_ids:
            return
        output.append(data.draw(st.sampled_from(open_ids)))
    pieces = [alphabet[i] for i in output]
    for start, stop in itertools.combinations(range(len(pieces) + 1), 2):
        assert b"".join(pieces[start:stop]) not in forms


def test_in_the_sampler_only_output_counts(kit):
    tokenizer = kit.tokenizer("bad")
    sampler = Sampler(tokenizer.vocab_size, {tokenizer.vocab_size - 1}, tokenizer)
    b, a, d, whole, x = (ord("b"), ord("a"), ord("d"), 256, ord("x"))
    logits = torch.zeros(1, tokenizer.vocab_size)
    logits[0, [whole, d, x]] = torch.tensor([9.0, 8.0, 7.0])
    ends_in_prompt = kit.request(sampler, prompt=[b, a], bad_words=["bad"], temperature=0)
    assert sampler(logits, [ends_in_prompt]).token_ids == [d]
    written = kit.request(sampler, prompt=[x], output=[b, a], bad_words=["bad"], temperature=0)
    free = kit.request(sampler, prompt=[x], output=[b, a], temperature=0)
    assert sampler(logits.repeat(2, 1), [written, free]).token_ids == [x, whole]


def test_in_the_sampler_a_word_is_banned_with_and_without_its_space(kit):
    """One token or several, in whichever way a vocabulary spells it after a space."""
    tokenizer = kit.tokenizer("ab", " ab", " a")
    sampler = Sampler(tokenizer.vocab_size, {tokenizer.vocab_size - 1}, tokenizer)
    whole, spaced, begun, b, x = (256, 257, 258, ord("b"), ord("x"))
    logits = torch.zeros(1, tokenizer.vocab_size)
    logits[0, [spaced, whole, b, x]] = torch.tensor([9.0, 8.0, 7.0, 6.0])
    for word in ("ab", " ab"):
        fresh = kit.request(sampler, bad_words=[word], temperature=0)
        assert sampler(logits, [fresh]).token_ids == [b]
        on_the_way = kit.request(sampler, output=[x, begun], bad_words=[word], temperature=0)
        assert sampler(logits, [on_the_way]).token_ids == [x]


def test_a_special_token_can_be_a_bad_word(kit):
    tokenizer = kit.tokenizer(special=("<eos>", "<think>"))
    sampler = Sampler(tokenizer.vocab_size, {256}, tokenizer)
    logits = torch.zeros(1, tokenizer.vocab_size)
    logits[0, 257] = 9.0
    assert sampler(logits, [kit.request(sampler, temperature=0, bad_words=["<think>"])]).token_ids != [257]
