"""Make data/tiny_corpus.txt: short, simple English stories, told by the default model on llmlab's own engine.

    python data/build_corpus.py [--minutes 25] [--threads 1]

Every story has two parts. First the model goes on from an opening sentence that is drawn, like the story's subject, from
the word lists below, and what it wrote is cut after the last whole sentence. Then it is given the beginning of an ending
("In the end, …") and finishes that one sentence. Raw results are appended to data/cache/tiny/stories.jsonl, a batch at a
time, so an interrupted run goes on where it stopped; the filters run over all of them at the end and write the corpus.
The words and the sampling seeds of story number i depend on i alone.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmlab import LLM, SamplingParams

DATA = Path(__file__).resolve().parent
CORPUS = DATA / "tiny_corpus.txt"
RAW = DATA / "cache" / "tiny" / "stories.jsonl"


def phrases(text: str) -> list[str]:
    return [" ".join(phrase.split()) for phrase in text.split("|")]


GIRLS = """Ada Alma Anna Bella Clara Daisy Dora Ella Emma Hana Ida Jill Lily Lola Lucy Mia Nina Nora Pam Polly Rosa Ruby
    Sara Uma Vera Zoe""".split()
BOYS = "Ben Bobo Dan Finn Fred Gus Jack Kim Leo Max Milo Oscar Otto Pip Sam Tim Toby Tom Will".split()
WHO = """bear bird boy boy boy bunny cat chick cow dog dog donkey duck elephant fish fox frog girl girl girl goat horse
    kitten lamb lion monkey mouse owl panda penguin pig pony puppy rabbit sheep squirrel tiger turtle""".split()
TRAITS = "brave clever curious friendly funny gentle happy hungry kind little lonely quiet shy silly sleepy small young".split()
THINGS = phrases("""a red ball|a blue kite|a little boat|a big box|a shiny key|a yellow hat|a warm coat|a green leaf|a magic
    flower|a drum|a bell|a lost toy|a tall tree|a round stone|a nest|a honey pot|a big cake|a red apple|a basket of
    berries|a cup of milk|a loaf of bread|a picture book|a soft blanket|a small lamp|a bright star|a balloon|a
    snowman|a sand castle|a toy train|a swing|a bike|a pair of boots|a feather|a shell|a gold coin|a letter|a map|a
    broken cup|a puddle|a rainbow|a butterfly|a carrot|a pumpkin|a lemon|a new friend|a bridge|a sled|an umbrella|an
    egg|an old chair""")
PLACES = phrases("""in the garden|in the forest|in the kitchen|in the barn|in the park|in the snow|in the meadow|in the village|in
    the boat|in the cave|in the yard|by the lake|by the sea|by the pond|by the window|on the hill|on the farm|on the
    roof|at the beach|at the market|at school|at home|under the bridge|under the big tree|near the mill|near the old
    house""")
OPENINGS = [
    "Once upon a time, there was a {trait} {who} named {name}. {name} lived {place}.",
    "Once upon a time, a {trait} {who} named {name} found {thing} {place}.",
    "One day, {name} the {who} found {thing} {place}.",
    "One morning, {name} the {who} woke up early. The sun was shining {place}.",
    "It was a sunny day. {name} the {who} was playing {place}.",
    "It was raining. {name} the {who} sat {place} and looked at {thing}.",
    "{name} was a {trait} {who}. {name} had {thing}.",
    "{name} and {friend} were best friends. They played {place} every day.",
    "{name} the {who} was sad. {name} had lost {thing}.",
    "{name} wanted to give {friend} {thing}.",
    "There once was a {trait} {who} named {name} who loved to sing.",
    "On a cold night, a {trait} {who} named {name} saw {thing} {place}.",
    '"Look!" said {name} the {who}. "I see {thing}!"',
    '"Can you help me?" asked {name} the {trait} {who}.',
]
ENDINGS = [
    "In the end,",
    "From that day on,",
    "That night,",
    "At last,",
    "{name} smiled and said,",
    "{name} was happy because",
    "{name} learned that",
    "After that,",
]
REQUESTS = [
    "Tell me a story about {a_who} named {name}.",
    "Tell me a story about {thing}.",
    "Tell me a story about {name} the {who} and {thing}.",
    "Write a story about {a_who} {place}.",
    "Please tell me a story about {name}.",
    "Can you write a story about {a_who}?",
]

# Words that show that the model talks about its text, or of what doesn't belong in a story for small children.
UNWANTED = set(
    """story stories tale tales children's assistant ai language model title chapter author reader readers example user
    sure here's kill killed killing die died dies dead death blood gun guns knife drunk wine beer alcohol drug drugs
    naked sex sexy marry married wedding war soldier soldiers murder poison corpse hell devil god jesus bible church
    hate hated stupid fat ugly slave""".split()
)
MIN_WORDS, MAX_WORDS, MIN_SENTENCES = 45, 130, 4
RARE, MAX_RARE = 4, 2  # a word is rare if fewer stories than this have it; how many of them a story may have
SENTENCE_END = re.compile(r"""[.!?]["']?(?=\s|$)""")


