"""llmlab.bpe against Hugging Face tokenizers and tiktoken, id for id, and on the texts that tokenizers tend to get wrong."""

import base64
import json
import sysconfig
import unicodedata
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import tiktoken
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from llmlab.bpe import Tokenizer, Trainer, merge_pair
from llmlab.pretokenize import GPT2_PATTERN, LLAMA3_PATTERN, QWEN2_PATTERN, byte_alphabet

SAMPLES = [
    "",
    " ",
    "  a",
    "a  b",
    "\n\n",
    "\u00a0",
    "é",
    "e\u0301",
    "👨‍👩‍👧",
    "ď🦙客",
    "It's 12345 o'clock, WE'LL see\r\n\r\n\tdef f(x):  return x²+½\n",
    "  indented 007\n    more   \n",
    "Việt Nam – Tiếng Việt; 中文字符 １２３ ٣٤٥ Ⅷ ไทย नमस्ते",
    "\x00\x1f\x7f\u2028\u3000\ufeff\ufffd",
    "e\u0301\u0301 e\u0301\u0301\u0323 é\u0301",
    "one\n# two\n\nthree #\n#",
    "a" * 300 + "1" * 50 + "\n" * 20,
]
SPECIAL = ["<|bos|>", "<|eot|>", "<a>", "<a><b>"]
# Characters assigned since Unicode 3.2: every library's tables agree on them.
STABLE = [c for c in map(chr, range(0x20000)) if unicodedata.ucd_3_2_0.category(c) not in ("Cn", "Cs", "Co")]
TEXT = st.lists(
    st.one_of(
        st.text(st.sampled_from(STABLE), max_size=6),
        st.text(st.sampled_from(" \n\r\tab1'.²é\u0301\u00a0\u3000中👍"), max_size=12),
        st.sampled_from(SAMPLES + SPECIAL + ["<tool>", "'S", "'ll", "return", "self.", " 42"]),
    ),
    max_size=8,
).map("".join)
bounded = settings(max_examples=120, deadline=None, derandomize=True)


def corpus() -> str:
    stdlib = Path(sysconfig.get_path("stdlib"))
    sources = [(stdlib / name).read_text(encoding="utf-8") for name in ("argparse.py", "typing.py", "decimal.py")]
    names = "".join(unicodedata.name(c, "") + c for c in STABLE[::97])
    return "\n".join(sources) + names + "\n".join(SAMPLES) * 20


@pytest.fixture(scope="module")
def text() -> str:
    return corpus()


def train_hf(style: str, text: str) -> tokenizers.Tokenizer:
    """A tokenizer built by Hugging Face's own library, configured as the named model family's is."""
    hf = tokenizers.Tokenizer(models.BPE(ignore_merges=style == "llama3"))

    def split(pattern: str) -> pre_tokenizers.PreTokenizer:
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated", False), byte_level])

    if style == "qwen2":
        hf.normalizer = normalizers.NFC()
    hf.pre_tokenizer = {
        "gpt2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
        "gpt2-prefix-space": lambda: pre_tokenizers.ByteLevel(add_prefix_space=True),
        "llama3": lambda: split(LLAMA3_PATTERN),
        "qwen2": lambda: split(QWEN2_PATTERN),
        "smollm": lambda: pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        ),
        "lines": lambda: split(r"^#.*$|\w+$"),
        "digit-runs": lambda: pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=False), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        ),
        "matches-only": lambda: pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(r"\p{L}+|\d| ?[^\s\p{L}\d]+"), "removed", True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        ),
    }[style]()
    hf.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1200,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL[:1] if style == "gpt2" else [],
        show_progress=False,
    )
    hf.train_from_iterator([text], trainer)
    hf.add_special_tokens([AddedToken(token, normalized=style == "qwen2", special=True) for token in SPECIAL])
    hf.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("e\u0301\u0301", normalized=True)])
    if style == "llama3":
        bos = hf.token_to_id("<|bos|>")
        hf.post_processor = processors.Sequence(
            [
                processors.ByteLevel(),
                processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", bos)]),
            ]
        )
    return hf


