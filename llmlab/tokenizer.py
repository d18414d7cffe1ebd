"""The engine's tokenizer: text ↔ ids, chat templates, EOS ids and the exact bytes of a token.

A thin layer over a Hugging Face tokenizer or an `llmlab.bpe.Tokenizer`, so that the engine need not know which it has.
transformers is imported only when a tokenizer is loaded from a directory.
"""

from __future__ import annotations

import inspect
import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmlab import bpe
from llmlab.generation_config import default_sampling_params, eos_token_ids
from llmlab.pretokenize import byte_alphabet

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "tekken.json", "vocab.json", "vocab.txt")
METASPACE = "▁"  # stands for a space in sentencepiece vocabularies


class Tokenizer(ABC):
    """What the engine asks of a tokenizer. `Tokenizer.load` makes one.

    `eos_token_ids`: the ids that end an output, in the order of the model's files.
    `default_sampling_params`: what generation_config.json recommends, by the names of SamplingParams.
    `is_bytewise`: the text of ids is the UTF-8 of their bytes, one after the other (byte-level and byte-fallback
    vocabularies); otherwise only `decode` of the whole knows. `strips_first_space`: such a text loses one space at its
    very start (Llama 2's vocabulary, whose words begin with one).
    """

    is_bytewise: bool = True
    strips_first_space: bool = False

    def __init__(self, model_dir: Path | None, tokenizer_eos: int | None) -> None:
        self.eos_token_ids = eos_token_ids(model_dir, tokenizer_eos)
        self.default_sampling_params = default_sampling_params(model_dir)
        self._token_bytes: dict[int, bytes] = {}

    @staticmethod
    def load(
        source: str | os.PathLike[str] | PreTrainedTokenizerBase | bpe.Tokenizer | Tokenizer,
        model_dir: str | os.PathLike[str] | None = None,
    ) -> Tokenizer:
        """From a local directory, or round a tokenizer that exists already.

        `model_dir` is where generation_config.json and config.json are; None: the tokenizer's own directory, if any.
        FileNotFoundError if there is no such directory or no tokenizer in it; ValueError if its files are malformed, or
        if `source` is something else.
        """
        directory = None if model_dir is None else Path(model_dir)
        if isinstance(source, Tokenizer):
            return source
        if isinstance(source, bpe.Tokenizer):
            return BPETokenizer(source, directory)
        if isinstance(source, (str, os.PathLike)):
            path = Path(source)
            return HFTokenizer(_load_directory(path), directory or path)
        from transformers import PreTrainedTokenizerBase

        if isinstance(source, PreTrainedTokenizerBase):
            return HFTokenizer(source, directory)
        raise ValueError(
            "tokenizer must be a directory, a Hugging Face tokenizer or an llmlab.bpe.Tokenizer, "
            f"got {type(source).__name__}"
        )

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """The highest token id + 1; a model's embedding may have more rows."""

    @property
    @abstractmethod
    def special_token_ids(self) -> frozenset[int]:
        """The ids that `skip_special_tokens` leaves out."""

    @abstractmethod
    def encode(self, prompt: str, add_special_tokens: bool = True) -> list[int]:
        """Text → ids, with the BOS or EOS that the tokenizer adds by itself unless `add_special_tokens` is False.

        Special tokens written out in a prompt become special tokens, as in vLLM. ValueError for text that has no UTF-8
        form (lone surrogates).
        """

    @abstractmethod
    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """A conversation as the text that the model was trained on. To be encoded with add_special_tokens=False, since
        templates write the BOS themselves. ValueError if there is no template, or it refuses the messages.
        """

    @abstractmethod
    def _lookup_bytes(self, token_id: int) -> bytes: ...

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """A conversation as ids: with the template's BOS and no second one, and with no special tokens but the
        template's. A special token written out in a message stays text (or raises ValueError, where it can't).
        """
        text = self.render_chat(messages, chat_template, add_generation_prompt)
        return self.encode(text, add_special_tokens=False)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Ids → text; bytes that are no UTF-8 become U+FFFD, ids without a token become nothing."""
        skipped = self.special_token_ids if skip_special_tokens else frozenset()
        text = b"".join(self.token_bytes(i) for i in ids if i not in skipped).decode("utf-8", errors="replace")
        return text.removeprefix(" ") if self.strips_first_space else text

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of a token, which may end inside a character; empty for an id without a token."""
        known = self._token_bytes.get(token_id)
        if known is None:
            known = self._token_bytes[token_id] = self._lookup_bytes(token_id)
        return known


class BPETokenizer(Tokenizer):
    """An llmlab.bpe.Tokenizer in the engine."""

    def __init__(self, tokenizer: bpe.Tokenizer, model_dir: Path | None) -> None:
        super().__init__(model_dir, None)
        self.tokenizer = tokenizer

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size

    @cached_property
    def special_token_ids(self) -> frozenset[int]:
        return frozenset(self.tokenizer.special_tokens.values())

    def encode(self, prompt: str, add_special_tokens: bool = True) -> list[int]:
        _check_text(prompt)
        return self.tokenizer.encode(prompt, allowed_special="all", add_special_tokens=add_special_tokens)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        raise ValueError("an llmlab.bpe.Tokenizer has no chat template: load the tokenizer from its directory instead")

    def _lookup_bytes(self, token_id: int) -> bytes:
        try:
            return self.tokenizer.token_bytes(token_id)
        except ValueError:
            return b""