@dataclass(frozen=True)
class Subject:
    """What story number ``index`` is about, as drawn from the word lists."""

    index: int
    prompt: str
    opening: str
    ending: str
    request: str


def subject(index: int) -> Subject:
    rng = random.Random(f"story {index}")
    who, trait, thing, place = (rng.choice(words) for words in (WHO, TRAITS, THINGS, PLACES))
    name, friend = rng.sample({"girl": GIRLS, "boy": BOYS}.get(who, GIRLS + BOYS), 2)
    words: dict[str, Any] = {"name": name, "friend": friend, "who": who, "trait": trait, "thing": thing, "place": place}
    words["a_who"] = ("an " if who[0] in "aeiou" else "a ") + who
    prompt = "Write a short story for small children about {a_who} named {name} and {thing} {place}. Use simple words."
    opening, ending, request = (rng.choice(choices) for choices in (OPENINGS, ENDINGS, REQUESTS))
    return Subject(index, *(text.format(**words) for text in (prompt, opening, ending, request)))


def plain(text: str) -> str:
    """Straight quotes, ASCII dashes, one newline between paragraphs, no other runs of white space."""
    for fancy, ascii_ in {"“": '"', "”": '"', "’": "'", "‘": "'", "–": "-", "—": " - ", "…": "..."}.items():
        text = text.replace(fancy, ascii_)
    lines = (" ".join(line.split()) for line in text.splitlines())
    return "\n".join(line for line in lines if line)


def sentence_ends(text: str) -> Iterator[int]:
    """Positions behind each sentence that leaves no quotation open."""
    for match in SENTENCE_END.finditer(text):
        if text.count('"', 0, match.end()) % 2 == 0:
            yield match.end()


def generate(minutes: float, batch_size: int) -> None:
    """Append raw stories to RAW until the time is up."""
    from llmlab import LLM
    from llmlab.hub import fetch

    RAW.parent.mkdir(parents=True, exist_ok=True)
    done = RAW.read_text(encoding="utf-8").count("\n") if RAW.exists() else 0
    llm = LLM(fetch("smollm2-135m-instruct"), max_model_len=512, max_num_seqs=batch_size)
    start = time.monotonic()
    while time.monotonic() - start < minutes * 60:
        lines = tell(llm, [subject(i) for i in range(done, done + batch_size)])
        with RAW.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        done += len(lines)
        print(f"{done} raw stories after {time.monotonic() - start:.0f} s", flush=True)


