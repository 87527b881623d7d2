"""Between text and token ids, in one place: the same prompt has the same ids everywhere, with at most one begin token.

Prompt (text or messages)  --Renderer.prompt_ids-->  what the engine reads
sampled token ids          --Renderer.decode------>  what people and verifiers read; never tokenised again
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nearpolicy.errors import ModelError, described
from nearpolicy.records import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BYTE_VOCABULARY = 272
"""Ids of the byte tokenizer: 256 bytes, then special tokens up to a multiple of 16."""

_BYTE_SPECIALS = ("<|begin|>", "<|end|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>")
_BYTE_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


class Renderer:
    """Turns prompts into token ids and sampled token ids into text."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        stop_token_ids: Iterable[int] = (),
        vocabulary: int | None = None,
    ):
        """``stop_token_ids``: end tokens the model declares beside the tokenizer's own (`generation_stop_ids`).
        ``vocabulary``: tokens the model knows; text that needs another one is refused."""
        self.tokenizer = tokenizer
        self._vocabulary = vocabulary
        own = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
        self.stop_token_ids: tuple[int, ...] = tuple(dict.fromkeys([*own, *(int(id) for id in stop_token_ids)]))
        """Any of these ends a completion."""

    @property
    def has_chat_template(self) -> bool:
        return bool(self.tokenizer.chat_template)

    def prompt_ids(self, prompt: Prompt) -> np.ndarray:
        """[P] int32. Messages go through the chat template, which then opens the assistant's turn; text is taken as it
        is.

        A template that writes the begin token, or text that already holds it, meets a tokenizer that adds one: only
        one is kept. A chat template without a begin token is left so, since that is how the model was trained."""
        if prompt.messages is not None:
            if not self.has_chat_template:
                raise ModelError(
                    f"prompt {prompt.id} is made of chat messages, but the tokenizer has no chat template; "
                    "use text prompts with `chat: false` in the task, or set model.tokenizer to one with a template"
                )
            ids = self.tokenizer.apply_chat_template(
                [dict(message) for message in prompt.messages],
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
            )
        else:
            ids = self.tokenizer(prompt.text)["input_ids"]
        return self._known(self._with_one_begin_token(list(ids)))

    def answer_ids(self, answer: str) -> np.ndarray:
        """[T] int32: a given answer as the model should have sampled it, its end token included."""
        ids = self.tokenizer(answer, add_special_tokens=False)["input_ids"]
        return self._known([*ids, *self.stop_token_ids[:1]])

    def _known(self, ids: list[int]) -> np.ndarray:
        if self._vocabulary is not None and ids and max(ids) >= self._vocabulary:
            raise ModelError(
                f"the tokenizer gives the token {max(ids)}, and the model has 0 to {self._vocabulary - 1}; set "
                "model.tokenizer to the one that the model was trained with"
            )
        return np.asarray(ids, dtype=np.int32)

    def decode(self, ids: Sequence[int], *, stop: Sequence[str] = ()) -> str:
        """The text of a completion without its stop token, up to the first of the ``stop`` strings.

        Special tokens elsewhere stay visible: a verifier and a reader should see what was really sampled.
        """
        ids = [int(id) for id in ids]
        if ids and ids[-1] in self.stop_token_ids:
            ids.pop()
        text = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        cuts = [place for string in stop if (place := text.find(string)) >= 0]
        return text[: min(cuts)] if cuts else text

    def _with_one_begin_token(self, ids: list[int]) -> list[int]:
        begin = self.tokenizer.bos_token_id
        if begin is not None:
            while len(ids) > 1 and ids[0] == ids[1] == begin:
                ids.pop(0)
        return ids


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a local folder or hub id; ``bytes`` is the built-in one."""
    if path == "bytes":
        return byte_tokenizer()
    from transformers import AutoTokenizer

    try:
        folder = Path(path).expanduser()
        return AutoTokenizer.from_pretrained(folder if folder.is_dir() else _fetched(path))
    except Exception as error:  # broken files make the libraries behind it raise all kinds
        raise ModelError(
            f"no tokenizer at {path}: {described(error)}; set model.tokenizer to a folder, a hub id or `bytes`"
        ) from None


def _fetched(path: str) -> str:
    """The folder of a hub id. AutoTokenizer alone would ask a hub that is out of reach for minutes."""
    from huggingface_hub import snapshot_download

    return snapshot_download(path, allow_patterns=["*.json", "*.txt", "*.jinja", "*.model"])


def generation_stop_ids(folder: str | Path) -> tuple[int, ...]:
    """End tokens in a model folder's ``generation_config.json`` and ``config.json``; empty where none are named."""
    found: list[int] = []
    for name in ("generation_config.json", "config.json"):
        file = Path(folder) / name
        if file.is_file():
            found += _end_tokens(file)
    return tuple(dict.fromkeys(found))


def vocabulary_size(folder: str | Path) -> int | None:
    """Tokens that a model folder's config says the model has; None where it leaves that to its family."""
    config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    size = config.get("text_config", config).get("vocab_size")
    return size if isinstance(size, int) else None


def _end_tokens(file: Path) -> list[int]:
    try:
        ids = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
    except Exception as error:  # no JSON, no object, no UTF-8
        raise ModelError(f"{file}: cannot be read: {described(error)}; mend the model folder") from None
    ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
    for id in ids:
        if not isinstance(id, int) or isinstance(id, bool) or id < 0:
            raise ModelError(f"{file}: eos_token_id is {id!r}, which is no token id; mend the model folder")
    return ids


def byte_tokenizer() -> PreTrainedTokenizerBase:
    """A real Hugging Face tokenizer whose token b is the byte b, with a begin token, an end token and a chat
    template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {letter: byte for byte, letter in _letters_of_bytes().items()}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    spares = [f"<|spare_{number}|>" for number in range(BYTE_VOCABULARY - 256 - len(_BYTE_SPECIALS))]
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (*_BYTE_SPECIALS, *spares)])
    begin, end, pad = _BYTE_SPECIALS[:3]
    core.post_processor = processors.TemplateProcessing(single=f"{begin} $A", special_tokens=[(begin, 256)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token=begin, eos_token=end, pad_token=pad)
    tokenizer.chat_template = _BYTE_TEMPLATE
    return tokenizer


def _letters_of_bytes() -> Mapping[int, str]:
    """The printable letter that byte-level tokenizers write for each byte (GPT-2's table)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    letters: dict[int, Any] = {byte: chr(byte) for byte in plain}
    for byte in range(256):
        if byte not in letters:
            letters[byte] = chr(256 + len(letters) - len(plain))
    return letters
