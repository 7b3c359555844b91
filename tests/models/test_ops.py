"""Each operation of deepdraft.ops against a second, plain formulation (architecture notes 2 to 4).

Plain means: one row, one head, one channel at a time, in Python floats.
"""

import math

import pytest
import torch
from torch import Tensor

from deepdraft.ops import attention, elementwise, index, moe

TIGHT = {"rtol": 1e-12, "atol": 1e-12}


def rand(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    g = torch.Generator().manual_seed(seed + 1000 * len(shape) + sum(shape))
    return scale * torch.randn(shape, generator=g, dtype=torch.float64)


def close(a: Tensor, b: object) -> None:
    torch.testing.assert_close(a, torch.as_tensor(b, dtype=a.dtype), **TIGHT)


# ---- elementwise ---------------------------------------------------------------------------


@pytest.mark.parametrize("eps", [1e-20, 1e-6, 0.5])
def test_rms_norm(eps: float) -> None:
    x, w = rand(3, 8), rand(8, seed=1)
    for row, got in zip(x.tolist(), elementwise.rms_norm(x, w, eps), strict=True):
        r = 1 / math.sqrt(sum(v * v for v in row) / len(row) + eps)
        close(got, [v * r * float(g) for v, g in zip(row, w, strict=True)])
    close(elementwise.rms_norm(x, None, eps), elementwise.rms_norm(x, torch.ones(8), eps))


def test_rms_norm_of_small_and_zero_rows() -> None:
    """eps is 1e-20: small rows are scaled up as any other, a zero row stays zero."""
    x = torch.stack([torch.full((4,), 1e-9), torch.zeros(4)]).float()
    y = elementwise.rms_norm(x, torch.ones(4), 1e-20)
    torch.testing.assert_close(y[0], torch.full((4,), math.sqrt(1 / 1.01)), rtol=1e-5, atol=0.0)
    assert torch.equal(y[1], torch.zeros(4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gates(dtype: torch.dtype) -> None:
    values = [-800.0, -60.0, -3.5, -1e-9, 0.0, 1e-9, 0.7, 25.0, 60.0, 800.0]
    x = torch.tensor(values, dtype=dtype)

    def sigmoid(v: float) -> float:
        return 1 / (1 + math.exp(-v)) if v > -700 else 0.0

    tol = {"rtol": 1e-5, "atol": 1e-37} if dtype == torch.float32 else TIGHT
    for f, naive in (
        (elementwise.sigmoid, sigmoid),
        (elementwise.silu, lambda v: v * sigmoid(v)),
        (elementwise.softplus, lambda v: max(v, 0.0) + math.log1p(math.exp(-abs(v)))),
    ):
        want = torch.tensor([naive(v) for v in values], dtype=dtype)
        before = x.clone()
        torch.testing.assert_close(f(x), want, **tol)
        assert torch.equal(x, before)  # inputs are left alone


def rotated(x: list[float], position: int, freq: list[float]) -> list[float]:
    """Adjacent pairs of the last channels as complex numbers, times exp(i * angle)."""
    out = list(x)
    start = len(x) - 2 * len(freq)
    for k, f in enumerate(freq):
        a, b = x[start + 2 * k], x[start + 2 * k + 1]
        turned = complex(a, b) * complex(math.cos(position * f), math.sin(position * f))
        out[start + 2 * k], out[start + 2 * k + 1] = turned.real, turned.imag
    return out


@pytest.mark.parametrize("yarn", [None, (16.0, 32.0, 1.0, 64), (4.0, 32.0, 1.0, 4096)])
def test_rotation(yarn: tuple[float, float, float, int] | None) -> None:
    dim, rope, theta = 12, 8, 10000.0
    rotary = elementwise.Rotary(
        dim=dim, rope_dim=rope, theta=theta, yarn=yarn, dtype=torch.float64, device="cpu"
    )
    freq = [theta ** (-2 * k / rope) for k in range(rope // 2)]
    if yarn is not None:
        factor, fast, slow, original = yarn

        def place(turns: float) -> float:
            return rope * math.log(original / (2 * math.pi * turns)) / (2 * math.log(theta))

        low = max(math.floor(place(fast)), 0)
        high = min(math.ceil(place(slow)), rope - 1)
        for k, f in enumerate(freq):
            t = min(max((k - low) / (high - low), 0.0), 1.0)
            freq[k] = f / factor * t + f * (1 - t)
    positions = torch.tensor([0, 1, 7, 1000])
    cos, sin = rotary.table(positions)
    x = rand(4, dim)
    turned = elementwise.rotate(x, cos, sin, rotary.swap)
    for i, p in enumerate(positions.tolist()):
        close(turned[i], rotated(x[i].tolist(), p, freq))
    close(elementwise.rotate(turned, cos, -sin, rotary.swap), x)


def test_yarn_of_the_published_model() -> None:
    """Values of architecture notes 3.1."""
    rotary = elementwise.Rotary(
        dim=64,
        rope_dim=64,
        theta=160000.0,
        yarn=(16.0, 32.0, 1.0, 65536),
        dtype=torch.float64,
        device="cpu",
    )
    freq = rotary.freq[::2]
    for k, value in (
        (15, 0.003635538583622),
        (16, 0.002265625),
        (20, 2.969777e-4),
        (24, 1.953125e-5),
        (31, 5.680529e-7),
    ):
        assert float(freq[k]) == pytest.approx(value, rel=1e-6)


@pytest.mark.parametrize(("streams", "iters"), [(4, 20), (2, 1), (3, 5)])
def test_residual_mix(streams: int, iters: int) -> None:
    s, d, eps = streams, 6, 1e-6
    fn, base, scale = rand((2 + s) * s, s * d), rand((2 + s) * s), rand(3)
    x = rand(3, s, d, seed=5)
    mix = elementwise.HyperMix(fn, base, scale, streams=s, iters=iters, eps=eps)
    pre, post, comb = mix(x, 1e-20)
    for r in range(3):
        flat = x[r].reshape(-1).tolist()
        rms = 1 / math.sqrt(sum(v * v for v in flat) / len(flat) + 1e-20)
        m = [rms * sum(float(f) * v for f, v in zip(row, flat, strict=True)) for row in fn]

        def gate(i: int, a: int, m: list[float] = m) -> float:
            return 1 / (1 + math.exp(-(float(scale[i]) * m[i * s + a] + float(base[i * s + a]))))

        close(pre[r, 0], [gate(0, a) + eps for a in range(s)])
        close(post[r, 0], [2 * gate(1, a) for a in range(s)])
        c = [
            [
                math.exp(float(scale[2]) * m[2 * s + s * a + b] + float(base[2 * s + s * a + b]))
                for b in range(s)
            ]
            for a in range(s)
        ]
        c = [[v / sum(row) + eps for v in row] for row in c]

        def columns(c: list[list[float]]) -> list[list[float]]:
            total = [sum(row[b] for row in c) + eps for b in range(s)]
            return [[v / t for v, t in zip(row, total, strict=True)] for row in c]

        c = columns(c)
        for _ in range(iters - 1):
            c = columns([[v / (sum(row) + eps) for v in row] for row in c])
        close(comb[r], c)


def test_collapse_and_expand() -> None:
    s, d = 3, 5
    x, y, mix, post, comb = rand(2, s, d), rand(2, d), rand(2, 1, s), rand(2, 1, s), rand(2, s, s)
    got, out = elementwise.collapse(x, mix), elementwise.expand(y, x, post, comb)
    for r in range(2):
        for k in range(d):
            close(got[r, k], sum(float(mix[r, 0, a] * x[r, a, k]) for a in range(s)))
            for b in range(s):
                kept = sum(float(comb[r, a, b] * x[r, a, k]) for a in range(s))
                close(out[r, b, k], float(post[r, 0, b] * y[r, k]) + kept)


# ---- attention -----------------------------------------------------------------------------


def naive_attention(
    q: Tensor, keys: Tensor, bias: Tensor, scale: float, sink: int
) -> list[list[list[float]]]:
    """Softmax over the keys that are there; the sink's logit in the denominator only."""
    out = []
    for r in range(q.shape[0]):
        heads = []
        for h in range(q.shape[1]):
            weights: dict[int, float] = {}
            total = 0.0
            for n in range(keys.shape[1]):
                b = float(bias[r, h, n])
                if b == -math.inf:
                    continue
                e = math.exp(scale * float(q[r, h] @ keys[r, n]) + b)
                total += e
                if n != sink:
                    weights[n] = e
            value = torch.zeros(q.shape[2], dtype=torch.float64)
            for n, w in weights.items():
                value += w / total * keys[r, n]
            heads.append(value.tolist())
        out.append(heads)
    return out


def attention_case() -> tuple[Tensor, Tensor, Tensor, int]:
    r, h, n, c, sink = 3, 2, 9, 8, 4
    q, keys, bias = rand(r, h, c), rand(r, n, c), torch.zeros(r, h, n, dtype=torch.float64)
    keys[:, sink] = 0.0
    bias[:, :, sink] = rand(r, h)
    bias[0, :, 5:] = -torch.inf
    bias[1, :, :4] = -torch.inf
    bias[2] = -torch.inf
    bias[2, :, sink] = 0.3  # a row without a key
    return q, keys, bias, sink


def test_attention_with_a_sink() -> None:
    q, keys, bias, sink = attention_case()
    got = attention.sink_attention(q, keys, bias, 0.35)
    close(got, naive_attention(q, keys, bias, 0.35, sink))
    assert torch.equal(got[2], torch.zeros_like(got[2]))


def test_attention_in_the_published_precision() -> None:
    """Probabilities over the largest one, rounded to bf16 before the value product only."""
    q, keys, bias, _ = attention_case()
    got = attention.sink_attention_bf16(q, keys, bias, 0.35)
    for r in range(3):
        for h in range(2):
            e = [0.35 * float(q[r, h] @ keys[r, n]) + float(bias[r, h, n]) for n in range(9)]
            w = [math.exp(v - max(e)) for v in e]
            top = torch.zeros(8, dtype=torch.float64)
            for n, v in enumerate(w):
                top += float(torch.tensor(v).bfloat16()) * keys[r, n]
            torch.testing.assert_close(got[r, h], top / sum(w), rtol=1e-6, atol=1e-9)


# ---- index ---------------------------------------------------------------------------------


def test_index_scores_and_reach() -> None:
    q, w, keys = rand(3, 2, 4), rand(3, 2), rand(7, 4)
    scores = index.mask_unreachable(index.index_scores(q, w, keys), torch.tensor([0, 3, 7]))
    for r, reach in enumerate((0, 3, 7)):
        for n in range(7):
            want = sum(float(w[r, h]) * max(0.0, float(q[r, h] @ keys[n])) for h in range(2))
            close(scores[r, n], want if n < reach else -math.inf)


@pytest.mark.parametrize("counts", [(1, 1), (6, 1, 3), (2, 20)])
@pytest.mark.parametrize("num_keys", [64, 192])
def test_index_scores_of_several_sequences_have_the_bits_of_each(
    counts: tuple[int, ...], num_keys: int
) -> None:
    rows, most = sum(counts), max(counts)
    g = torch.Generator().manual_seed(rows)
    q, w = torch.randn(rows, 2, 32, generator=g), torch.randn(rows, 2, generator=g)
    keys = torch.randn(len(counts), num_keys, 32, generator=g)
    places, back, want, start = [], [], [], 0
    for number, count in enumerate(counts):
        places.append([start + min(i, count - 1) for i in range(most)])
        back += [number * most + i for i in range(count)]
        at = slice(start, start := start + count)
        want.append(index.index_scores(q[at], w[at], keys[number]))
    found = index.index_scores_together(q, w, keys, torch.tensor(places), torch.tensor(back))
    assert torch.equal(found, torch.cat(want))


def naive_top(scores: list[float], k: int) -> list[int]:
    """The k best by (score, lower place first), ascending, then -1."""
    places = [n for n, s in enumerate(scores) if s > -math.inf]
    best = sorted(sorted(places, key=lambda n: (-scores[n], n))[:k])
    return best + [-1] * (k - len(best))


@pytest.mark.parametrize("k", [1, 4, 9, 12])
def test_selection(k: int) -> None:
    g = torch.Generator().manual_seed(k)
    scores = torch.randint(-3, 4, (40, 9), generator=g).double()  # many ties
    scores[torch.rand(40, 9, generator=g) < 0.3] = -torch.inf
    scores[0] = -torch.inf
    assert index.select_top(scores, k).tolist() == [naive_top(row, k) for row in scores.tolist()]


def test_selection_of_everything() -> None:
    reach = torch.tensor([0, 1, 5, 8])
    scores = index.mask_unreachable(rand(4, 8), reach)
    assert torch.equal(index.select_all(reach, 8), index.select_top(scores, 8))


@pytest.mark.parametrize(("block", "keep"), [(3, 2), (4, 1), (2, 5), (5, 9)])
def test_candidate_blocks(block: int, keep: int) -> None:
    n = 11
    g = torch.Generator().manual_seed(block)
    reach = torch.randint(0, n + 1, (60,), generator=g)
    scores = torch.randint(-4, 5, (60, n), generator=g).double()
    scores = index.mask_unreachable(scores, reach)
    kept = index.candidate_blocks(scores, reach, block=block, keep=keep)
    restricted = index.restrict_to_blocks(scores, kept, block=block)
    for r, row in enumerate(scores.tolist()):
        blocks = [row[b : b + block] for b in range(0, n, block)]
        best = {b: max(values) for b, values in enumerate(blocks) if max(values) > -math.inf}
        if best:
            best[(int(reach[r]) - 1) // block] = math.inf
        chosen = sorted(best, key=lambda b: (-best[b], b))[:keep]
        assert kept[r].nonzero().flatten().tolist() == sorted(chosen)
        want = [v if e // block in chosen else -math.inf for e, v in enumerate(row)]
        assert restricted[r].tolist() == want


def test_fewer_candidates_than_the_index_takes() -> None:
    """No filling up with entries of score -inf (the published code's second defect, 11.3)."""
    scores, reach = rand(1, 24), torch.tensor([24])
    kept = index.candidate_blocks(scores, reach, block=4, keep=2)
    chosen = index.select_top(index.restrict_to_blocks(scores, kept, block=4), 12)
    [inside] = [[e for e in range(24) if kept[0, e // 4]]]
    assert len(inside) == 8 and chosen.tolist() == [[*inside, -1, -1, -1, -1]]


# ---- experts -------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_route(temperature: float) -> None:
    x, gate, bias = rand(5, 6), rand(6, 7), rand(7)
    picks, weights = moe.route(x, gate, bias, k=3, scale=1.5, temperature=temperature)
    for r in range(5):
        logits = [float(x[r] @ gate[:, e]) / temperature for e in range(7)]
        s = [math.sqrt(math.log1p(math.exp(v))) for v in logits]
        order = sorted(range(7), key=lambda e: -(s[e] + float(bias[e])))[:3]
        assert picks[r].tolist() == order
        total = sum(s[e] for e in order)
        close(weights[r], [1.5 * s[e] / total for e in order])


@pytest.mark.parametrize(
    ("rows", "gathered"), [(1, True), (2, True), (6, False), (9, False), (30, False)]
)
def test_expert_products(rows: int, gathered: bool) -> None:
    """Sum of the picked experts; the gate is clamped above only, `up` on both sides; the routing
    weight multiplies before the second product, where the input is quantised."""
    d, f, experts, limit = 6, 4, 13, 0.8
    w13, w2 = rand(experts, d, 2 * f), rand(experts, f, d)
    x = rand(rows, d, scale=2.0)
    picks = torch.stack(
        [
            torch.randperm(experts - 1, generator=torch.Generator().manual_seed(r))[:2]
            for r in range(rows)
        ]
    )
    picks = torch.cat([picks, torch.full((rows, 1), experts - 1)], 1)
    weights = rand(rows, 3, seed=3)

    def coarse(t: Tensor) -> Tensor:
        return (t * 16).round() / 16

    def products(x: Tensor, picks: Tensor, weights: Tensor, n: int) -> Tensor:
        return moe.expert_products(
            x,
            picks,
            weights,
            w13,
            w2,
            limit=limit,
            num_rows=n,
            round_up=lambda t: t,
            quantise=coarse,
        )

    assert moe.gathers(rows, 3, experts) == gathered
    assert moe.sorts(rows, experts, 2 * d * f) == (rows == 30)
    if rows == 1:
        twice = (t.expand(2, -1) for t in (x, picks, weights))
        got = products(*twice, 1)[:1]  # a single row comes with its copy
    else:
        got = products(x, picks, weights, rows)
    for r in range(rows):
        want = torch.zeros(d, dtype=torch.float64)
        for e, w in zip(picks[r].tolist(), weights[r].tolist(), strict=True):
            h = [float(x[r] @ w13[e][:, c]) for c in range(2 * f)]
            inner = []
            for c in range(f):
                a, b = min(h[c], limit), min(max(h[f + c], -limit), limit)
                inner.append(w * a / (1 + math.exp(-a)) * b)
            want += coarse(torch.tensor(inner, dtype=torch.float64)) @ w2[e]
        close(got[r], want.tolist())


@pytest.mark.parametrize("rows", [1, 3])
def test_large_experts_are_not_copied_and_give_the_same_bits(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts, d, f = 12, 256, 128
    w13, w2, x = rand(experts, d, 2 * f), rand(experts, f, d), rand(rows, d)
    picks = torch.arange(3 * rows).view(rows, 3) % experts
    arguments = [x, picks, rand(rows, 3, seed=3)]
    if rows == 1:
        arguments = [t.expand(2, -1) for t in arguments]

    def products() -> Tensor:
        y = moe.expert_products(
            *arguments,
            w13,
            w2,
            limit=math.inf,
            num_rows=rows,
            round_up=lambda t: t,
            quantise=lambda t: t,
        )
        return y[:rows]

    taken: list[int] = []
    plain = moe._products
    monkeypatch.setattr(moe, "_products", lambda *a: taken.append(1) or plain(*a))
    direct = products()
    assert len(taken) == 2
    monkeypatch.setattr(moe, "LARGE_EXPERT", 2 * d * f + 1)
    assert torch.equal(products(), direct) and len(taken) == 2
