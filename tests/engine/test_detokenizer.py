"""The growing text of a request: pieces that join to the whole, whole characters, stop strings."""

from dataclasses import dataclass, field

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from llmlab import bpe
from llmlab.engine.detokenizer import IncrementalDetokenizer
from llmlab.tokenizer import Tokenizer

bounded = settings(max_examples=150, deadline=None, derandomize=True)
SPECIAL = ["<unk>", "<s>", "</s>"]
CORPUS = "Hello world, hello there: the STOP sign. 日本語 ďaleko café \n def f(x): return x\n" * 8


@dataclass
class Params:
    """The fields of SamplingParams that the detokenizer reads."""

    stop: str | list[str] | None = field(default_factory=list)
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True


def byte_level() -> tokenizers.Tokenizer:
    hf = tokenizers.Tokenizer(models.BPE())
    hf.pre_tokenizer, hf.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    hf.train_from_iterator(
        [CORPUS],
        trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False),
    )
    return hf


def byte_fallback() -> tokenizers.Tokenizer:
    vocab = {token: i for i, token in enumerate(SPECIAL + [f"<0x{byte:02X}>" for byte in range(256)])}
    for token in ["▁", "H", "e", "l", "o", "▁H", "▁He", "ll", "▁Hell", "▁Hello"]:
        vocab[token] = len(vocab)
    merges = [("▁", "H"), ("▁H", "e"), ("l", "l"), ("▁He", "ll"), ("▁Hell", "o")]
    hf = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    hf.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    hf.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    hf.add_special_tokens(SPECIAL)
    return hf


def metaspace() -> tokenizers.Tokenizer:
    """A decoder that only knows whole texts: goes the general way."""
    hf = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    hf.pre_tokenizer, hf.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    hf.train_from_iterator([CORPUS], trainers.BpeTrainer(vocab_size=150, special_tokens=SPECIAL, show_progress=False))
    return hf


def word_piece() -> tokenizers.Tokenizer:
    hf = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
    hf.pre_tokenizer, hf.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece(cleanup=False)
    hf.train_from_iterator(
        [CORPUS], trainers.WordPieceTrainer(vocab_size=120, special_tokens=SPECIAL, show_progress=False)
    )
    return hf


@pytest.fixture(scope="module", params=[byte_level, byte_fallback, metaspace, word_piece])
def tokenizer(request) -> Tokenizer:
    return Tokenizer.load(
        PreTrainedTokenizerFast(tokenizer_object=request.param(), unk_token="<unk>", eos_token="</s>")
    )


@pytest.fixture(scope="module")
def letters() -> Tokenizer:
    """Bytes, so that every test can say which characters a token holds; ids 256 and on as in `TOKENS`."""
    return Tokenizer.load(
        bpe.Tokenizer(VOCAB, {}, bpe.PreTokenizer.from_pattern("."), added_tokens=[bpe.AddedToken(EOS, "</s>")])
    )


TOKENS = ["ab", "cST", "OPx", "STOP", "xSTOPySTOP", "cSTO", "P", "A B", " stop here", "TOP"]
VOCAB = {bytes([byte]): byte for byte in range(256)} | {token.encode(): 256 + i for i, token in enumerate(TOKENS)}
EOS = 500


def ids(*tokens: str) -> list[int]:
    return [VOCAB[token.encode()] for token in tokens]


def feed(tokenizer: Tokenizer, token_ids: list[int], params: Params) -> tuple[str, list[str], str | None]:
    """(whole text, the pieces shown on the way, the stop string), as an engine drives it."""
    detokenizer = IncrementalDetokenizer(tokenizer, params)
    pieces = []
    for token_id in token_ids:
        stop = detokenizer.append(token_id)
        pieces.append(detokenizer.delta())
        assert "".join(pieces) == detokenizer.text
        if stop is not None:
            assert detokenizer.stop_reason == stop
            break
    text = detokenizer.finish()
    pieces.append(detokenizer.delta())
    assert "".join(pieces) == detokenizer.text == text == detokenizer.finish()
    return text, pieces, detokenizer.stop_reason


