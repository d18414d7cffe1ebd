"""Merge steps, oracles and compression of notebook 01, against the tokenizer, Hugging Face and tiktoken."""

import pytest
import tokenizers

from llmlab.bpe import Tokenizer, Trainer
from llmlab.measure.experiments.bpe import as_tiktoken, compression, encode_speed, hf_merges, merge_steps, stories

TEXT = (
    "the lowest of the low, the newest of the new: lower, newer, wider, widest! aaaa banana\n" * 7 + "déjà vu 🦙 12345"
)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(TEXT, 330)


@pytest.mark.parametrize("piece", [" lowest", "aaaaaaa", "newer", " widest", "x", "🦙"])
def test_the_steps_end_in_the_tokenizer_s_own_tokens(tokenizer, piece):
    steps = merge_steps(tokenizer, piece)
    covered = {i: (i, i + 1) for i in range(len(piece.encode()))}
    for row in steps.itertuples():
        assert row.left + row.right == row.token == piece.encode()[row.start : row.end]
        assert covered[row.start] == (row.start, row.middle)
        assert covered.pop(row.middle) == (row.middle, row.end)
        covered[row.start] = (row.start, row.end)
    tokens = [piece.encode()[start:end] for start, end in sorted(covered.values())]
    assert tokens == [tokenizer.token_bytes(i) for i in tokenizer.encode(piece)]


def test_hf_s_trainer_makes_the_same_merges():
    trainer = Trainer(TEXT)
    ours = [(trainer.vocab[m.pair[0]], trainer.vocab[m.pair[1]]) for m, _ in zip(trainer, range(60))]
    assert hf_merges(TEXT, 60) == ours


def test_tiktoken_encodes_the_same(tokenizer):
    assert as_tiktoken(tokenizer).encode_ordinary(TEXT) == tokenizer.encode(TEXT)


def test_tiktoken_refuses_ids_that_are_no_ranks(tokenizer):
    swapped = {pair: (len(tokenizer.merges) - 1 - rank, i) for pair, (rank, i) in tokenizer.merges.items()}
    with pytest.raises(ValueError, match="order of its merges"):
        as_tiktoken(Tokenizer(tokenizer.vocab, swapped, tokenizer.pre_tokenizer))


def test_compression_counts_what_hf_counts(tmp_path):
    table, largest = compression(TEXT, {"same": TEXT, "other": "lowlands, newts"}, [256, 270, 300, 100_000])
    assert table["vocab_size"].unique().tolist() == [256, 270, 300]  # the text has no pairs left for more
    assert table.query("vocab_size == 256")["bytes_per_token"].tolist() == [1.0, 1.0]
    assert table.query("text == 'same'")["tokens"].is_monotonic_decreasing
    largest.save(tmp_path / "t.json")
    hf = tokenizers.Tokenizer.from_file(str(tmp_path / "t.json"))
    assert table.query("text == 'same' and vocab_size == 300")["tokens"].item() == len(hf.encode(TEXT).ids)


def test_the_corpus_is_cut_at_a_line():
    train, held_out = stories()
    assert train.endswith("\n")
    assert 0.09 < len(held_out) / (len(train) + len(held_out)) < 0.11


def test_speed_clocks_each_encoder(tokenizer):
    table, compared = encode_speed({"a": tokenizer.encode, "b": lambda text: text}, TEXT, max_seconds=0.01)
    assert table["encoder"].tolist() == ["a", "b"]
    assert (table["bytes_per_s"] > 0).all()
    assert [c.other for c in compared] == ["b"]
