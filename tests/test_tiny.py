"""The embedded tiny model and its corpus are what data/README.md says, as Hugging Face's own classes see them."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tokenizers import Tokenizer as HFTokenizer
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from llmlab.bpe import Tokenizer
from llmlab.hub import resolve_model

TINY = resolve_model("tiny")


@pytest.fixture(scope="module")
def build_corpus() -> Iterator[ModuleType]:
    """data/build_corpus.py, as its neighbour data/build_tiny.py imports it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).resolve().parents[1] / "data"))
        import build_corpus

        yield build_corpus


@pytest.fixture(scope="module")
def stories(build_corpus: ModuleType) -> list[tuple[str, str]]:
    return build_corpus.read_corpus()


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(TINY)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()


def test_small_and_of_the_promised_kind(model: PreTrainedModel) -> None:
    assert sum(file.stat().st_size for file in TINY.iterdir()) <= 4_000_000
    config = model.config
    assert config.architectures == ["LlamaForCausalLM"] and config.dtype == torch.float32
    assert json.loads((TINY / "config.json").read_text())["dtype"] == "bfloat16"
    assert config.num_attention_heads == 2 * config.num_key_value_heads
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_corpus_passes_its_own_filters(build_corpus: ModuleType, stories: list[tuple[str, str]]) -> None:
    assert build_corpus.CORPUS.stat().st_size <= 1_500_000
    assert [story for _, story in stories if build_corpus.refusal(story)] == []
    assert len({story for _, story in stories}) == len(stories) > 500


@pytest.mark.parametrize(
    ("story", "reason"),
    [
        ("Max ran. " * 25 + "The end.", "repetition"),
        ("Max ran.", "length"),
        ("Max saw the number 7.", "characters"),
        ("The café was closed.", "characters"),
        (
            "This is a story about a dog and a cat who went to the park one day. They played with a red ball under the old tree. "
            "Then the rain came and made every leaf wet. Both friends ran home quickly, laughing and splashing through puddles.",
            "words",
        ),
    ],
)
def test_filters_name_what_is_wrong(build_corpus: ModuleType, story: str, reason: str) -> None:
    assert build_corpus.refusal(story) == reason


def test_sentences_end_outside_quotations(build_corpus: ModuleType) -> None:
    text = '"Look! A cat," said Max. "Oh no!" He ran. "Wait'
    assert [text[:end] for end in build_corpus.sentence_ends(text)] == [
        '"Look! A cat," said Max.',
        '"Look! A cat," said Max. "Oh no!"',
        '"Look! A cat," said Max. "Oh no!" He ran.',
    ]
    assert build_corpus.plain("“Hi” –  it’s\n\n\n me…") == '"Hi" - it\'s\nme...'


def test_tokenizer_equals_hugging_faces(stories: list[tuple[str, str]]) -> None:
    ours, theirs = Tokenizer.from_file(TINY / "tokenizer.json"), HFTokenizer.from_file(str(TINY / "tokenizer.json"))
    assert ours.vocab_size == theirs.get_vocab_size() == 2048
    for text in [*(story for _, story in stories[::20]), "", "  12,345\n\t²é日本 🙂", "don't STOP"]:
        ids = ours.encode(text)
        assert ids == theirs.encode(text, add_special_tokens=False).ids
        assert ours.decode(ids) == text


@torch.no_grad()
def test_held_out_loss_is_the_recorded_one(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, stories: list[tuple[str, str]]
) -> None:
    total, count = 0.0, 0
    for _, story in stories[::20]:
        ids = tokenizer(story + "<|endoftext|>", return_tensors="pt")["input_ids"]
        total += F.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="sum").item()
        count += ids.shape[1] - 1
    recorded = json.loads((TINY / "training.json").read_text())
    assert total / count == pytest.approx(recorded["held_out_loss_bfloat16_weights"], abs=1e-3)
    with (TINY / "training_log.csv").open() as file:
        curve = [float(row["held_out_loss"]) for row in csv.DictReader(file)]
    assert curve[-1] == pytest.approx(recorded["held_out_loss_float32"], abs=1e-3)
    assert curve[-1] < 0.75 * curve[0]


def test_text_is_made_of_the_corpus_words(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, stories: list[tuple[str, str]]
) -> None:
    known = set(re.findall(r"[a-z']+", " ".join(story for _, story in stories).lower()))
    for text in ("Once upon a time", "One day, Lily the cat"):
        inputs = tokenizer(text, return_tensors="pt")
        out = model.generate(**inputs, max_new_tokens=200, do_sample=False)[0]
        assert out[-1] in model.generation_config.eos_token_id  # it knows when a story is over
        words = re.findall(r"[a-z']+", tokenizer.decode(out, skip_special_tokens=True).lower())
        assert len(words) > 30 and set(words) <= known


def test_answers_a_chat_with_a_story_that_ends(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [{"role": "user", "content": "Tell me a story about a dog named Max."}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == "<|im_start|>user\nTell me a story about a dog named Max.<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    out = model.generate(ids, max_new_tokens=200, do_sample=False)[0, ids.shape[1] :]
    assert out[-1] in model.generation_config.eos_token_id
    answer = tokenizer.decode(out, skip_special_tokens=True)
    assert len(answer.split()) > 30 and answer.isascii() and answer.endswith((".", "!", "?", '"'))