# --- characters --------------------------------------------------------------------------------------------------


def test_pieces_join_to_the_full_decode(tokenizer):
    any_ids = st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=14)
    texts = st.text("Hello wörld\n 日本語ď🦙客ab", max_size=16).map(lambda s: tokenizer.encode(s, False))

    @bounded
    @given(any_ids | texts, st.booleans())
    def check(token_ids: list[int], skip: bool) -> None:
        text, _, stop = feed(tokenizer, token_ids, Params(skip_special_tokens=skip))
        assert text == tokenizer.decode(token_ids, skip_special_tokens=skip)
        assert stop is None

    check()


def test_byte_level_text_is_what_hf_decodes():
    hf = byte_level()
    tokenizer = Tokenizer.load(PreTrainedTokenizerFast(tokenizer_object=hf))

    @bounded
    @given(st.lists(st.integers(0, hf.get_vocab_size() - 1), max_size=20), st.booleans())
    def check(token_ids: list[int], skip: bool) -> None:
        text, _, _ = feed(tokenizer, token_ids, Params(skip_special_tokens=skip))
        assert text == hf.decode(token_ids, skip_special_tokens=skip)

    check()


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_no_half_characters(make):
    """The bytes of "ď🦙客" one by one: a character appears when its last byte has come, and not before."""
    hf = make()
    tokenizer = Tokenizer.load(PreTrainedTokenizerFast(tokenizer_object=hf))
    one_byte = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    raw = "ď🦙客".encode()
    text, pieces, _ = feed(tokenizer, [one_byte[bytes([byte])] for byte in raw], Params())
    assert text == "ď🦙客"
    assert pieces == ["", "ď", "", "", "", "🦙", "", "", "客", ""]


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_invalid_bytes_come_out_and_do_not_stall(make):
    tokenizer = Tokenizer.load(PreTrainedTokenizerFast(tokenizer_object=make()))
    one_byte = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}

    def pieces(raw: bytes) -> list[str]:
        return feed(tokenizer, [one_byte[bytes([byte])] for byte in raw], Params())[1]

    assert "".join(pieces(b"\xffe")) == "\ufffde"
    assert pieces(b"\xff" * 50)[:50] == ["\ufffd"] * 50  # for ever invalid: shown as it comes
    assert pieces(b"e\xe5\xae") == ["e", "", "", "\ufffd"]  # an unfinished character at the end is flushed
    assert pieces(b"\xf0\x9f\xe5\xae\xa2") == ["", "", "\ufffd", "", "客", ""]  # given up, and the next one is whole


class Scripted(Tokenizer):
    """A tokenizer that only decodes whole texts, with a script of tokens: some are parts of a character."""

    is_bytewise = False
    special_token_ids = frozenset()
    vocab_size = 300

    def __init__(self) -> None:
        super().__init__(None, None)

    def decode(self, ids, skip_special_tokens=True):
        return b"".join(bytes([i]) if i < 256 else b"" for i in ids).decode(errors="replace").removeprefix(" ")

    def encode(self, prompt, add_special_tokens=True):
        return list(prompt.encode())

    def render_chat(self, messages, chat_template=None, add_generation_prompt=True):
        raise NotImplementedError

    def _lookup_bytes(self, token_id):
        return bytes([token_id])


def test_the_general_way_holds_characters_back_but_not_for_ever():
    tokenizer = Scripted()
    text, pieces, _ = feed(tokenizer, tokenizer.encode(" a ď🦙客 b"), Params())
    assert text == "a ď🦙客 b"
    assert "\ufffd" not in "".join(pieces)
    text, pieces, _ = feed(tokenizer, [0xFF, *b"a"], Params())
    assert text == "\ufffda"
    text, pieces, _ = feed(tokenizer, [0xFF] * 40, Params())
    assert text == "\ufffd" * 40
    assert max(map(len, pieces)) <= 4  # at most four tokens wait
    text, pieces, _ = feed(tokenizer, [*b"a", 0xE5, 0xAE], Params())
    assert (text, pieces) == ("a\ufffd", ["a", "", "", "\ufffd"])


