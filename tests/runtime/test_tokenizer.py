"""Tokens, chat templates and streamed text, against transformers and the tokenizers library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, processors
from tokenizers import Tokenizer as Backend
from toy_llama import byte_tokenizer

from cann_runtime.errors import CheckpointError, RequestError
from cann_runtime.tokenizer import TextStream, Tokenizer, eos_token_ids

TEXTS = [
    "The capital of France is Paris.",
    "  Spaces,\n\ttabs and ünïcödé: 日本語 🎉👩‍👩‍👧",
    "<|im_start|>user\nHi<|im_end|>",
    "",
]

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# What templates of larger models use: namespaces, loop controls, filters, marks of generated text, special tokens.
ELABORATE = """{{- bos_token }}
{%- set ns = namespace(count=0) %}
{%- if tools %}{{ tools | tojson }}{% endif %}
{% for message in messages %}
    {%- if message.role == 'skip' %}{% continue %}{% endif %}
    {%- set ns.count = ns.count + 1 %}
    {% if message.role == 'assistant' %}
        {% generation %}
        {{- message.content | trim }}{{ eos_token }}
        {% endgeneration %}
    {% else %}
[{{ message.role | upper }} {{ ns.count }}] {{ message | tojson }}
    {% endif %}
{% endfor %}
{%- if add_generation_prompt %}[GO {{ messages | length }}]{% endif %}
"""
CONVERSATIONS = [
    [{"role": "user", "content": "Hello <there> & 'you'"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "日本語?"},
        {"role": "assistant", "content": "  yes \n"},
        {"role": "skip", "content": "no"},
        {"role": "user", "content": "more"},
    ],
]


def fallback_backend() -> Backend:
    """A BPE with bytes as a fallback and a begin token, as of Llama 2 and Mistral."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{i:02X}>": 3 + i for i in range(256)}
    for piece in ("▁", "t", "h", "e", "▁t", "he", "▁the", "a", "b", "c"):
        vocab[piece] = len(vocab)
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he")]
    backend = Backend(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(t, special=True) for t in ("<unk>", "<s>", "</s>")])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


@pytest.fixture(scope="module", params=["bytes", "fallback"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any]:
    """Our tokenizer and transformers', of the same folder."""
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "bytes":
        names = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
        PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(), **names).save_pretrained(folder)
    else:
        names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
        PreTrainedTokenizerFast(tokenizer_object=fallback_backend(), **names).save_pretrained(folder)
    return Tokenizer(folder), PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_and_text_equal_those_of_transformers(pair: tuple[Tokenizer, Any], text: str) -> None:
    ours, theirs = pair
    ids = theirs(text)["input_ids"]
    assert ours.encode(text) == ids
    assert ours.encode(text, add_special_tokens=False) == theirs(text, add_special_tokens=False)["input_ids"]
    for skip in (True, False):
        decoded = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        assert ours.decode(ids, skip_special_tokens=skip) == decoded


@settings(max_examples=80, deadline=None)
@given(text=st.text(max_size=30), sizes=st.lists(st.integers(1, 4), min_size=1, max_size=5))
def test_streamed_pieces_are_whole_characters_and_join_to_the_text(
    pair: tuple[Tokenizer, Any], text: str, sizes: list[int]
) -> None:
    ours, _ = pair
    text = text.replace("�", "")
    ids = ours.encode(text)
    stream, pieces, start = TextStream(ours), [], 0
    while start < len(ids):
        size = sizes[start % len(sizes)]
        pieces.append(stream.add(ids[start : start + size]))
        start += size
    pieces.append(stream.finish())
    assert "".join(pieces) == ours.decode(ids)
    assert all("�" not in piece for piece in pieces)


# Not with bytes as a fallback: there an invalid byte changes the text of valid characters before it.
@pytest.mark.parametrize("pair", ["bytes"], indirect=True)
@settings(max_examples=80, deadline=None)
@given(seed=st.lists(st.integers(0, 1 << 30), max_size=40))
def test_any_token_sequence_streams_to_its_text(pair: tuple[Tokenizer, Any], seed: list[int]) -> None:
    ours, theirs = pair
    ids = [s % len(theirs) for s in seed]
    stream = TextStream(ours)
    assert "".join([*(stream.add([i]) for i in ids), stream.finish()]) == ours.decode(ids)


