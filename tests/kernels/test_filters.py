"""Sampling under every setting, and log-probabilities, against the engine's sampler."""

from collections import Counter

import numpy as np
import pytest
import torch

from deepdraft.engine.sampler import Row, Sampler, logprobs
from deepdraft.kernels import filters
from deepdraft.types import SamplingParams
from tests.kernels.cases import grid
from tests.kernels.interpreter import DEVICE

ASKED = [
    {},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.7, "top_k": 5, "seed": -2},
    {"temperature": 1.3, "top_p": 0.6, "seed": 9},
    {"temperature": 1.0, "top_p": 0.05, "top_k": 9, "seed": 2**63 + 5},
    {"temperature": 2.0, "min_p": 0.2, "seed": 1},
    {"temperature": 0.0, "repetition_penalty": 1.7, "frequency_penalty": 0.4},
    {
        "temperature": 0.9, "presence_penalty": 1.1, "frequency_penalty": -0.3, "top_p": 0.9,
        "repetition_penalty": 0.8, "logit_bias": {3: 4.0, 11: -100.0}, "top_k": 12, "seed": 4,
    },
]  # fmt: skip


def ints(values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


class Case:
    """Rows of some sequences, and what the engine's sampler says of them."""

    def __init__(self, vocabulary, asked, width, seed=0):
        generator = torch.Generator().manual_seed(seed)
        count = len(asked)
        self.vocabulary, self.width = vocabulary, width
        self.logits = torch.randn(count * width, vocabulary, generator=generator) * 2
        self.logits[0, 7] = self.logits[0, 4] = 30.0
        ids = torch.randint(0, min(vocabulary, 12), (count, width), generator=generator)
        firsts = torch.randint(0, 50, (count,), generator=generator).tolist()
        self.settings = filters.Settings.empty(count, vocabulary, DEVICE)
        self.rows = []
        for q, fields in enumerate(asked):
            params = SamplingParams(
                **{**fields, "logit_bias": tuple(fields.get("logit_bias", {}).items())}
            )
            prompt = [1, 2, 9]
            counts = Counter({4: 2, 6: 1, int(ids[q, 0]): 1})
            self.settings.set(
                q, temperature=params.temperature, top_k=params.top_k, top_p=params.top_p,
                min_p=params.min_p, repetition=params.repetition_penalty,
                frequency=params.frequency_penalty, presence=params.presence_penalty,
                seed=params.seed, bias=dict(params.logit_bias), prompt=prompt,
            )  # fmt: skip
            for token, times in counts.items():
                self.settings.counts[q, token] = times
            for i in range(width):
                if i:
                    counts = counts + Counter([int(ids[q, i])])
                self.rows.append(
                    Row(
                        params=params, position=firsts[q] + i + 1, output_counts=counts,
                        prompt_ids=prompt,
                    )
                )  # fmt: skip
        self.ids = ids.flatten().int().to(DEVICE)
        self.positions = ints([row.position - 1 for row in self.rows])
        self.slots = ints([q for q in range(count) for _ in range(width)])

    def picked(self, at=None, mask=None, cut=True):
        rows = list(range(len(self.rows))) if at is None else at
        return filters.pick_filtered(
            self.logits[rows].to(DEVICE), self.ids[rows], self.positions[rows], self.slots[rows],
            self.settings, width=self.width, cut=cut, mask=mask,
        ).tolist()  # fmt: skip

    def wanted(self):
        return [c.token_id for c in Sampler(self.vocabulary).sample(self.logits, self.rows)]


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("vocabulary", grid([60], [129280]))
def test_choices_are_those_of_the_sampler(vocabulary, width):
    for seed in range(3):
        case = Case(vocabulary, ASKED, width, seed)
        assert case.picked() == case.wanted()


def test_without_cuts_they_are_not_looked_at():
    case = Case(50, [*ASKED[:2], *ASKED[5:7]], 2)
    assert case.picked(cut=False) == case.wanted()


@pytest.mark.parametrize("top_p", [1e-4, 1e-20, 0.25, 0.5, 0.999999])
def test_a_cut_is_exact(top_p):
    # Equal weights: how many stay is a question of exact arithmetic.
    asked = [{"temperature": 1.0, "top_p": top_p, "seed": s} for s in range(6)]
    case = Case(64, asked, 1)
    case.logits[:] = 1.5
    assert case.picked() == case.wanted()


def test_masks_and_forbidden_rows():
    case = Case(40, ASKED[:4], 1)
    allowed = torch.zeros(4, 40, dtype=torch.uint8)
    allowed[:, 10:20] = 1
    allowed[2] = 0
    case.rows = [
        Row(params=r.params, position=r.position, output_counts=r.output_counts,
            prompt_ids=r.prompt_ids, mask=np.array(m, dtype=bool))
        for r, m in zip(case.rows, allowed.tolist(), strict=True)
    ]  # fmt: skip
    wanted = case.wanted()
    assert wanted[2] == -1 and min(wanted[:2]) >= 10
    assert case.picked(mask=allowed.to(DEVICE)) == wanted


def test_unusable_rows_give_no_token():
    case = Case(40, ASKED[:4], 1)
    case.logits[1, 3], case.logits[2, 8] = float("nan"), float("inf")
    case.positions[3] = -1
    assert case.picked() == [case.wanted()[0], -1, -1, -1]


def test_a_row_does_not_depend_on_the_others():
    case = Case(60, ASKED, 1)
    full = case.picked()
    for at in ([3], [7, 0, 4]):
        assert case.picked(at) == [full[i] for i in at]


def test_confirmed_tokens_are_counted():
    settings = filters.Settings.empty(2, 9, DEVICE)
    filters.count_tokens(ints([4, 4, 5, -1]), ints([0, 1, -1, 3]), ints([1, 1, 1, 0]), settings)
    assert settings.counts.tolist() == [[0] * 9, [0, 0, 0, 0, 2, 0, 0, 0, 0]]


@pytest.mark.parametrize("vocabulary", grid([70, 4100], [129280]))
def test_log_probabilities(vocabulary):
    logits = torch.randn(3, vocabulary, generator=torch.Generator().manual_seed(1)) * 3
    logits[1, 20] = logits[1, 9] = 40.0
    picked, listed = [5, 20, 0], 4
    chosen, best, tokens = filters.token_logprobs(logits.to(DEVICE), ints(picked), listed=listed)
    for row in range(3):
        want = logprobs(logits[row], picked[row], listed)
        assert abs(chosen[row].item() - want.logprob) < 1e-12
        assert tokens[row].tolist() == [token for token, _ in want.top]
        assert np.allclose(best[row].tolist(), [x for _, x in want.top], rtol=0, atol=1e-12)


def test_wrong_operands_are_refused():
    case = Case(40, ASKED[:2], 1)
    with pytest.raises(ValueError, match="by 3"):
        case.width = 3
        case.picked()
    case.width = 1
    with pytest.raises(ValueError, match="mask is uint8"):
        case.picked(mask=torch.zeros(2, 39, dtype=torch.uint8, device=DEVICE))
