"""Sampling against transformers' logits warpers and against the distributions themselves."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cann_runtime.errors import RequestError
from cann_runtime.request import SamplingParams
from cann_runtime.sampler import sample, token_probs

V = 3000  # more than the sampler sorts at first


def logits(rows: int, seed: int = 0, spread: float = 2.0) -> torch.Tensor:
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(seed)) * spread


def generators(*seeds: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def warped(logits_1V: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """transformers' probabilities for the same settings."""
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    ids = torch.zeros(1, 1, dtype=torch.long)
    scores = TemperatureLogitsWarper(params.temperature)(ids, logits_1V)
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(ids, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(ids, scores)
    return scores.softmax(-1)


SETTINGS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=1.0, top_k=1),
    SamplingParams(temperature=0.7, top_k=50),
    SamplingParams(temperature=1.0, top_k=10 * V),
    SamplingParams(temperature=1.0, top_p=0.9),
    SamplingParams(temperature=1.0, top_p=1e-6),
    SamplingParams(temperature=3.0, top_p=0.999),  # needs more than the first candidates
    SamplingParams(temperature=1.5, top_k=200, top_p=0.5),
]


@pytest.mark.parametrize("params", SETTINGS, ids=str)
def test_probabilities_equal_those_of_transformers(params: SamplingParams) -> None:
    for seed in range(5):
        row = logits(1, seed)
        ours, theirs = token_probs(row, [params]), warped(row, params)
        ours = ours / ours.sum()
        # transformers sums in float32 from the small end: a token at the very edge may fall on the other side.
        assert int(((ours > 0) != (theirs > 0)).sum()) <= (0 if params.top_p == 1 else 1)
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=2e-5)


def test_rows_of_a_batch_do_not_depend_on_each_other() -> None:
    rows = logits(len(SETTINGS), 7)
    together = token_probs(rows, SETTINGS)
    for i, params in enumerate(SETTINGS):
        assert torch.equal(together[i], token_probs(rows[i : i + 1], [params])[0])


def test_a_seed_gives_one_sequence_of_choices_in_any_batch() -> None:
    rows = logits(len(SETTINGS), 8)
    seeds = list(range(len(SETTINGS)))
    together = generators(*seeds)
    steps = [sample(rows, V, SETTINGS, together) for _ in range(5)]
    for i, params in enumerate(SETTINGS):
        alone = generators(seeds[i])
        assert [sample(rows[i : i + 1], V, [params], alone)[0] for _ in range(5)] == [step[i] for step in steps]


def test_draws_follow_the_distribution() -> None:
    row = torch.tensor([[2.0, 1.0, 0.0, -1.0, float("-inf")]])
    params = SamplingParams(temperature=1.3)
    [generator] = generators(1)
    count = 20000
    drawn = torch.tensor([sample(row, 5, [params], [generator])[0] for _ in range(count)])
    expected = (row / 1.3).softmax(-1)[0] * count
    found = drawn.bincount(minlength=5)
    assert int(found[4]) == 0
    chi2 = float((((found - expected) ** 2)[:4] / expected[:4]).sum())
    assert chi2 < 16.3  # 3 degrees of freedom, one in a thousand


def test_greedy_takes_the_first_of_equal_logits_as_torch_does() -> None:
    row = torch.zeros(1, 8)
    row[0, [3, 5]] = 1.0
    assert sample(row, 8, [SamplingParams()], generators(0)) == [int(row.argmax())]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_columns_past_the_vocabulary_are_cut_off_first(dtype: torch.dtype) -> None:
    rows = logits(3, 2).to(dtype)
    padded = torch.nn.functional.pad(rows, (0, 40), value=float("inf"))
    params = [SamplingParams(), SamplingParams(temperature=1.0, top_p=0.9), SamplingParams(temperature=1.0, top_k=3)]
    assert sample(padded, V, params, generators(1, 2, 3)) == sample(rows, V, params, generators(1, 2, 3))
    assert sample(padded, V, params, generators(1, 2, 3))[0] == int(rows[0].float().argmax())


@settings(max_examples=80, deadline=None)
@given(
    st.integers(0, 10**6),
    st.floats(0.05, 5),
    st.integers(0, 60),
    st.floats(0.01, 1),
    st.integers(2, 50),
    st.booleans(),
)
def test_a_choice_is_always_among_the_kept_tokens(
    seed: int, temperature: float, top_k: int, top_p: float, vocab: int, ties: bool
) -> None:
    row = torch.randn(1, vocab, generator=torch.Generator().manual_seed(seed)) * 3
    if ties:
        row = row.round()
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    probs = token_probs(row, [params])[0]
    assert top_p - 1e-5 <= float(probs.sum()) <= 1 + 1e-5
    assert float(probs[int(row.argmax())]) > 0
    [token] = sample(row, vocab, [params], generators(seed))
    assert float(probs[token]) > 0
    if top_k:
        floor = row[0].sort(descending=True).values[min(top_k, vocab) - 1]
        assert bool((row[0][probs > 0] >= floor).all())


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"max_tokens": 0},
        {"seed": 2**63},
    ],
    ids=str,
)
def test_values_out_of_range_are_refused_by_name(values: dict[str, float]) -> None:
    with pytest.raises(RequestError, match=next(iter(values))):
        SamplingParams(**values)  # type: ignore[arg-type]