STYLES = ["gpt2", "gpt2-prefix-space", "llama3", "qwen2", "smollm", "lines", "digit-runs", "matches-only"]


@pytest.fixture(scope="module", params=STYLES)
def pair(request, text, tmp_path_factory) -> tuple[str, Tokenizer, tokenizers.Tokenizer]:
    """(style, ours read from the file that theirs saved, theirs)"""
    hf = train_hf(request.param, text)
    path = tmp_path_factory.mktemp("hf") / "tokenizer.json"
    hf.save(str(path))
    return request.param, Tokenizer.from_file(path), hf


@pytest.fixture(scope="module")
def trained(text) -> Tokenizer:
    return Tokenizer.train(text, 700, special_tokens=SPECIAL)


def plain_ids(hf: tokenizers.Tokenizer, s: str) -> list[int]:
    hf.encode_special_tokens = True
    return hf.encode(s, add_special_tokens=False).ids


def special_ids(hf: tokenizers.Tokenizer, s: str, add_special_tokens: bool = False) -> list[int]:
    hf.encode_special_tokens = False
    return hf.encode(s, add_special_tokens=add_special_tokens).ids


# --- encoding and decoding, against Hugging Face -----------------------------------------------------------------


def test_equals_hf(pair):
    style, ours, hf = pair

    @bounded
    @given(TEXT)
    def check(s: str) -> None:
        assert ours.encode(s) == plain_ids(hf, s)
        assert ours.encode(s, allowed_special="all") == special_ids(hf, s)
        assert ours.encode(s, allowed_special="all", add_special_tokens=True) == special_ids(hf, s, True)

    check()
    for s in SAMPLES:
        assert ours.encode(s) == plain_ids(hf, s), (style, s)


def test_corpus_equals_hf(pair, text):
    _, ours, hf = pair
    assert ours.encode(text) == plain_ids(hf, text)
    assert ours.vocab_size == hf.get_vocab_size()


def test_saved_file_loads_in_hf_and_encodes_identically(pair, tmp_path):
    _, ours, hf = pair
    ours.save(tmp_path / "tokenizer.json")
    reloaded, again = (
        tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")),
        Tokenizer.from_file(tmp_path / "tokenizer.json"),
    )
    assert reloaded.get_vocab() == hf.get_vocab()

    @settings(bounded, max_examples=40)
    @given(TEXT)
    def check(s: str) -> None:
        assert special_ids(reloaded, s, True) == special_ids(hf, s, True)
        assert plain_ids(reloaded, s) == again.encode(s)

    check()


@pytest.mark.parametrize("pair", ["gpt2", "llama3", "qwen2", "smollm", "lines", "digit-runs"], indirect=True)
def test_round_trip(pair):
    style, ours, _ = pair

    @bounded
    @given(TEXT)
    def check(s: str) -> None:
        expected = unicodedata.normalize("NFC", s) if style == "qwen2" else s
        assert ours.decode(ours.encode(s)) == expected

    check()


def test_decode_of_any_ids_equals_hf(pair):
    _, ours, hf = pair

    @bounded
    @given(st.lists(st.integers(0, ours.vocab_size - 1), max_size=12), st.booleans())
    def check(ids: list[int], skip: bool) -> None:
        assert ours.decode(ids, skip_special_tokens=skip) == hf.decode(ids, skip_special_tokens=skip)

    check()


