"""The CPU kernels against torch: linear against float64 products, attention against the plain `atb` ops and against
scaled_dot_product_attention, for every dtype, path and ISA of this host; and that a row's result never depends on its
neighbours.

Shape letters: T tokens, S sequences, N query heads, K kv heads, D head_dim, P block_size, B blocks, M table columns.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from cann_export.lower.cpu_toolchain import build_kernels, resolve_isa
from cann_runtime.executor.isa import ISAS, host_isa
from cann_runtime.ops import atb, cpu

# The same tests run in a process of their own for the lesser ISAs (a process holds one build of the kernels).
ISA = resolve_isa(os.environ.get("CANN_TEST_ISA", "native"))
LESSER = [isa for isa in ISAS if list(ISAS).index(isa) < list(ISAS).index(host_isa())]

# Relative to the largest value. float32: rounding of long sums. bfloat16: one rounding of the result (2^-8) and, in
# attention, one of the probabilities.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    cpu.load_library(build_kernels(ISA))
    assert cpu.loaded_isa() == ISA


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def error(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected.double()).abs().max() / expected.double().abs().max())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("n", "k"), [(64, 64), (33, 37), (100, 129), (1, 8), (160, 576)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_equals_float64_products(dtype: torch.dtype, n: int, k: int, bias: bool) -> None:
    w, x = random(n, k, dtype=dtype), random(50, k, dtype=dtype, seed=1)
    b = random(n, dtype=dtype, seed=2) if bias else None
    before = cpu.kernel_calls()["linear_kernel"]
    got = cpu.linear(x, cpu.pack_linear(w), b, n)
    assert cpu.kernel_calls()["linear_kernel"] == before + 1
    expected = torch.nn.functional.linear(x.double(), w.double(), None if b is None else b.double())
    assert got.dtype == dtype
    assert error(got, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_linear_is_bitwise_the_same_for_any_number_of_rows_and_threads(dtype: torch.dtype) -> None:
    n, k = 200, 131
    w, b = cpu.pack_linear(random(n, k, dtype=dtype)), random(n, dtype=dtype, seed=2)
    x = random(400, k, dtype=dtype, seed=1)
    rows = torch.cat([cpu.linear(x[i : i + 1], w, b, n) for i in range(400)])
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            for m in (1, 2, 5, 6, 7, 12, 13, 23, 24, 25, 192, 193, 400):
                assert torch.equal(cpu.linear(x[:m], w, b, n), rows[:m])
    finally:
        torch.set_num_threads(threads)


def test_linear_of_another_dtype_takes_the_plain_path() -> None:
    w, x = random(40, 24, dtype=torch.float16), random(3, 5, 24, dtype=torch.float16, seed=1)
    before = cpu.kernel_calls()["linear_plain"]
    got = cpu.linear(x, cpu.pack_linear(w), None, 40)
    assert cpu.kernel_calls()["linear_plain"] == before + 1
    assert torch.equal(got, torch.nn.functional.linear(x, w))


def test_linear_of_no_rows_is_empty() -> None:
    w = cpu.pack_linear(random(40, 24, dtype=torch.float32))
    assert cpu.linear(torch.empty(0, 24), w, None, 40).shape == (0, 40)


def test_a_weight_that_is_not_the_packed_form_is_refused() -> None:
    w = cpu.pack_linear(random(40, 24, dtype=torch.float32))
    with pytest.raises(RuntimeError, match="is not the packed form of"):
        cpu.linear(torch.zeros(1, 25), w, None, 40)


@dataclass
class Case:
    """One attention step over two layers' cache, of which layer 1 is used; blocks are scattered, block 0 unused."""

    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    block: int
    rows: list[int]
    lens: list[int]

    def __post_init__(self) -> None:
        count = [(n + self.block - 1) // self.block for n in self.lens]
        total, tokens = sum(count), sum(self.rows)
        order = (torch.randperm(total, generator=torch.Generator().manual_seed(3)) + 1).tolist()
        self.table_SM = torch.zeros(len(self.lens), max(count), dtype=torch.int32)
        slots: list[int] = []
        for s, blocks in enumerate(count):
            for m in range(blocks):
                self.table_SM[s, m] = order.pop()
            for position in range(self.lens[s] - self.rows[s], self.lens[s]):
                slots.append(int(self.table_SM[s, position // self.block]) * self.block + position % self.block)
        self.slots_T = torch.tensor(slots, dtype=torch.int32)
        self.ends_S, self.lens_S = torch.tensor(self.rows).cumsum(0), torch.tensor(self.lens)
        self.qkv = random(tokens, (self.heads + 2 * self.kv_heads) * self.head_dim, dtype=self.dtype)
        angles = random(tokens, self.head_dim // 2, dtype=torch.float32, seed=1).repeat(1, 2)
        self.cos_TD, self.sin_TD = angles.cos().to(self.dtype), angles.sin().to(self.dtype)
        self.cache = random(2, 2, total + 1, self.kv_heads, self.block, self.head_dim, dtype=self.dtype, seed=2)
        self.scale = self.head_dim**-0.5

    def run(self, cache: Tensor, picked: list[int] | None = None) -> Tensor:
        """The op on the sequences in `picked` (default: all), writing `cache`."""
        chosen = list(range(len(self.rows))) if picked is None else picked
        starts = [0, *self.ends_S.tolist()]
        t = torch.cat([torch.arange(starts[s], starts[s + 1]) for s in chosen])
        ends = torch.tensor([self.rows[s] for s in chosen]).cumsum(0)
        out: Tensor = torch.ops.cann_cpu.rope_paged_attention(
            self.qkv[t],
            self.cos_TD[t],
            self.sin_TD[t],
            cache,
            1,
            self.slots_T[t],
            self.table_SM[chosen],
            ends,
            self.lens_S[chosen],
            self.scale,
        )
        return out

    def expected(self) -> tuple[Tensor, Tensor, Tensor]:
        """Output [T, N D] and the caches [B, P, K, D] of layer 1, by the plain `atb` ops."""
        q, k, v = self.qkv.view(-1, self.heads + 2 * self.kv_heads, self.head_dim).split(
            [self.heads, self.kv_heads, self.kv_heads], 1
        )
        q, k = atb.rotary(q, k, self.cos_TD, self.sin_TD)
        k_cache, v_cache = (self.cache[1, i].transpose(1, 2).contiguous() for i in (0, 1))
        atb.reshape_and_cache(k, v.contiguous(), k_cache, v_cache, self.slots_T)
        args = (self.table_SM, self.ends_S, self.lens_S, self.scale)
        return atb.paged_attention(q, k_cache, v_cache, *args).flatten(1), k_cache, v_cache


# Decodes, chunks, a whole prompt, an idle sequence; lengths around the kernels' chunks of 64 and 128 keys.
ROWS, LENS = [1, 40, 0, 1, 9, 3, 150, 1, 1], [300, 40, 0, 1, 150, 3, 259, 128, 129]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block"),
    [(9, 3, 64, 16), (4, 4, 128, 32), (7, 1, 64, 48), (8, 2, 32, 16), (6, 2, 80, 16), (4, 2, 16, 16), (12, 1, 256, 16)],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_equals_the_plain_ops(
    dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, block: int
) -> None:
    case = Case(dtype, heads, kv_heads, head_dim, block, ROWS, LENS)
    cache, before = case.cache.clone(), cpu.kernel_calls()["attention_kernel"]
    out = case.run(cache)
    assert cpu.kernel_calls()["attention_kernel"] == before + 1
    expected, k_cache, v_cache = case.expected()
    assert error(out, expected) < TOLERANCE[dtype]
    # The kernel rounds the rotated keys once, the plain ops after every operation.
    assert error(cache[1, 0].transpose(1, 2), k_cache) < (1e-6 if dtype == torch.float32 else 8e-3)
    assert torch.equal(cache[1, 1].transpose(1, 2), v_cache)
    assert torch.equal(cache[0], case.cache[0])


@pytest.mark.parametrize("rows", [1, 70])
def test_attention_equals_scaled_dot_product_attention(rows: int) -> None:
    n, heads, kv_heads, head_dim = 200, 6, 2, 64
    case = Case(torch.float32, heads, kv_heads, head_dim, 16, [rows], [n])
    out = case.run(case.cache)
    q = case.qkv.view(rows, -1, head_dim)[:, :heads]
    q, _ = atb.rotary(q, q, case.cos_TD, case.sin_TD)
    keys, values = (case.cache[1, i, case.table_SM[0].long()].transpose(0, 1).flatten(1, 2)[:, :n] for i in (0, 1))
    seen = torch.ones(rows, n, dtype=torch.bool).tril(n - rows)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1), keys, values, attn_mask=seen, enable_gqa=True
    )
    assert error(out, expected.transpose(0, 1).flatten(1)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize(
    ("dtype", "head_dim", "block"),
    [(torch.float32, 24, 16), (torch.bfloat16, 64, 8), (torch.float16, 64, 16), (torch.float64, 32, 16)],
)
def test_what_the_kernels_do_not_fit_takes_the_plain_path(dtype: torch.dtype, head_dim: int, block: int) -> None:
    case = Case(dtype, 4, 2, head_dim, block, ROWS, LENS)
    cache, before = case.cache.clone(), cpu.kernel_calls()["attention_plain"]
    out = case.run(cache)
    assert cpu.kernel_calls()["attention_plain"] == before + 1
    expected, k_cache, v_cache = case.expected()
    assert error(out, expected) < TOLERANCE.get(dtype, 1e-6)
    assert torch.equal(cache[1, 0].transpose(1, 2), k_cache)
    assert torch.equal(cache[1, 1].transpose(1, 2), v_cache)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sequence_gets_bitwise_the_same_alone_and_in_any_batch(dtype: torch.dtype) -> None:
    case = Case(dtype, 9, 3, 64, 16, ROWS, LENS)
    together = case.run(case.cache.clone())
    starts = [0, *case.ends_S.tolist()]
    threads = torch.get_num_threads()
    try:
        for s, rows in enumerate(ROWS):
            torch.set_num_threads(1 + s % 3)
            if rows:
                assert torch.equal(case.run(case.cache.clone(), [s]), together[starts[s] : starts[s + 1]])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_prompt_gets_bitwise_the_same_whole_and_in_chunks(dtype: torch.dtype) -> None:
    whole = Case(dtype, 4, 2, 64, 16, [150], [150])
    cache = torch.zeros_like(whole.cache)
    expected, parts = whole.run(cache.clone()), []
    for first, last in ((0, 37), (37, 64), (64, 150)):
        out: Tensor = torch.ops.cann_cpu.rope_paged_attention(
            whole.qkv[first:last],
            whole.cos_TD[first:last],
            whole.sin_TD[first:last],
            cache,
            1,
            whole.slots_T[first:last],
            whole.table_SM,
            torch.tensor([last - first]),
            torch.tensor([last]),
            whole.scale,
        )
        parts.append(out)
    assert torch.equal(torch.cat(parts), expected)


def test_rows_of_no_sequence_are_zero() -> None:
    case = Case(torch.float32, 4, 2, 64, 16, [2, 3], [20, 3])
    case.ends_S = torch.tensor([2, 3])
    case.rows = [2, 1]
    out: Tensor = torch.ops.cann_cpu.rope_paged_attention(
        case.qkv, case.cos_TD, case.sin_TD, case.cache, 1, case.slots_T, case.table_SM, case.ends_S, case.lens_S, 1.0
    )
    assert out.shape[0] == 5
    assert not out[3:].any()
    assert out[:3].all()


def test_slots_and_blocks_outside_the_cache_are_refused() -> None:
    case = Case(torch.float32, 4, 2, 64, 16, [1], [20])
    case.table_SM[0, 1] = 99
    with pytest.raises(RuntimeError, match="block 99 is outside the cache"):
        case.run(case.cache)
    case.slots_T[0] = -1
    with pytest.raises(RuntimeError, match="slot -1 is outside the cache"):
        case.run(case.cache)


def test_the_kernels_of_lesser_isas_pass_these_tests_too() -> None:
    for isa in LESSER if "CANN_TEST_ISA" not in os.environ else []:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "-k", "not lesser", __file__],
            env={**os.environ, "CANN_TEST_ISA": isa},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, isa + done.stdout[-3000:] + done.stderr[-1000:]