def test_the_general_way_decodes_short_windows_only():
    tokenizer, longest = Scripted(), 0

    def decode(ids, skip_special_tokens=True):
        nonlocal longest
        longest = max(longest, len(ids))
        return Scripted.decode(tokenizer, ids)

    tokenizer.decode = decode
    detokenizer = IncrementalDetokenizer(tokenizer, Params())
    for token_id in list("ab ď🦙客".encode() + b"\xff\xfe\xfd") * 30:
        detokenizer.append(token_id)
    assert longest <= 12


def test_special_tokens_are_skipped_or_shown(letters):
    token_ids = [*ids("ab"), EOS, *ids("P")]
    assert feed(letters, token_ids, Params())[0] == "abP"
    assert feed(letters, token_ids, Params(skip_special_tokens=False))[0] == "ab</s>P"


def test_a_stop_token_has_no_text(letters):
    """As in vLLM: the token that ended the request stays in its ids, not in its text, unless asked for."""
    for include, expected in ((False, "ab"), (True, "abP")):
        detokenizer = IncrementalDetokenizer(letters, Params(include_stop_str_in_output=include))
        detokenizer.append(*ids("ab"))
        assert detokenizer.append(*ids("P"), is_stop_token=True) is None
        assert detokenizer.finish() == expected


def test_ids_without_a_token_do_no_harm(letters):
    assert feed(letters, [*ids("ab"), 70_000, *ids("P")], Params())[0] == "abP"


def test_continuing_a_prompt_keeps_the_space_between():
    """Llama 2's decoder strips one space at the start of a text; a continuation does not start there."""
    hf = byte_fallback()
    tokenizer = Tokenizer.load(PreTrainedTokenizerFast(tokenizer_object=hf))
    prompt, output = tokenizer.encode("Hello"), tokenizer.encode("Hello Hello")
    for prompt_ids, expected in (((), "Hello Hello"), (prompt, " Hello Hello"), ([1], "Hello Hello")):
        detokenizer = IncrementalDetokenizer(tokenizer, Params(), prompt_ids)
        for token_id in output:
            detokenizer.append(token_id)
        assert detokenizer.finish() == expected
    hf = metaspace()
    tokenizer = Tokenizer.load(PreTrainedTokenizerFast(tokenizer_object=hf))
    detokenizer = IncrementalDetokenizer(tokenizer, Params(), tokenizer.encode("Hello"))
    for token_id in tokenizer.encode("world"):
        detokenizer.append(token_id)
    assert detokenizer.finish() == " world"


# --- stop strings ------------------------------------------------------------------------------------------------


def test_stop_string_across_tokens(letters):
    """A stop string may begin inside one token and end inside another; no part of it is ever shown."""
    text, pieces, stop = feed(letters, ids("ab", "cST", "OPx"), Params(stop=["STOP"]))
    assert (text, stop) == ("abc", "STOP")
    assert not any("S" in piece for piece in pieces)


@pytest.mark.parametrize(
    ("tokens", "stop", "include", "expected", "reason"),
    [
        (["ab", "cST", "OPx"], ["STOP"], True, "abcSTOP", "STOP"),
        (["ab", "cST", "OPx"], "STOP", False, "abc", "STOP"),  # a single string, as SamplingParams allows
        (["ab", "cST", "OPx"], None, False, "abcSTOPx", None),
        (["ab", "cST", "ab"], ["STOP"], False, "abcSTab", None),  # begins, but does not end: released
        (["ab", "cST"], ["STOP"], False, "abcST", None),  # the request ends on the way: released
        (["STOP"], ["STOP"], False, "", "STOP"),
        (["xSTOPySTOP"], ["STOP"], False, "x", "STOP"),  # the first occurrence
        (["A B"], ["B", "A"], False, "", "A"),  # of two strings the one that is complete first, not first in the list
        (["ab", "cST", "OPx"], ["P", "STOP"], False, "abc", "STOP"),  # both end at P: cut where the longer begins
        (["cST", "OPx"], ["STOPx", "TO"], False, "cS", "TO"),
        (["ab", "P"], ["P"], False, "ab", "P"),  # one character: nothing is held back
        (["ab", "TOP", "ab"], ["日本"], False, "abTOPab", None),
    ],
)
def test_stop_strings(letters, tokens, stop, include, expected, reason):
    params = Params(stop=stop, include_stop_str_in_output=include)
    text, _, found = feed(letters, ids(*tokens), params)
    assert (text, found) == (expected, reason)