@pytest.mark.parametrize("pattern", [GPT2_PATTERN, LLAMA3_PATTERN, QWEN2_PATTERN])
def test_equals_tiktoken(pattern, text, tmp_path):
    trained = Tokenizer.train(text, 900, pattern=pattern)
    ranks = trained.vocab | {b"Zqxjkv": trained.vocab_size}  # no two tokens join to it, but a piece may be it
    path = tmp_path / "ranks.tiktoken"
    path.write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(token), i) for token, i in ranks.items()))
    special = {"<|bos|>": 1000, "<|eot|>": 1001}
    ours = Tokenizer.from_file(path, pattern=pattern, special_tokens=special)
    oracle = tiktoken.Encoding("toy", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)

    @bounded
    @given(TEXT)
    def check(s: str) -> None:
        assert ours.encode(s) == oracle.encode(s, disallowed_special=())
        assert ours.encode(s, allowed_special="all") == oracle.encode(s, allowed_special="all")
        assert ours.encode(s, allowed_special={"<|bos|>"}) == oracle.encode(
            s, allowed_special={"<|bos|>"}, disallowed_special=()
        )
        assert ours.decode(ours.encode(s)) == s

    check()
    text += "Zqxjkv \nZqxjkv"
    assert ours.encode(text) == oracle.encode(text, disallowed_special=())
    assert trained.vocab_size in ours.encode(text)
    ours.save(tmp_path / "tokenizer.json")  # the special ids leave a gap behind the ranks: the file must keep it
    hf = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert special_ids(hf, text + "<|eot|>") == oracle.encode(text + "<|eot|>", allowed_special="all")


# --- training ----------------------------------------------------------------------------------------------------


def test_training_makes_the_merges_that_hf_makes(text):
    """tokenizers' trainer orders its alphabet by character: give byte b the character U+4E00 + b, and ties agree too."""

    def spell(raw: bytes) -> str:
        return "".join(chr(0x4E00 + byte) for byte in raw)

    ours = Trainer(text)
    steps = [ours.step() for _ in range(1500)]
    oracle = tokenizers.Tokenizer(models.BPE())
    oracle.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    pieces = tokenizers.pre_tokenizers.Split(Regex(LLAMA3_PATTERN), "isolated", False).pre_tokenize_str(text)
    oracle.train_from_iterator(
        [" ".join(spell(piece.encode()) for piece, _ in pieces)],
        trainers.BpeTrainer(
            vocab_size=256 + 1500, initial_alphabet=[spell(bytes([b])) for b in range(256)], show_progress=False
        ),
    )
    merges = json.loads(oracle.to_str())["model"]["merges"][: len(steps)]
    assert [tuple(merge) for merge in merges] == [tuple(spell(ours.vocab[i]) for i in step.pair) for step in steps]


def test_every_step_takes_the_most_frequent_pair():
    trainer = Trainer("the cat sat on the mat; that hat, the bat! aaaa aaa banana bandana " * 3)
    while True:
        fresh: Counter = Counter()
        for word, occurrences in zip(trainer.words, trainer.word_counts):
            for pair in pairwise(word):
                fresh[pair] += occurrences
        assert +trainer.pair_counts == fresh
        step = trainer.step()
        if step is None:
            break
        assert step.count == max(fresh.values())
        assert step.pair == min(pair for pair, count in fresh.items() if count == step.count)
        assert step.token == trainer.vocab[step.new_id] == trainer.vocab[step.pair[0]] + trainer.vocab[step.pair[1]]
    assert not fresh
    assert len(trainer.merges) > 20


def test_train_is_the_steps_of_the_trainer(text):
    trainer = Trainer(text)
    steps = [step for step, _ in zip(trainer, range(50))]
    tokenizer = Tokenizer.train(text, 256 + 50)
    assert [tokenizer.token_bytes(256 + i) for i in range(50)] == [step.token for step in steps]


def test_textbook_example():
    """aaabdaaabac: Z=aa, Y=ab, X=ZY gives XdXac."""
    tokenizer = Tokenizer.train("aaabdaaabac", 259)
    assert tokenizer.encode("aaabdaaabac") == [258, ord("d"), 258, ord("a"), ord("c")]
    assert [tokenizer.token_bytes(i) for i in (256, 257, 258)] == [b"aa", b"ab", b"aaab"]


