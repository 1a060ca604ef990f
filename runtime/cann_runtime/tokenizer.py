"""Text to tokens and back, from a tokenizer.json and the config files beside it, without transformers.

Also what belongs to a checkpoint's text side: its special tokens, its end-of-sequence ids, and text that arrives token
by token. Rendering conversations is in `chat.py`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from cann_runtime.chat import ChatTemplate, Message
from cann_runtime.errors import CheckpointError, RequestError

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """The tokenizer of one folder; CheckpointError where its files are missing or damaged."""

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(f"{folder} has no tokenizer.json")
        try:
            self._backend = Backend.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{path} is not a tokenizer: {error}") from error
        self._backend.no_padding()
        self._backend.no_truncation()
        config = _read_json(folder / "tokenizer_config.json")
        self.special_tokens = _special_tokens(config, _read_json(folder / "special_tokens_map.json"))
        self.chat_template = _chat_template(folder, config)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids; special tokens written out in the text are recognized."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of whole token lists; bytes that are not UTF-8 become U+FFFD."""
        text: str = self._backend.decode(list(tokens), skip_special_tokens=skip_special_tokens)
        return text

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Tokens of a conversation, up to where the assistant's answer begins. RequestError without a chat template."""
        if self.chat_template is None:
            raise RequestError("this model's tokenizer has no chat template: pass --raw to prompt it with plain text")
        text = self.chat_template.render(messages, special_tokens=self.special_tokens, add_generation_prompt=True)
        return self.encode(text, add_special_tokens=False)


class TextStream:
    """Text of one sequence, token by token, always whole characters: their pieces joined are the decoded whole.

    A character's bytes can lie in several tokens, and some decoders treat the first token of a text in another way. So
    the newest tokens are decoded together with those of the last piece, and held back while they end in a part of one.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._context = 0  # start of the tokens of the last piece
        self._read = 0  # end of the tokens whose text was given out

    def add(self, tokens: Sequence[int]) -> str:
        """The text that became complete with these tokens; may be empty."""
        self._tokens.extend(tokens)
        return self._piece(final=False)

    def finish(self) -> str:
        """What is left at the end of the sequence; an incomplete character becomes U+FFFD."""
        return self._piece(final=True)

    def _piece(self, *, final: bool) -> str:
        before = self._tokenizer.decode(self._tokens[self._context : self._read])
        text = self._tokenizer.decode(self._tokens[self._context :])
        if len(text) <= len(before) or (text.endswith("�") and not final):
            return ""
        self._context, self._read = self._read, len(self._tokens)
        return text[len(before) :]


def eos_token_ids(folder: Path) -> list[int]:
    """End-of-sequence ids of a checkpoint folder, from generation_config.json or else config.json; empty if unknown."""
    for name in ("generation_config.json", "config.json"):
        value = _read_json(folder / name).get("eos_token_id")
        if isinstance(value, int):
            return [value]
        if isinstance(value, list):
            return [int(item) for item in value]
    return []


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} does not hold a JSON object")
    return content


def _special_tokens(*configs: dict[str, Any]) -> dict[str, str]:
    """The named special tokens, as strings; they are stored either so or as an object with the string inside."""
    tokens: dict[str, str] = {}
    for config in configs:
        for name in _SPECIAL:
            value = config.get(name)
            if isinstance(value, dict):
                value = value.get("content")
            if isinstance(value, str):
                tokens.setdefault(name, value)
    return tokens


def _chat_template(folder: Path, config: dict[str, Any]) -> ChatTemplate | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return ChatTemplate(path.read_text(encoding="utf-8"), str(path))
    source = config.get("chat_template")
    if isinstance(source, list):  # several named templates
        source = {item["name"]: item["template"] for item in source}.get("default")
    return None if source is None else ChatTemplate(str(source), str(folder / "tokenizer_config.json"))