def test_a_character_in_several_tokens_comes_out_whole(pair: tuple[Tokenizer, Any]) -> None:
    ours, _ = pair
    ids = ours.encode("a🎉b", add_special_tokens=False)
    stream = TextStream(ours)
    pieces = [stream.add([i]) for i in ids]
    assert [p.strip() for p in pieces if p.strip()] == ["a", "🎉", "b"]
    assert stream.finish() == ""
    # Cut in the middle of the character, the end says so.
    cut = TextStream(ours)
    assert "�" not in "".join(cut.add([i]) for i in ids[:-2])
    assert set(cut.finish()) == {"�"}


@pytest.mark.parametrize("template", [CHATML, ELABORATE], ids=["chatml", "elaborate"])
@pytest.mark.parametrize("stored", ["jinja", "config", "named"])
@pytest.mark.parametrize("conversation", CONVERSATIONS, ids=["one", "many"])
def test_chats_render_as_in_transformers(
    tmp_path: Path, template: str, stored: str, conversation: list[dict[str, str]]
) -> None:
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer(), bos_token="<|im_start|>", eos_token="<|im_end|>"
    )
    theirs.chat_template = template
    theirs.save_pretrained(tmp_path)
    if stored != "jinja":
        (tmp_path / "chat_template.jinja").unlink()
        config = json.loads((tmp_path / "tokenizer_config.json").read_text())
        named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": template}]
        config["chat_template"] = template if stored == "config" else named
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours = Tokenizer(tmp_path)
    assert ours.chat_template is not None
    for prompt in (True, False):
        text = ours.chat_template.render(conversation, special_tokens=ours.special_tokens, add_generation_prompt=prompt)
        assert text == theirs.apply_chat_template(conversation, tokenize=False, add_generation_prompt=prompt)
    ids = theirs.apply_chat_template(conversation, tokenize=True, add_generation_prompt=True, return_dict=False)
    assert ours.encode_chat(conversation) == ids


def save(folder: Path, **config: Any) -> Tokenizer:
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer(folder)


def test_a_template_cannot_leave_its_sandbox(tmp_path: Path) -> None:
    tokenizer = save(tmp_path, chat_template="{{ messages.__class__.__mro__ }}{{ messages.append(1) }}")
    with pytest.raises(RequestError, match="chat template"):
        tokenizer.encode_chat([{"role": "user", "content": "x"}])


def test_a_template_that_refuses_a_conversation_says_why(tmp_path: Path) -> None:
    tokenizer = save(tmp_path, chat_template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RequestError, match="roles must alternate"):
        tokenizer.encode_chat([{"role": "user", "content": "x"}])


def test_special_tokens_may_be_stored_as_objects(tmp_path: Path) -> None:
    tokenizer = save(
        tmp_path, bos_token={"content": "<|im_start|>", "lstrip": False}, eos_token="<|im_end|>", pad_token=None
    )
    assert tokenizer.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}


def test_damaged_tokenizer_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer(tmp_path)
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{% for %}"}')
    with pytest.raises(CheckpointError, match="chat template is not valid"):
        Tokenizer(tmp_path)


def test_without_a_chat_template_a_chat_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="--raw"):
        save(tmp_path).encode_chat([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [5, 6]}, {"eos_token_id": 1}, [5, 6]),
        ({"eos_token_id": 7}, {}, [7]),
        ({}, {"eos_token_id": 3}, [3]),
        (None, {"eos_token_id": [3, 4]}, [3, 4]),
        (None, None, []),
    ],
)
def test_end_tokens_come_from_the_generation_config_first(
    tmp_path: Path, generation: dict[str, Any] | None, config: dict[str, Any] | None, expected: list[int]
) -> None:
    for name, content in (("generation_config.json", generation), ("config.json", config)):
        if content is not None:
            (tmp_path / name).write_text(json.dumps(content))
    assert eos_token_ids(tmp_path) == expected
