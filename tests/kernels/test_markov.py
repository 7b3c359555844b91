"""Markov rounds and the picks of a step's rows."""

import pytest
import torch

from deepdraft.engine.sampler import Row, Sampler
from deepdraft.kernels import gemv, layout, markov, sample
from deepdraft.kernels.runtime import pad_rows
from deepdraft.ops import markov as reference
from deepdraft.types import SamplingParams
from tests.kernels.cases import grid
from tests.kernels.interpreter import DEVICE

TEMPERATURES = [0.0, 0.8, 1.5]
SEEDS = [5, -9, 2**60]


def random(*shape, seed, spread=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * spread


def ints(values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def settings():
    return (
        torch.tensor(TEMPERATURES, dtype=torch.float64, device=DEVICE),
        ints(SEEDS, torch.int64),
    )


def best(row, token_ids, temperature, noise):
    score = row.double()
    if temperature:
        score = (score - score.max()) / temperature + noise[token_ids]
    return int(score.argmax())


# (vocabulary, rank, hidden, block, shortlist)
SMALL = [(70, 32, 64, 3, 16), (40, 64, 96, 2, 40)]


@pytest.mark.parametrize("shape", grid(SMALL, [(129280, 256, 5120, 5, 256)]))
def test_rounds(shape):
    vocabulary, rank, hidden, block, keep = shape
    embed, head = (random(vocabulary, rank, seed=s, spread=0.4).bfloat16() for s in (1, 2))
    base = random(3 * block + 1, vocabulary, seed=3, spread=2.0)
    h = random(3 * block, hidden, seed=4).bfloat16()
    weight = random(hidden + rank, seed=5, spread=0.05)
    width, slots = block + 1, [2, 0, 1]
    last, place = [3, 11, 30], [8, 0, -1]
    got = markov.markov_rounds(
        base.to(DEVICE), embed.to(DEVICE), layout.tile_bf16(head.to(DEVICE)), h.to(DEVICE),
        weight.to(DEVICE), ints(last), ints(place), ints([s for s in slots for _ in range(width)]),
        *settings(), block=block, width=width, keep=keep,
    )  # fmt: skip
    sampler = Sampler(vocabulary)
    for q in range(2):
        own = slice(q * block, (q + 1) * block)
        order = torch.sort(base[own], dim=1, descending=True, stable=True).indices[:, :keep]
        temperature, seed = TEMPERATURES[slots[q]], SEEDS[slots[q]]

        def choose(row, token_ids, b, q=q, temperature=temperature, seed=seed):
            return best(row, token_ids, temperature, sampler.gumbel(seed, place[q] + 1 + b))

        shortlist = order.sort(1).values
        assert torch.equal(got.shortlist[own].cpu().long(), shortlist)
        drafts, raw, logits = reference.rounds(
            base[own].double(), shortlist, embed.double(), head.double(), h[own].double(),
            weight.double(), last[q], choose,
        )  # fmt: skip
        assert got.tokens[q].tolist() == drafts
        torch.testing.assert_close(got.raw[q].cpu().double(), raw, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(got.logits[q].cpu().double(), logits, rtol=1e-5, atol=1e-4)
    assert (got.tokens[2] == -1).all()


def test_equal_logits_go_to_the_lower_token_and_unusable_ones_to_none():
    base = torch.zeros(4, 64)
    base[0, 20] = base[0, 8] = 3.0
    base[1] = float("nan")
    empty = torch.zeros(64, 32).bfloat16().to(DEVICE)
    got = markov.markov_rounds(
        base.to(DEVICE), empty, layout.tile_bf16(empty), torch.zeros(4, 32).bfloat16().to(DEVICE),
        torch.zeros(64, device=DEVICE), ints([1, 1]), ints([3, 3]), ints([0] * 6), *settings(),
        block=2, width=3, keep=16,
    )  # fmt: skip
    assert got.tokens.tolist() == [[8, -1], [0, 0]]


def test_a_sequence_does_not_depend_on_the_others():
    vocabulary, rank, block = 50, 32, 2
    embed, head = (random(vocabulary, rank, seed=s).bfloat16().to(DEVICE) for s in (1, 2))
    base = random(3 * block, vocabulary, seed=3).to(DEVICE)
    h, weight = random(3 * block, 32, seed=4).bfloat16().to(DEVICE), random(64, seed=5).to(DEVICE)
    tiled = layout.tile_bf16(head)

    def run(order):
        rows = [q * block + b for q in order for b in range(block)]
        slots = [s for q in order for s in [q] * 3]
        return markov.markov_rounds(
            base[rows], embed, tiled, h[rows], weight, ints([7 + q for q in order]),
            ints([4] * len(order)), ints(slots), *settings(), block=block, width=3, keep=16,
        )  # fmt: skip

    full = run([0, 1, 2])
    for order in ([1], [2, 0]):
        got = run(order)
        for field in ("tokens", "raw", "logits"):
            assert torch.equal(getattr(got, field), getattr(full, field)[order])


@pytest.mark.parametrize("vocabulary", grid([90, 5000], [129280]))
def test_a_round_without_a_shortlist(vocabulary):
    rank, rows = 64, 3
    embed, head = (random(vocabulary, rank, seed=s, spread=0.4).bfloat16() for s in (1, 2))
    base = random(rows, vocabulary, seed=3, spread=2.0)
    previous, positions, slots = [5, 60, 2], [7, 19, -1], [1, 2, 0]
    e = markov.embed_rows(ints(previous), embed.to(DEVICE))
    assert torch.equal(e.cpu(), embed[previous])
    bias = gemv.gemv(pad_rows(e), layout.tile_bf16(head.to(DEVICE)), dtype=torch.float32)[:rows]
    got = sample.pick_rows(
        base.to(DEVICE), ints(positions), ints(slots), *settings(), bias=bias.contiguous()
    )
    logits = base + bias.cpu()
    asked = [
        Row(params=SamplingParams(temperature=TEMPERATURES[s], seed=SEEDS[s]), position=p + 1)
        for s, p in zip(slots, positions, strict=True)
    ]
    want = [c.token_id for c in Sampler(vocabulary).sample(logits, asked)]
    assert got.tolist() == [*want[:2], -1]


def test_wrong_operands_are_refused():
    base, half = torch.zeros(2, 64, device=DEVICE), torch.zeros(64, 32).bfloat16().to(DEVICE)
    one, weight = ints([1]), torch.zeros(64, device=DEVICE)
    given = {"block": 3, "width": 4}
    with pytest.raises(ValueError, match="do not hold 1 x 3 drafts"):
        markov.markov_rounds(
            base, half, layout.tile_bf16(half), half[:2], weight, one, one, ints([0] * 4),
            *settings(), **given,
        )  # fmt: skip
    with pytest.raises(ValueError, match="does not hold 3 rows"):
        sample.pick_rows(base, ints([0] * 3), ints([0] * 3), *settings())