def test_hold_back_is_no_longer_than_it_must_be(letters):
    _, pieces, _ = feed(letters, ids("ab", "cST", "ab", "P"), Params(stop=["STOP", "P!"]))
    assert pieces == ["", "ab", "cS", "T", "abP"]
    _, pieces, _ = feed(letters, ids("ab", "cST", "OPx"), Params(stop=["STOP"], include_stop_str_in_output=True))
    assert pieces == ["", "ab", "cSTOP", ""]
    _, pieces, _ = feed(letters, ids("ab", "cST"), Params())
    assert pieces == ["ab", "cST", ""]


@pytest.mark.parametrize(
    ("tokens", "min_tokens", "expected", "reason"),
    [
        (["STOP", "ab", "STOP", "ab"], 1, "STOPab", "STOP"),  # the first is complete within min_tokens
        (["STOP", "ab", "STOP", "ab"], 3, "STOPabSTOPab", None),
        (["STOP", "ab"], 0, "", "STOP"),
        (["ab", "cST", "OPx"], 2, "abc", "STOP"),  # completed by the third token
        (["ab", "cST", "OPx"], 3, "abcSTOPx", None),
        (["STOP", "P", "ab"], 1, "STOPPab", None),
    ],
)
def test_min_tokens_holds_stop_strings_off(letters, tokens, min_tokens, expected, reason):
    """What is complete within the first min_tokens tokens is text; it does not stop the request later either."""
    for stop in (["STOP"], ["STOP", "a much longer string"]):  # held back does not mean searched again
        text, _, found = feed(letters, ids(*tokens), Params(stop=stop, min_tokens=min_tokens))
        assert (text, found) == (expected, reason)


@bounded
@given(
    st.lists(st.sampled_from(["a", "b", "ab", "ba", "aab", "é"]), max_size=12),
    st.lists(st.text("abé", min_size=1, max_size=4), min_size=1, max_size=3),
    st.booleans(),
)
def test_stop_strings_do_not_depend_on_the_tokens(parts, stop, include):
    """Against plain str.find over the whole text, however it is cut into tokens, down to parts of characters."""
    text = "".join(parts)
    ends = [(text.find(s) + len(s), text.find(s), s) for s in stop if s in text]
    end, begin, reason = min(ends, default=(len(text), len(text), None))
    expected = text[: end if include else begin]
    tokens = {part.encode(): i for i, part in enumerate(["ab", "ba", "aab"], start=256)}
    tokens |= {bytes([byte]): byte for byte in range(256)}
    tokenizer = Tokenizer.load(bpe.Tokenizer(tokens, {}, bpe.PreTokenizer.from_pattern(".")))
    as_parts = [i for part in parts for i in ([tokens[part.encode()]] if part.encode() in tokens else part.encode())]
    for token_ids in (as_parts, list(text.encode())):
        params = Params(stop=stop, include_stop_str_in_output=include)
        whole, pieces, found = feed(tokenizer, token_ids, params)
        assert (whole, found) == (expected, reason)
        assert "".join(pieces) == expected  # nothing beyond it was ever shown


def test_no_token_after_the_end(letters):
    detokenizer = IncrementalDetokenizer(letters, Params(stop=["STOP"]))
    assert detokenizer.append(*ids("STOP")) == "STOP"
    with pytest.raises(RuntimeError, match="finished"):
        detokenizer.append(*ids("ab"))
