"""What `cann-run` reads and prints in its modes: one prompt, a file of prompts, a chat.

Prompts become tokens here and tokens become text; running them is the engine's work.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from cann_runtime.artifact.store import Artifact
from cann_runtime.chat import Message
from cann_runtime.engine import Engine
from cann_runtime.errors import ArtifactError, RequestError
from cann_runtime.request import Request, SamplingParams
from cann_runtime.score import token_losses
from cann_runtime.tokenizer import TextStream, Tokenizer, eos_token_ids

DEFAULT_MAX_TOKENS = 256


@dataclass
class TextSide:
    """The tokenizer, if there is one, and the ids that end a sequence."""

    tokenizer: Tokenizer | None
    eos: list[int]

    @classmethod
    def open(cls, artifact: Artifact, checkpoint: Path | None) -> TextSide:
        """From the checkpoint where it has these files, else from the artifact."""
        folders = [folder for folder in (checkpoint, artifact.tokenizer_dir) if folder is not None]
        with_tokenizer = [folder for folder in folders if (folder / "tokenizer.json").is_file()]
        eos = next((ids for folder in folders if (ids := eos_token_ids(folder))), artifact.manifest.eos_token_ids)
        return cls(Tokenizer(with_tokenizer[0]) if with_tokenizer else None, eos)

    def need_tokenizer(self) -> Tokenizer:
        """The tokenizer; ArtifactError where neither the artifact nor a checkpoint has one."""
        if self.tokenizer is None:
            raise ArtifactError("no tokenizer.json in the artifact: pass --checkpoint DIR, a folder that has one")
        return self.tokenizer


@dataclass
class Prompt:
    """One prompt as it was given (text, or None for token ids) and as tokens."""

    text: str | None
    tokens: list[int]


def run(args: argparse.Namespace, engine: Engine, text: TextSide, params: SamplingParams) -> None:
    """Run the mode that the arguments ask for."""
    if args.chat:
        _chat(args, engine, text.need_tokenizer(), params)
    elif args.score is not None:
        _score(args, engine, text.need_tokenizer())
    elif args.prompts is not None:
        prompts = [_prompt(entry, text, args.raw) for entry in read_prompts(args.prompts)]
        _answer(args, engine, text, prompts, params)
    else:
        _answer(args, engine, text, [_prompt(args.prompt, text, args.raw)], params)


def read_prompts(path: Path) -> list[str | dict[str, Any]]:
    """The prompts of a file: JSON objects, one a line, where its first line is one; otherwise one text a line.

    A JSON object has one key: "prompt" (text), "messages" (a conversation) or "token_ids". RequestError names the line.
    """
    try:
        lines = [(i, line) for i, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1) if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{path} cannot be read: {error}") from error
    if not lines:
        raise RequestError(f"{path} holds no prompt")
    if path.suffix != ".jsonl" and not lines[0][1].lstrip().startswith("{"):
        return [line.rstrip("\r") for _, line in lines]
    entries: list[str | dict[str, Any]] = []
    for number, line in lines:
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise RequestError(f"{path}:{number} is not JSON: {error}") from error
        if not (isinstance(entry, dict) and len(entry) == 1 and _well_typed(entry)):
            raise RequestError(f'{path}:{number} must be an object with "prompt" (text), "messages" or "token_ids"')
        entries.append(entry)
    return entries


def _well_typed(entry: dict[str, Any]) -> bool:
    key, value = next(iter(entry.items()))
    if key == "prompt":
        return isinstance(value, str)
    item = {"messages": dict, "token_ids": int}.get(key)
    return item is not None and isinstance(value, list) and all(isinstance(one, item) for one in value)


def _prompt(entry: str | dict[str, Any], text: TextSide, raw: bool) -> Prompt:
    if isinstance(entry, dict) and "token_ids" in entry:
        return Prompt(None, entry["token_ids"])
    tokenizer = text.need_tokenizer()
    if isinstance(entry, dict) and "messages" in entry:
        return Prompt(json.dumps(entry["messages"], ensure_ascii=False), tokenizer.encode_chat(entry["messages"]))
    content = entry if isinstance(entry, str) else str(entry["prompt"])
    if raw or tokenizer.chat_template is None:
        return Prompt(content, tokenizer.encode(content))
    return Prompt(content, tokenizer.encode_chat([{"role": "user", "content": content}]))


def _score(args: argparse.Namespace, engine: Engine, tokenizer: Tokenizer) -> None:
    try:
        content = args.score.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"--score: {args.score} cannot be read: {error}") from error
    tokens = tokenizer.encode(content)
    if len(tokens) < 2:
        raise RequestError(f"--score: {args.score} has {len(tokens)} tokens, at least 2 are needed")
    losses = token_losses(engine, tokens)
    mean = sum(losses) / len(losses)
    result = {"tokens": len(tokens), "loss": mean, "perplexity": math.exp(mean)}
    print(
        json.dumps(result) if args.json else f"{len(tokens)} tokens, loss {mean:.4f}, perplexity {math.exp(mean):.3f}"
    )


def _limited(params: SamplingParams, engine: Engine, prompt: Sequence[int]) -> SamplingParams:
    """Without --max-tokens: as many as usual, or as fit."""
    if params.max_tokens is not None:
        return params
    room = max(1, min(DEFAULT_MAX_TOKENS, engine.max_total - len(prompt)))
    return dataclasses.replace(params, max_tokens=room)


def _answer(
    args: argparse.Namespace, engine: Engine, text: TextSide, prompts: list[Prompt], params: SamplingParams
) -> None:
    """All prompts as one batch; each result is printed as soon as it and all before it are there."""
    requests = [engine.add_request(p.tokens, _limited(params, engine, p.tokens)) for p in prompts]
    single = len(prompts) == 1
    if single and args.stream and not args.json:
        if args.token_ids or text.tokenizer is None:
            _run_streaming(engine, requests[0], None)
        else:
            _run_streaming(engine, requests[0], TextStream(text.tokenizer))
        print()
    else:
        printed = 0
        while printed < len(requests):
            engine.step()
            while printed < len(requests) and requests[printed].finished:
                _print_result(args, text, prompts[printed], requests[printed], printed, len(requests))
                printed += 1
    if args.stats:
        print(_stats_line(engine, requests), file=sys.stderr)


def _run_streaming(
    engine: Engine, request: Request, stream: TextStream | None, interrupted: threading.Event | None = None
) -> str:
    """Run the engine until the request ends, printing its text (or token ids) as it comes; the whole text."""
    pieces: list[str] = []
    while not request.finished:
        if interrupted is not None and interrupted.is_set():
            engine.abort(request)
            break
        for output in engine.step():
            piece = f"{output.token} " if stream is None else stream.add([output.token])
            if piece:
                pieces.append(piece)
                print(piece, end="", flush=True)
    if stream is not None and (rest := stream.finish()):
        pieces.append(rest)
        print(rest, end="", flush=True)
    return "".join(pieces)


def _print_result(
    args: argparse.Namespace, text: TextSide, prompt: Prompt, request: Request, index: int, count: int
) -> None:
    decoded = text.tokenizer.decode(request.output) if text.tokenizer is not None else None
    if args.json:
        result = {
            "index": index,
            "prompt": prompt.text,
            "prompt_tokens": len(request.prompt),
            "text": decoded,
            "tokens": request.output,
            "finish_reason": request.finish_reason,
            **timings(request),
        }
        print(json.dumps(result, ensure_ascii=False), flush=True)
        return
    if count > 1:
        print(f"[{index + 1}/{count}] {prompt.text if prompt.text is not None else prompt.tokens}")
    shown = " ".join(map(str, request.output)) if args.token_ids or decoded is None else decoded
    print(shown, end="\n" if count == 1 else "\n\n", flush=True)


def timings(request: Request) -> dict[str, float | None]:
    """Seconds to the first token and in all, and tokens a second after the first one (None for a lone token)."""
    assert request.first_token_at is not None
    assert request.finished_at is not None
    decode = request.finished_at - request.first_token_at
    return {
        "ttft": request.first_token_at - request.arrived,
        "seconds": request.finished_at - request.arrived,
        "tokens_per_second": (request.num_output - 1) / decode if request.num_output > 1 else None,
    }


def _stats_line(engine: Engine, requests: Sequence[Request]) -> str:
    tokens = sum(request.num_output for request in requests)
    begun = min(request.arrived for request in requests)
    ended = max(request.finished_at or begun for request in requests)
    first = min(request.first_token_at or ended for request in requests)
    stats = engine.stats
    return (
        f"{len(requests)} requests, {tokens} tokens, {ended - begun:.2f} s ({tokens / (ended - begun):.1f} tokens/s), "
        f"first token after {first - begun:.2f} s, {stats.steps} steps, {stats.execute_seconds:.2f} s in graphs, "
        f"{stats.padding_rows} of {stats.rows} rows padding, {engine.scheduler.preemptions} preemptions"
    )


def _chat(args: argparse.Namespace, engine: Engine, tokenizer: Tokenizer, params: SamplingParams) -> None:
    """A conversation with history. /clear forgets it, /exit or end of input ends it, Ctrl-C ends an answer."""
    if tokenizer.chat_template is None:
        raise RequestError("--chat needs a chat template, and this model's tokenizer has none: use --prompt")
    prompting = sys.stdin.isatty()
    if prompting:
        import readline  # noqa: F401  (line editing in input())

        print("/clear forgets the conversation, /exit ends it.")
    messages: list[Message] = []
    while True:
        try:
            line = input("> " if prompting else "").strip()
        except EOFError:
            return
        if line == "/exit":
            return
        if line == "/clear":
            messages = []
        elif line:
            messages.append({"role": "user", "content": line})
            try:
                prompt = tokenizer.encode_chat(messages)
                request = engine.add_request(prompt, _limited(params, engine, prompt))
            except RequestError as error:
                print(f"cann-run: {error} (/clear starts anew)", file=sys.stderr)
                messages.pop()
                continue
            with _interruptible() as interrupted:
                answer = _run_streaming(engine, request, TextStream(tokenizer), interrupted)
            print(flush=True)
            messages.append({"role": "assistant", "content": answer})


@contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """Ctrl-C sets the event, so that an answer ends between two steps, and not the program in the middle of one."""
    interrupted = threading.Event()

    def stop(_signal: int, _frame: FrameType | None) -> None:
        interrupted.set()

    previous = signal.signal(signal.SIGINT, stop)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, previous)