def test_overlapping_pairs_merge_left_to_right():
    a, x = 97, 256
    assert merge_pair([a, a, a], (a, a), x) == [x, a]
    assert merge_pair([a, a, a, a], (a, a), x) == [x, x]
    tokenizer = Tokenizer.train("aa", 257)
    assert tokenizer.encode("aaa") == [x, a]
    assert tokenizer.encode("aaaa") == [x, x]


@pytest.mark.parametrize(("text", "size"), [("ab", 257), ("", 256), ("a", 256), ("a b c", 258)])
def test_training_stops_early_when_no_pair_is_left(text, size):
    assert Tokenizer.train(text, 300).vocab_size == size


def test_special_tokens_come_last_and_take_no_part_in_training():
    tokenizer = Tokenizer.train("<|eot|>ab<|eot|>ab", 300, special_tokens=["<|eot|>", "<|pad|>"])
    assert tokenizer.special_tokens == {"<|eot|>": 257, "<|pad|>": 258}
    assert tokenizer.vocab_size == 259
    assert tokenizer.encode("<|eot|>ab", allowed_special="all") == [257, 256]


@bounded
@given(st.lists(st.text("ab ", max_size=30), max_size=6))
def test_one_spelling_is_one_token(texts):
    """Merges spell distinct tokens: a vocabulary maps a spelling to one id. Trained to the end, a piece is one token."""
    trainer = Trainer(texts)
    merges = list(trainer)
    assert len(set(trainer.vocab)) == len(trainer.vocab) == 256 + len(merges)
    assert all(len(word) == 1 for word in trainer.words)


def test_training_twice_gives_the_same(text, trained):
    again = Tokenizer.train(iter([text]), 700, special_tokens=SPECIAL)
    assert again.vocab == trained.vocab
    assert again.merges == trained.merges


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"vocab_size": 255}, "vocab_size=255"),
        ({"vocab_size": 257, "special_tokens": ["<x>", "<y>"]}, "vocab_size=257"),
        ({"vocab_size": 300, "special_tokens": ["<x>", "<x>"]}, "special_tokens"),
        ({"vocab_size": 300, "special_tokens": [""]}, "special_tokens"),
        ({"vocab_size": 300, "pattern": "("}, "not a regular expression"),
        ({"vocab_size": 300, "pattern": r"\p{N}{1,3}+"}, "ambiguous"),
    ],
)
def test_train_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        Tokenizer.train("some text", **arguments)


# --- special tokens, whole pieces, round trips --------------------------------------------------------------------


def toy_json(**model) -> dict:
    """A byte-level tokenizer.json with "abc" in the vocabulary and (b, c) as its only merge."""
    vocab = {char: i + 10 for i, char in enumerate(byte_alphabet().values())} | {"abc": 9, "bc": 8}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": vocab, "merges": ["b c"]} | model,
    }


def load(config: dict, tmp_path: Path) -> Tokenizer:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return Tokenizer.from_file(path)


def test_ignore_merges_looks_the_whole_piece_up_first(tmp_path):
    a = load(toy_json(), tmp_path).vocab[b"a"]
    assert load(toy_json(ignore_merges=True), tmp_path).encode("abc") == [9]
    assert load(toy_json(ignore_merges=False), tmp_path).encode("abc") == [a, 8]


def test_special_text_is_plain_unless_allowed(trained):
    eot = trained.special_tokens["<|eot|>"]
    assert eot not in trained.encode("hi<|eot|>")
    assert len(trained.encode("<|eot|>")) > 1
    assert trained.encode("<|eot|>", allowed_special="all") == [eot]
    assert trained.encode("<|eot|>", allowed_special={"<|eot|>"}) == [eot]
    assert eot not in trained.encode("<|eot|>", allowed_special={"<|bos|>"})
    assert trained.decode(trained.encode("<|eot|>")) == "<|eot|>"