class HFTokenizer(Tokenizer):
    """A Hugging Face tokenizer in the engine; `tokenizer` is the object itself."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, model_dir: Path | None) -> None:
        super().__init__(model_dir, tokenizer.eos_token_id)
        self.tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        kind, self.strips_first_space = _decoder_kind(self._backend)
        self.is_bytewise = kind != "other"
        self._is_byte_level = kind == "byte-level"
        self._byte_of = {char: byte for byte, char in byte_alphabet().items()}

    @cached_property
    def vocab_size(self) -> int:
        return max(self.tokenizer.get_vocab().values(), default=-1) + 1

    @cached_property
    def special_token_ids(self) -> frozenset[int]:
        added = self.tokenizer.added_tokens_decoder
        return frozenset(i for i, token in added.items() if token.special) | set(self.tokenizer.all_special_ids)

    def encode(self, prompt: str, add_special_tokens: bool = True) -> list[int]:
        _check_text(prompt)
        # verbose=False: lengths are the engine's business, and it raises where transformers would only warn
        return list(self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens, verbose=False))

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        from jinja2 import TemplateError

        if chat_template is None and not self.tokenizer.chat_template:
            raise ValueError(
                "the tokenizer has no chat template: pass chat_template=…, or use generate() with a prompt"
            )
        if not messages:
            raise ValueError("messages is empty: a conversation needs at least one message")
        try:
            return self.tokenizer.apply_chat_template(
                list(messages),
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
            )
        except (TemplateError, TypeError, KeyError) as error:
            raise ValueError(f"the chat template can't render these messages: {error}") from error

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        special = [token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special]
        written = [token for token in special if any(token in text for text in _strings(messages))]
        if not written:
            return super().encode_chat(messages, chat_template, add_generation_prompt)
        self.render_chat(messages, chat_template, add_generation_prompt)  # for its errors
        if "sanitize_control_tokens" not in inspect.signature(self.tokenizer.apply_chat_template).parameters:
            raise ValueError(f"a message holds {written[0]!r}, which this version of transformers can't keep as text")
        return self.tokenizer.apply_chat_template(
            list(messages),
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            sanitize_control_tokens=True,
            return_dict=False,
        )

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        if self.is_bytewise:
            return super().decode(ids, skip_special_tokens)
        skipped = self.special_token_ids if skip_special_tokens else frozenset()
        kept = [i for i in ids if i not in skipped]
        return self.tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _lookup_bytes(self, token_id: int) -> bytes:
        if not self.is_bytewise:
            return self.tokenizer.decode([token_id], skip_special_tokens=False).encode()
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._is_byte_level:
            try:
                return bytes(self._byte_of[char] for char in token)
            except KeyError:  # an added token, written as it is
                return token.encode()
        if byte := re.fullmatch("<0x([0-9A-Fa-f]{2})>", token):
            return bytes.fromhex(byte[1])
        return token.replace(METASPACE, " ").encode()


class NoTokenizer(Tokenizer):
    """Stands in where a model directory has none: prompts must be token ids, and outputs have no text."""

    def __init__(self, model_dir: Path) -> None:
        super().__init__(model_dir, None)
        self.model_dir = model_dir

    vocab_size = 0
    special_token_ids = frozenset()

    def encode(self, prompt: str, add_special_tokens: bool = True) -> list[int]:
        raise ValueError(f"{self.model_dir} has no tokenizer: give the prompt as token ids, or pass tokenizer=…")

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        raise ValueError(f"{self.model_dir} has no tokenizer, and so no chat template: pass tokenizer=…")

    def _lookup_bytes(self, token_id: int) -> bytes:
        return b""


def has_tokenizer(model_dir: Path) -> bool:
    """Whether a tokenizer's files are in the directory."""
    return any((model_dir / name).is_file() for name in TOKENIZER_FILES)


def _decoder_kind(backend: Any) -> tuple[str, bool]:
    """("byte-level" | "byte-fallback" | "other", whether one space at the start is stripped) of a `tokenizers` object.

    byte-fallback is the decoder of sentencepiece vocabularies: Replace ▁ by a space, ByteFallback, Fuse, perhaps Strip.
    """
    if backend is None or backend.decoder is None:
        return "other", False
    config = json.loads(backend.decoder.__getstate__())
    if config["type"] == "ByteLevel":
        return "byte-level", False
    steps = list(config.get("decoders", []))
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    strips = bool(steps) and steps[-1] == strip
    if strips:
        steps.pop()
    replace = {"type": "Replace", "pattern": {"String": METASPACE}, "content": " "}
    if steps == [replace, {"type": "ByteFallback"}, {"type": "Fuse"}]:
        return "byte-fallback", strips
    return "other", False


def _load_directory(directory: Path) -> PreTrainedTokenizerBase:
    if not directory.is_dir():
        raise FileNotFoundError(f"{directory} is not a directory")
    present = [name for name in TOKENIZER_FILES if (directory / name).is_file()]
    if not present:
        raise FileNotFoundError(f"no tokenizer in {directory}: none of {', '.join(TOKENIZER_FILES)} is there")
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    # tokenizer.json is the whole truth. AutoTokenizer would build the class that tokenizer_config.json or the model type
    # names, and some classes (GPT2Tokenizer, Qwen2Tokenizer) replace the file's pre-tokenizer by their own.
    loader = PreTrainedTokenizerFast if "tokenizer.json" in present else AutoTokenizer
    try:
        return loader.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # tokenizers raises plain Exception for a malformed file
        raise ValueError(f"the tokenizer in {directory} ({', '.join(present)}) can't be loaded: {error}") from error


def _strings(value: Any) -> Iterator[str]:
    """Every string inside nested lists and dicts."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item)


def _check_text(text: str) -> None:
    if not isinstance(text, str):
        raise ValueError(f"text must be a str, got {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the text holds {text[error.start]!r} at {error.start}, which has no UTF-8 form") from error
