"""The sampler against the exact filtered softmax, and its independence of other rows."""

import math
import random
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deepdraft.engine.sampler import Row, Sampler, scores
from deepdraft.types import SamplingParams

V = 64


def logits(seed: int, rows: int = 1, vocab: int = V) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def sample_ids(x: torch.Tensor, params: SamplingParams, positions: range) -> list[int]:
    sampler = Sampler(x.shape[-1])
    return [
        c.token_id
        for p in positions
        for c in sampler.sample(x, [Row(params=params, position=p)] * x.shape[0])
    ]


def exact_distribution(x: list[float], params: SamplingParams) -> list[float]:
    """Filtered softmax in plain Python: temperature, then top-k, top-p, min-p."""
    weights = [math.exp((v - max(x)) / params.temperature) for v in x]
    order = sorted(range(len(x)), key=lambda i: (-x[i], i))
    if params.top_k:
        order = order[: params.top_k]
    total, kept, before = sum(weights[i] for i in order), [], 0.0
    for i in order:
        if kept and before >= params.top_p * total:
            break
        kept.append(i)
        before += weights[i]
    kept = [i for i in kept if weights[i] >= params.min_p * weights[order[0]]]
    total = sum(weights[i] for i in kept)
    return [weights[i] / total if i in kept else 0.0 for i in range(len(x))]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.6),
        SamplingParams(top_k=7),
        SamplingParams(top_p=0.8),
        SamplingParams(min_p=0.1),
        SamplingParams(temperature=1.4, top_k=20, top_p=0.9, min_p=0.02),
    ],
    ids=["plain", "cool", "top_k", "top_p", "min_p", "all"],
)
def test_samples_follow_the_filtered_softmax(params: SamplingParams) -> None:
    x = logits(3)
    expected = exact_distribution(x[0].double().tolist(), params)
    num = 4000
    counts = [0] * V
    for token_id in sample_ids(x, params, range(num)):
        counts[token_id] += 1
    assert all(count == 0 for count, p in zip(counts, expected, strict=True) if p == 0.0)
    # Cells expected fewer than 5 times are joined, as the chi-square approximation asks.
    cells = [(c, num * p) for c, p in zip(counts, expected, strict=True) if num * p >= 5]
    rest = (num - sum(c for c, _ in cells), num - sum(e for _, e in cells))
    cells += [rest] if rest[1] >= 5 else []
    chi2 = sum((c - e) ** 2 / e for c, e in cells)
    freedom = len(cells) - 1
    # Wilson-Hilferty: the cube root of chi2/freedom is nearly normal; 4 sigma one-sided.
    z = ((chi2 / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    assert z < 4.0, f"{chi2=} {freedom=} {z=}"


def test_scores_are_the_log_of_the_exact_distribution() -> None:
    rng = random.Random(5)
    for seed in range(40):
        params = SamplingParams(
            temperature=rng.choice([0.3, 1.0, 1.7]),
            top_k=rng.choice([0, 1, 5, 64, 100]),
            top_p=rng.choice([1.0, 0.95, 0.5, 0.01]),
            min_p=rng.choice([0.0, 0.05, 1.0]),
        )
        x = logits(seed)[0]
        got = torch.softmax(scores(x, Row(params=params, position=0)), -1)
        want = torch.tensor(exact_distribution(x.double().tolist(), params), dtype=torch.float64)
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


def test_neighbouring_positions_and_seeds_are_uncorrelated() -> None:
    sampler = Sampler(4096)
    one = sampler.gumbel(7, 100)
    for other in (sampler.gumbel(7, 101), sampler.gumbel(8, 100), sampler.gumbel(100, 7)):
        r = torch.corrcoef(torch.stack([one, other]))[0, 1].item()
        assert abs(r) < 4 / math.sqrt(4096)
    # Euler's constant and pi^2/6, within 5 standard errors.
    assert abs(one.mean().item() - 0.57722) < 5 * 1.2825 / 64
    assert abs(one.var().item() - 1.64493) < 0.5


def test_noise_is_pinned() -> None:
    """Recorded answers of a seed stay valid: the noise may not change silently."""
    noise = Sampler(5).gumbel(42, 17)
    # splitmix64 in plain integers, independent of the tensor code
    mask = 2**64 - 1

    def mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    key = mix((mix(42) + 17 * 0x9E3779B97F4A7C15) & mask)
    for token_id in range(5):
        bits = mix((key + (token_id + 1) * 0x9E3779B97F4A7C15) & mask) >> 12
        assert noise[token_id].item() == pytest.approx(
            -math.log(-math.log((bits + 0.5) * 2.0**-52)), rel=1e-12
        )


def test_mix_is_splitmix64() -> None:
    """First output of the published generator for state 0 (a known answer)."""
    from deepdraft.engine import sampler

    assert sampler._mix(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF


def test_a_rows_choice_does_not_depend_on_other_rows() -> None:
    rng = random.Random(11)
    x = logits(9, rows=12, vocab=517)
    rows = [
        Row(
            params=SamplingParams(
                temperature=rng.choice([0.0, 0.7, 1.0, 2.0]),
                top_k=rng.choice([0, 3, 50]),
                top_p=rng.choice([1.0, 0.9]),
                min_p=rng.choice([0.0, 0.05]),
                frequency_penalty=rng.choice([0.0, 0.5]),
                logit_bias=rng.choice([(), ((3, 4.0),)]),
                seed=rng.randrange(2**63),
                logprobs=rng.choice([None, 0, 4]),
            ),
            position=rng.randrange(1_000_000),
            output_counts={1: 2, 5: 1},
        )
        for _ in range(12)
    ]
    sampler = Sampler(517)
    together = sampler.sample(x, rows)
    for i, row in enumerate(rows):
        assert sampler.sample(x[i : i + 1].clone(), [row]) == [together[i]]
    order = list(range(12))
    rng.shuffle(order)
    assert sampler.sample(x[order], [rows[i] for i in order]) == [together[i] for i in order]


def test_temperature_0_takes_the_lowest_id_among_equals() -> None:
    x = torch.zeros(1, 1000)
    x[0, 700] = x[0, 333] = x[0, 999] = 5.0
    params = SamplingParams(temperature=0.0)
    assert sample_ids(x, params, range(1)) == [333]
    biased = SamplingParams(temperature=0.0, logit_bias=((700, 0.5), (10, 5.5)))
    assert sample_ids(x, biased, range(1)) == [10]


def test_ties_at_the_top_k_border_keep_the_lowest_ids() -> None:
    row = Row(params=SamplingParams(top_k=2), position=0)
    kept = scores(torch.tensor([1.0, 3.0, 3.0, 3.0]), row)
    assert torch.isfinite(kept).tolist() == [False, True, True, False]


def test_tiny_temperature_is_greedy_and_never_nan() -> None:
    x = logits(1)
    best = int(x.argmax())
    assert set(sample_ids(x, SamplingParams(temperature=1e-300), range(20))) == {best}


def test_penalties_by_hand() -> None:
    x = torch.tensor([2.0, -2.0, 1.0, 0.5])
    row = Row(
        params=SamplingParams(
            temperature=0.0,
            repetition_penalty=2.0,
            frequency_penalty=0.25,
            presence_penalty=0.5,
            logit_bias=((3, 9.0),),
        ),
        position=0,
        output_counts={0: 3},
        prompt_ids=(1,),
    )
    # id 0: 2/2 - 3*0.25 - 0.5; id 1: -2*2 (prompt only); id 2 untouched; id 3 biased
    assert scores(x, row).tolist() == [-0.25, -4.0, 1.0, 9.5]
    assert x.tolist() == [2.0, -2.0, 1.0, 0.5], "the caller's logits were changed"


def test_penalties_do_not_touch_a_first_token() -> None:
    row = Row(params=SamplingParams(presence_penalty=2.0), position=0, output_counts={})
    x = logits(2)[0]
    torch.testing.assert_close(scores(x, row), x.double() - x.double().max())


def test_logprobs_are_those_of_the_unfiltered_model() -> None:
    x = logits(4)
    params = SamplingParams(temperature=0.5, top_k=1, logprobs=3)
    choice = Sampler(V).sample(x, [Row(params=params, position=0)])[0]
    want = torch.log_softmax(x[0].double(), -1)
    assert choice.logprob is not None
    assert choice.logprob.logprob == pytest.approx(want[choice.token_id].item(), abs=1e-8)
    best = torch.sort(want, descending=True)
    assert [i for i, _ in choice.logprob.top] == best.indices[:3].tolist()
    for (_, got), value in zip(choice.logprob.top, best.values[:3].tolist(), strict=True):
        assert got == pytest.approx(value, abs=1e-8)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_bad_logits_fail_their_row_only(bad: float, temperature: float) -> None:
    x = logits(6, rows=3)
    x[1, 17] = bad
    row = Row(params=SamplingParams(temperature=temperature), position=5)
    good = Sampler(V).sample(x[:1], [row])[0]
    choices = Sampler(V).sample(x, [row] * 3)
    assert choices[0] == good
    assert choices[1].token_id == -1 and choices[1].error is not None
    assert "position 5" in choices[1].error
    assert choices[2].error is None


def test_a_masked_token_is_never_chosen() -> None:
    x = torch.full((1, V), -math.inf)
    x[0, 3] = x[0, 9] = 0.0
    assert set(sample_ids(x, SamplingParams(), range(50))) == {3, 9}


class OperatorCount(TorchDispatchMode):
    """Counts the operators that reach the dispatcher."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.total += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("temperature", "most"), [(0.0, 4), (1.0, 32)])
def test_one_row_costs_few_operator_calls(temperature: float, most: int) -> None:
    x = logits(8)
    sampler = Sampler(V)
    row = Row(params=SamplingParams(temperature=temperature), position=3)
    with OperatorCount() as count:
        sampler.sample(x, [row])
    assert 0 < count.total <= most