def tell(llm: LLM, subjects: list[Subject]) -> list[dict[str, Any]]:
    """One raw story for each subject: its fields, ``body``, and ``last``, the final sentence (None if it did not end)."""
    chats = [llm.tokenizer.render_chat([{"role": "user", "content": item.prompt}]) for item in subjects]
    bodies = []
    prompts = [chat + item.opening for chat, item in zip(chats, subjects, strict=True)]
    for item, output in zip(subjects, llm.generate(prompts, sampling(subjects, part=0, max_tokens=88)), strict=True):
        text = plain(item.opening + output.outputs[0].text)
        bodies.append(text[: max(sentence_ends(text), default=0)] or item.opening)
    told = []
    prompts = [f"{chat}{body} {item.ending}" for chat, body, item in zip(chats, bodies, subjects, strict=True)]
    outputs = llm.generate(prompts, sampling(subjects, part=1, max_tokens=40))
    for item, body, output in zip(subjects, bodies, outputs, strict=True):
        text = plain(item.ending + output.outputs[0].text)
        end = min(sentence_ends(text), default=None)
        told.append(asdict(item) | {"body": body, "last": None if end is None else text[:end]})
    return told


def sampling(subjects: list[Subject], part: int, max_tokens: int) -> list[SamplingParams]:
    from llmlab import SamplingParams

    common = {"temperature": 0.7, "min_p": 0.05, "repetition_penalty": 1.1, "max_tokens": max_tokens}
    return [SamplingParams(seed=2 * item.index + part, **common) for item in subjects]


def refusal(story: str) -> str | None:
    """Why a story is left out; None if it is clean."""
    words = re.findall(r"[a-z']+", story.lower())
    sentences = [sentence.strip() for sentence in re.split(r"[.!?]", story) if sentence.strip()]
    fivegrams = Counter(tuple(words[i : i + 5]) for i in range(len(words) - 4))
    if not story.isascii() or re.search(r"""[^A-Za-z\s.,!?'"-]""", story):
        return "characters"
    if not all(re.match(r"\S" if i % 2 == 0 else r"\s|$", rest) for i, rest in enumerate(story.split('"')[1:])):
        return "quotation marks"
    if not MIN_WORDS <= len(words) <= MAX_WORDS or len(sentences) < MIN_SENTENCES:
        return "length"
    if (
        len(set(sentences)) < len(sentences)
        or fivegrams.most_common(1)[0][1] > 1
        or len(set(words)) < 0.45 * len(words)
    ):
        return "repetition"
    if UNWANTED & set(words):
        return "words"
    return None


def filter_stories(raw: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """(request, story) of every clean story; those with many rare words are left out too."""
    stories: dict[str, str] = {}
    refused: Counter[str] = Counter()
    for item in raw:
        if item["last"] is None:
            refused["no ending"] += 1
            continue
        story = f"{item['body']} {item['last']}"
        reason = refusal(story) or ("duplicate" if story in stories else None)
        refused[reason or "kept"] += 1
        if reason is None:
            stories[story] = item["request"]
    words_of = {story: set(re.findall(r"[a-z']+", story.lower())) for story in stories}
    frequency = Counter(word for words in words_of.values() for word in words)
    kept = [(req, s) for s, req in stories.items() if sum(frequency[word] < RARE for word in words_of[s]) <= MAX_RARE]
    print(f"{len(raw)} raw stories: {dict(refused)}; {len(kept)} of the kept ones have only common words")
    return kept


def read_corpus(path: Path = CORPUS) -> list[tuple[str, str]]:
    """(request, story) of every story in the corpus file: blocks apart by a blank line, the first line "> request"."""
    blocks = path.read_text(encoding="utf-8").strip().split("\n\n")
    return [(request.removeprefix("> "), story) for request, _, story in (block.partition("\n") for block in blocks)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--minutes", type=float, default=25, help="how long to generate (default: %(default)s; 0: only filter)"
    )
    parser.add_argument("--batch-size", type=int, default=64, help="requests at a time (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=None, help="torch threads (default: torch's own choice)")
    args = parser.parse_args()
    if args.threads:
        import torch

        torch.set_num_threads(args.threads)
    if args.minutes > 0:
        generate(args.minutes, args.batch_size)
    stories = filter_stories([json.loads(line) for line in RAW.read_text(encoding="utf-8").splitlines()])
    CORPUS.write_text("\n".join(f"> {request}\n{story}\n" for request, story in stories), encoding="utf-8")
    print(f"{CORPUS}: {len(stories)} stories, {CORPUS.stat().st_size} bytes")


if __name__ == "__main__":
    main()
