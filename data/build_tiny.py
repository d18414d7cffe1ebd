"""Make data/tiny, the embedded model: corpus → tokenizer → training → a Hugging Face directory.

    python data/build_tiny.py [--threads 1]

A Llama with grouped-query attention and tied embeddings, about a million parameters, trained from scratch on
data/tiny_corpus.txt (data/build_corpus.py makes that, and is run first where it is missing). Each step keeps its result
in data/cache/tiny and is skipped when that is there; training goes on from its last checkpoint. Remove the folder to
start again. The held-out loss is of every twentieth story, never trained on.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from build_corpus import CORPUS, read_corpus
from torch import Tensor
from torch.nn import functional as F
from tqdm.auto import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

from llmlab.bpe import Tokenizer

DATA = Path(__file__).resolve().parent
WORK = DATA / "cache" / "tiny"
OUT = DATA / "tiny"

VOCAB_SIZE = 2048
END_OF_TEXT, TURN_START, TURN_END = SPECIAL_TOKENS = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SEED, SEQ_LEN, BATCH_SIZE, CHAT_SHARE = 0, 512, 8, 0.4
LEARNING_RATE, WARMUP, EVAL_EVERY = 4e-3, 50, 50


def split_stories() -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """(training, held-out) stories, each (request, story)."""
    stories = read_corpus()
    return [s for i, s in enumerate(stories) if i % 20], stories[::20]


def make_tokenizer() -> Tokenizer:
    path = WORK / "tokenizer.json"
    if not path.exists():
        training, _ = split_stories()
        Tokenizer.train((story for _, story in training), VOCAB_SIZE, special_tokens=SPECIAL_TOKENS).save(path)
    return Tokenizer.from_file(path)


def chat_prompt(request: str) -> str:
    """What CHAT_TEMPLATE makes of one user message, with the generation prompt."""
    return f"{TURN_START}user\n{request}{TURN_END}\n{TURN_START}assistant\n"


def as_text(request: str, story: str, chat: bool) -> str:
    """A training document: the bare story, or the same story as the answer in a chat; each with its end mark."""
    return f"{chat_prompt(request)}{story}{TURN_END}\n" if chat else story + END_OF_TEXT


def batch(documents: list[tuple[list[int], list[int]]], step: int) -> Tensor:
    """Token ids [BATCH_SIZE, SEQ_LEN + 1] from (bare, chat) documents.

    A row is filled with random stories and begins where a story begins, so that position 0 is what it is in a prompt.
    """
    rng = random.Random(f"{SEED} step {step}")
    rows = []
    for _ in range(BATCH_SIZE):
        ids: list[int] = []
        while len(ids) <= SEQ_LEN:
            bare, chat = rng.choice(documents)
            ids += chat if rng.random() < CHAT_SHARE else bare
        rows.append(ids[: SEQ_LEN + 1])
    return torch.tensor(rows)


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, tokenizer: Tokenizer, stories: list[tuple[str, str]]) -> float:
    """Mean cross-entropy in nats a token over bare stories, each alone, its end mark included, its first token not."""
    total, count = 0.0, 0
    for request, story in stories:
        ids = torch.tensor([tokenizer.encode(as_text(request, story, chat=False), "all")])
        total += F.cross_entropy(model(ids).logits[0, :-1].float(), ids[0, 1:], reduction="sum").item()
        count += ids.shape[1] - 1
    return total / count


def new_model(tokenizer: Tokenizer) -> LlamaForCausalLM:
    torch.manual_seed(SEED)
    special = tokenizer.special_tokens
    config = LlamaConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=SEQ_LEN,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=special[END_OF_TEXT],
        pad_token_id=special[END_OF_TEXT],
    )
    return LlamaForCausalLM(config)


def train(tokenizer: Tokenizer, steps: int) -> LlamaForCausalLM:
    """AdamW with warm-up and cosine decay; the checkpoint holds everything, so that an interrupted run can go on."""
    training, held_out = split_stories()
    documents = [tuple(tokenizer.encode(as_text(*s, chat), "all") for chat in (False, True)) for s in training]
    model = new_model(tokenizer)
    decayed = [p for p in model.parameters() if p.ndim == 2]
    plain = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}],
        lr=LEARNING_RATE,
        betas=(0.9, 0.98),
    )
    checkpoint, log = WORK / "checkpoint.pt", []
    state: dict[str, Any] = {"step": 0, "seconds": 0.0, "log": log}
    if checkpoint.exists():
        state = torch.load(checkpoint)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        log = state["log"]
    begin = time.monotonic() - state["seconds"]
    losses: list[float] = []
    for step in tqdm(range(state["step"], steps), initial=state["step"], total=steps, desc="training"):
        progress = max(0, step - WARMUP) / max(1, steps - WARMUP)
        for group in optimizer.param_groups:
            group["lr"] = (
                LEARNING_RATE * min(1.0, (step + 1) / WARMUP) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))
            )
        ids = batch(documents, step)
        logits = model(ids[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if (step + 1) % EVAL_EVERY == 0 or step + 1 == steps:
            model.eval()
            seconds = time.monotonic() - begin
            row = {"step": step + 1, "tokens": (step + 1) * BATCH_SIZE * SEQ_LEN, "seconds": round(seconds)}
            row |= {"train_loss": round(sum(losses) / len(losses), 4)}
            row |= {"held_out_loss": round(held_out_loss(model, tokenizer, held_out), 4)}
            log.append(row)
            tqdm.write(json.dumps(row))
            losses = []
            model.train()
            temporary = checkpoint.with_suffix(".new")
            saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "log": log}
            torch.save(saved | {"step": step + 1, "seconds": time.monotonic() - begin}, temporary)
            temporary.replace(checkpoint)
    with (WORK / "training_log.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(log[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(log)
    return model.eval()


def sample(model: LlamaForCausalLM, tokenizer: Tokenizer, prompt: str) -> str:
    """The greedy continuation of ``prompt``, up to an end mark."""
    ids = torch.tensor([tokenizer.encode(prompt, "all")])
    ends = [tokenizer.special_tokens[token] for token in (END_OF_TEXT, TURN_END)]
    out = model.generate(ids, max_new_tokens=200, do_sample=False, eos_token_id=ends, pad_token_id=ends[0])
    return tokenizer.decode(out[0, ids.shape[1] :].tolist(), skip_special_tokens=True)


def export(model: LlamaForCausalLM, tokenizer: Tokenizer) -> None:
    """Write data/tiny: bfloat16 weights, configs, tokenizer, chat template, training log, README with what was measured."""
    training, held_out = split_stories()
    trained_loss = held_out_loss(model, tokenizer, held_out)
    folder = WORK / "export"
    shutil.rmtree(folder, ignore_errors=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save(folder / "tokenizer.json")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    special = tokenizer.special_tokens
    ends = [special[END_OF_TEXT], special[TURN_END]]
    write_json(folder / "generation_config.json", {"eos_token_id": ends, "pad_token_id": ends[0]})
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
    }
    tokenizer_config |= {"clean_up_tokenization_spaces": False, "model_max_length": SEQ_LEN}
    write_json(folder / "tokenizer_config.json", tokenizer_config)
    shutil.copy(WORK / "training_log.csv", folder)

    stored = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with (WORK / "training_log.csv").open() as file:
        last = list(csv.DictReader(file))[-1]
    characters = sum(len(story) for _, story in held_out)
    tokens = sum(len(tokenizer.encode(story)) + 1 for _, story in held_out)
    loss = held_out_loss(stored, tokenizer, held_out)
    facts = {
        "parameters": stored.num_parameters(),
        "training_stories": len(training),
        "held_out_stories": len(held_out),
        "characters_per_token": round(characters / tokens, 3),
        "training_steps": int(last["step"]),
        "training_tokens": int(last["tokens"]),
        "training_seconds": int(last["seconds"]),
        "held_out_loss_float32": round(trained_loss, 4),
        "held_out_loss_bfloat16_weights": round(loss, 4),
    }
    write_json(folder / "training.json", facts)
    for file in folder.iterdir():
        file.chmod(0o644)  # some are written for the owner's eyes only
    shutil.rmtree(OUT, ignore_errors=True)
    folder.rename(OUT)
    print(json.dumps(facts, indent=2))
    for prompt in ("Once upon a time", chat_prompt("Tell me a story about a dog named Max.")):
        print(f"--- {prompt}\n{sample(stored, tokenizer, prompt)}")


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500, help="training steps (default: %(default)s)")
    parser.add_argument("--threads", type=int, help="torch threads (default: torch's own choice)")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    WORK.mkdir(parents=True, exist_ok=True)
    if not CORPUS.exists():
        subprocess.run([sys.executable, str(DATA / "build_corpus.py")], check=True)
    tokenizer = make_tokenizer()
    export(train(tokenizer, args.steps), tokenizer)


if __name__ == "__main__":
    main()