def test_longest_special_token_wins(trained):
    assert trained.encode("<a><b>", allowed_special="all") == [trained.special_tokens["<a><b>"]]
    short = trained.special_tokens["<a>"]
    assert trained.encode("<a><b>", allowed_special={"<a>"}) == [short, *trained.encode("<b>")]


@pytest.mark.parametrize("allowed", ["<|eot|>", {"<|unknown|>"}, ["<|eot|>", "x"]])
def test_allowed_special_must_name_special_tokens(trained, allowed):
    with pytest.raises(ValueError, match="allowed_special"):
        trained.encode("text", allowed_special=allowed)


@pytest.mark.parametrize("s", SAMPLES)
def test_round_trip_of_known_bad_cases(trained, s):
    assert trained.decode(trained.encode(s)) == s


def test_long_pieces_equal_hf(trained, tmp_path):
    """One piece of 50,000 characters: a quadratic merge loop would not come back."""
    trained.save(tmp_path / "tokenizer.json")
    hf = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for s in ("a" * 50_000, "returnself" * 5_000, " " * 50_000):
        assert trained.encode(s) == plain_ids(hf, s)


def test_decode_names_an_unknown_id(trained):
    with pytest.raises(ValueError, match="99999"):
        trained.decode([1, 99_999])


def test_decode_can_skip_special_tokens(trained):
    ids = trained.encode("<|bos|>hi<|eot|>", allowed_special="all")
    assert trained.decode(ids) == "<|bos|>hi<|eot|>"
    assert trained.decode(ids, skip_special_tokens=True) == "hi"


# --- files -------------------------------------------------------------------------------------------------------


def test_missing_bytes_are_lost_as_in_hf_but_not_silently(tmp_path):
    """A vocabulary trained without the full byte alphabet: tokenizers drops what it can't spell; so do we, and warn."""
    config = toy_json()
    del config["model"]["vocab"][byte_alphabet()[0xC3]]
    ours, hf = load(config, tmp_path), tokenizers.Tokenizer.from_str(json.dumps(config))
    for s in ("é", "bÃc", "aÃbÃcé"):
        with pytest.warns(UserWarning, match="0xc3"):
            assert ours.encode(s) == hf.encode(s).ids
    config["model"]["unk_token"] = "a"
    ours, hf = load(config, tmp_path), tokenizers.Tokenizer.from_str(json.dumps(config))
    for s in ("é", "bÃc", "aÃbÃcé", "ÃÃ"):
        assert ours.encode(s) == hf.encode(s).ids
    ours.save(tmp_path / "saved.json")
    assert Tokenizer.from_file(tmp_path / "saved.json").encode("aÃbÃcé") == hf.encode("aÃbÃcé").ids


