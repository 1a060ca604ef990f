"""A generation request: what was asked, and how far it has come.

Invariants of what was asked are checked here, where a request is born; whether it fits the artifact is checked by the
engine. Blocks, batches and sampling are elsewhere.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Literal

from cann_runtime.errors import RequestError

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens, and when to stop.

    temperature 0 is greedy (the rest is then ignored). top_k 0 and top_p 1 are off. With `seed` the result depends on
    the request alone, not on what else runs. max_tokens None: until an end-of-sequence token or the longest sequence.
    RequestError for values out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    max_tokens: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise RequestError(f"temperature is {self.temperature}: it must be 0 (greedy) or more")
        if self.top_k < 0:
            raise RequestError(f"top_k is {self.top_k}: it must be 0 (off) or more")
        if not 0 < self.top_p <= 1:
            raise RequestError(f"top_p is {self.top_p}: it must be above 0 and at most 1 (off)")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise RequestError(f"max_tokens is {self.max_tokens}: it must be 1 or more")
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise RequestError(f"seed is {self.seed}: it must fit 64 bits")

    @property
    def greedy(self) -> bool:
        """No randomness: the largest logit wins."""
        return self.temperature == 0


@dataclass(eq=False)
class Request:
    """One sequence. `tokens` is prompt and output in one list; the first `num_computed` of them are in the KV cache."""

    id: int
    prompt: list[int]
    params: SamplingParams
    max_total: int  # tokens at which it ends, prompt included
    tokens: list[int] = field(init=False)
    num_computed: int = 0
    row: int | None = None  # its row of the block table while it runs
    finish_reason: FinishReason | None = None
    preemptions: int = 0
    arrived: float = field(default_factory=time.perf_counter)
    first_token_at: float | None = None
    finished_at: float | None = None

    def __post_init__(self) -> None:
        if not self.prompt:
            raise RequestError("the prompt has no tokens")
        self.tokens = list(self.prompt)
        import torch  # here, so that a wrong argument or a damaged artifact is told without waiting for it

        self.generator = torch.Generator()
        if self.params.seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(self.params.seed)

    @property
    def pending(self) -> int:
        """Tokens that are not yet in the KV cache; 1 in decode."""
        return len(self.tokens) - self.num_computed

    @property
    def output(self) -> list[int]:
        """The generated tokens, an end-of-sequence token included."""
        return self.tokens[len(self.prompt) :]

    @property
    def num_output(self) -> int:
        """How many tokens were generated."""
        return len(self.tokens) - len(self.prompt)

    @property
    def finished(self) -> bool:
        """No more tokens will come."""
        return self.finish_reason is not None