@pytest.mark.model
@pytest.mark.filterwarnings("ignore:the vocabulary has no token")
def test_the_default_model_s_tokenizer_equals_hf(default_model, text):
    path = default_model / "tokenizer.json"
    ours, hf = Tokenizer.from_file(path), tokenizers.Tokenizer.from_file(str(path))

    @bounded
    @given(TEXT)
    def check(s: str) -> None:
        assert ours.encode(s) == plain_ids(hf, s)
        assert ours.encode(s + "<|im_end|>", allowed_special="all") == special_ids(hf, s + "<|im_end|>")

    check()
    assert ours.encode(text) == plain_ids(hf, text)
    assert ours.decode(ours.encode(text)) == hf.decode(plain_ids(hf, text))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"pre_tokenizer": None}, "byte-level"),
        ({"pre_tokenizer": {"type": "Metaspace", "replacement": "▁"}}, "Metaspace"),
        (
            {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Whitespace"}, {"type": "ByteLevel"}]}},
            "Whitespace",
        ),
        (
            {
                "pre_tokenizer": {
                    "type": "Sequence",
                    "pretokenizers": [
                        {"type": "Split", "pattern": {"Regex": "a"}, "behavior": "MergedWithNext", "invert": False},
                        {"type": "ByteLevel"},
                    ],
                }
            },
            "MergedWithNext",
        ),
        ({"normalizer": {"type": "Lowercase"}}, "Lowercase"),
        ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Strip"}]}}, "Strip"),
        ({"post_processor": {"type": "BertProcessing", "sep": ["a", 1], "cls": ["b", 2]}}, "BertProcessing"),
        ({"decoder": {"type": "WordPiece"}}, "WordPiece"),
        ({"truncation": {"max_length": 4}}, "truncation"),
        ({"padding": {"strategy": "BatchLongest"}}, "padding"),
        ({"added_tokens": [{"id": 500, "content": "<m>", "lstrip": True}]}, "lstrip"),
        ({"added_tokens": [{"id": 500, "content": "<m>", "single_word": True}]}, "single_word"),
        ({"added_tokens": [{"id": 500, "content": "abc"}]}, "two ids"),
        ({"model": {"type": "WordPiece", "vocab": {}}}, "WordPiece"),
        ({"model": {"type": "Unigram", "vocab": []}}, "Unigram"),
        ({"model": toy_json(byte_fallback=True)["model"]}, "byte_fallback"),
        ({"model": toy_json(dropout=0.1)["model"]}, "dropout"),
        ({"model": toy_json(end_of_word_suffix="</w>")["model"]}, "end_of_word_suffix"),
        ({"model": toy_json(continuing_subword_prefix="##")["model"]}, "continuing_subword_prefix"),
        ({"model": toy_json(merges=["b z"])["model"]}, "not in the vocabulary"),
        ({"model": toy_json(vocab={"a b": 0})["model"]}, "byte alphabet"),
        ({"model": toy_json(unk_token="<unk>")["model"]}, "<unk>"),
        ({"model": None}, "tokenizer.json"),
    ],
)
def test_what_is_not_understood_is_named(changes, named, tmp_path):
    with pytest.raises(ValueError, match=named):
        load(toy_json() | changes, tmp_path)


def test_bad_files(tmp_path):
    with pytest.raises(FileNotFoundError):
        Tokenizer.from_file(tmp_path / "absent.json")
    path = tmp_path / "broken"
    path.write_text('{"model": ')
    with pytest.raises(ValueError, match="broken"):
        Tokenizer.from_file(path)
    path.write_text("{}")
    with pytest.raises(ValueError, match="model"):
        Tokenizer.from_file(path)
    path.write_bytes(b"YQ== 0\n")
    with pytest.raises(ValueError, match="pattern"):
        Tokenizer.from_file(path)
    with pytest.raises(ValueError, match="special token '<x>'"):
        Tokenizer.from_file(path, pattern=GPT2_PATTERN, special_tokens={"<x>": 0})
    for content in (b"YQ== zero\n", b"!!! 0\n", b"YQ==\n", b""):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="rank file"):
            Tokenizer.from_file(path, pattern=GPT2_PATTERN)
    good = tmp_path / "tokenizer.json"
    Tokenizer.train("ab", 257).save(good)
    with pytest.raises(ValueError, match="brings its own"):
        Tokenizer.from_file(good, pattern=GPT2_PATTERN)


def test_a_special_token_that_reads_as_a_byte_is_not_saved_wrongly(tmp_path):
    """tokenizer.json spells byte 0xE9 as "é": a special token "é" can't be told from it there."""
    tokenizer = Tokenizer.train("ab", 300, special_tokens=["é"])
    assert tokenizer.decode(tokenizer.encode("é", allowed_special="all")) == "é"
    with pytest.raises(ValueError, match="can't be saved"):
        tokenizer.save(tmp_path / "tokenizer.json")


def test_byte_alphabet_is_the_byte_level_alphabet():
    assert sorted(byte_alphabet().values()) == sorted(pre_tokenizers.ByteLevel.alphabet())
    assert [byte_alphabet()[ord(c)] for c in " \nA"] == ["Ġ", "Ċ", "A"]
