"""A second forward of V4, written from docs/families.md: whole texts, loops over entries, no state.

Owns: the mathematics, with every rounding of the published arithmetic where it is asked for, made
with torch's own float8 casts. Knows nothing of: the models under test.

Letters: T tokens, S streams, D hidden, H heads, C channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from deepdraft.arch import Rope, V4Args
from deepdraft.ops.rope import frequencies


def power_of_two(x: Tensor) -> Tensor:
    """The least power of two that is not below x > 0."""
    fraction, exponent = torch.frexp(x)
    return torch.exp2((exponent - (fraction == 0.5).int()).to(x.dtype))


def fp8(x: Tensor, group: int) -> Tensor:
    """E4M3 in groups with scales that are powers of two; the last group may be shorter."""
    parts = []
    for part in x.split(group, -1):
        scale = power_of_two(part.abs().amax(-1, keepdim=True).clamp_min(1e-4) / 448)
        parts.append((part / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale)
    return torch.cat(parts, -1)


def fp4(x: Tensor) -> Tensor:
    """E2M1 in groups of 32 with scales that are powers of two."""
    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=x.dtype)
    parts = []
    for part in x.split(32, -1):
        scale = power_of_two(part.abs().amax(-1, keepdim=True).clamp_min(6 * 2.0**-126) / 6)
        away = (part.abs() / scale).double().unsqueeze(-1) - grid
        tie = torch.arange(8) % 2 * 1e-9  # of two equally near, the even code
        parts.append(grid[(away.abs() + tie).argmin(-1)] * part.sign() * scale)
    return torch.cat(parts, -1)


def hadamard(size: int) -> Tensor:
    """Sylvester's matrix, normalised."""
    h = torch.ones(1, 1, dtype=torch.float64)
    while h.shape[0] < size:
        h = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), h)
    return h / math.sqrt(size)


class NaiveV4:
    """The model on whole texts."""

    def __init__(
        self,
        args: V4Args,
        weights: dict[str, Tensor],
        *,
        half: bool = False,
        quantised: frozenset[str] = frozenset(),
    ) -> None:
        """`half`: bfloat16 between operations. `quantised`: maps whose inputs are FP8; there are
        any: cache entries and index keys are rounded, too. Computed in the weights' dtype."""
        self.args, self.w, self.quantised = args, weights, quantised
        self.dtype = weights["norm.weight"].dtype
        self.r: Callable[[Tensor], Tensor] = (
            (lambda x: x.bfloat16().to(x.dtype)) if half else (lambda x: x)
        )

    def lin(self, name: str, x: Tensor, rows: slice = slice(None)) -> Tensor:
        x = fp8(x, 128) if f"{name}.weight" in self.quantised else x
        return self.r(x @ self.w[f"{name}.weight"][rows].T)

    def norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        y = x / (x.pow(2).mean(-1, keepdim=True) + self.args.rms_norm_eps).sqrt()
        return self.r(y if weight is None else y * weight)

    def turn(self, x: Tensor, rope: Rope, at: Tensor) -> Tensor:
        """The last channels of x [T, ..., C], adjacent pairs, as complex numbers; `at` [T]."""
        if not len(at):
            return x
        width = self.args.qk_rope_head_dim
        angle = torch.outer(at.double(), frequencies(rope, width))
        angle = angle.view(len(at), *[1] * (x.ndim - 2), -1)
        head, tail = x[..., :-width], x[..., -width:]
        z = torch.view_as_complex(tail.double().reshape(*tail.shape[:-1], -1, 2))
        z = torch.view_as_real(z * torch.polar(torch.ones_like(angle), angle))
        return self.r(torch.cat([head, z.reshape(tail.shape).to(x.dtype)], -1))

    def kept(self, kv: Tensor) -> Tensor:
        if not self.quantised:
            return kv
        plain = kv.shape[-1] - self.args.qk_rope_head_dim
        return torch.cat([fp8(kv[..., :plain], 64), kv[..., plain:]], -1)

    def indexed(self, x: Tensor) -> Tensor:
        if not self.quantised:
            return x
        return fp4(self.r((x.double() @ hadamard(x.shape[-1])).to(x.dtype)))

    # ---- streams ---------------------------------------------------------------------------

    def mix(self, x: Tensor, at: str) -> tuple[Tensor, Tensor, Tensor]:
        s, eps = self.args.hc_mult, self.args.hc_eps
        flat = x.flatten(1)
        m = flat @ self.w[f"{at}_fn"].T
        m = m / (flat.pow(2).mean(-1, keepdim=True) + self.args.rms_norm_eps).sqrt()
        scale, base = self.w[f"{at}_scale"], self.w[f"{at}_base"]
        pre = (m[:, :s] * scale[0] + base[:s]).sigmoid() + eps
        post = 2 * (m[:, s : 2 * s] * scale[1] + base[s : 2 * s]).sigmoid()
        comb = (m[:, 2 * s :] * scale[2] + base[2 * s :]).view(-1, s, s).softmax(-1) + eps
        comb = comb / (comb.sum(1, keepdim=True) + eps)
        for _ in range(self.args.hc_sinkhorn_iters - 1):
            comb = comb / (comb.sum(2, keepdim=True) + eps)
            comb = comb / (comb.sum(1, keepdim=True) + eps)
        return pre, post, comb

    def head_mix(self, x: Tensor, at: str) -> Tensor:
        flat = x.flatten(1)
        m = flat @ self.w[f"{at}fn"].T
        m = m / (flat.pow(2).mean(-1, keepdim=True) + self.args.rms_norm_eps).sqrt()
        pre = (m * self.w[f"{at}scale"] + self.w[f"{at}base"]).sigmoid() + self.args.hc_eps
        return self.r(torch.einsum("ts,tsd->td", pre, x))

    def sublayer(self, x: Tensor, at: str, part: str, f: Callable[[Tensor], Tensor]) -> Tensor:
        pre, post, comb = self.mix(x, f"{at}.hc_{part}")
        u = self.r(torch.einsum("ts,tsd->td", pre, x))
        y = f(self.norm(u, self.w[f"{at}.{part}_norm.weight"]))
        return self.r(post.unsqueeze(-1) * y.unsqueeze(1) + torch.einsum("tab,tad->tbd", comb, x))

    # ---- attention -------------------------------------------------------------------------

    def queries(self, u: Tensor, at: str, rope: Rope, where: Tensor) -> tuple[Tensor, Tensor]:
        latent = self.norm(self.lin(f"{at}.wq_a", u), self.w[f"{at}.q_norm.weight"])
        q = self.lin(f"{at}.wq_b", latent).view(len(u), self.args.num_attention_heads, -1)
        return latent, self.turn(self.norm(q, None), rope, where)

    def keys(self, u: Tensor, at: str, rope: Rope, where: Tensor) -> Tensor:
        kv = self.norm(self.lin(f"{at}.wkv", u), self.w[f"{at}.kv_norm.weight"])
        return self.kept(self.turn(kv, rope, where))

    def attend(self, q: Tensor, keys: Tensor, sink: Tensor) -> Tensor:
        """One row: q [H, C] over keys [N, C] -> [H, C]."""
        scores = torch.cat([q @ keys.T / math.sqrt(q.shape[-1]), sink.unsqueeze(1)], 1)
        return scores.softmax(-1)[:, :-1] @ keys

    def output(self, o: Tensor, at: str, rope: Rope, where: Tensor) -> Tensor:
        o = self.turn(self.r(o), rope, -where).flatten(1)
        groups = self.args.o_groups
        w = self.w[f"{at}.wo_a.weight"].view(groups, self.args.o_lora_rank, -1)
        t = torch.einsum("tgi,goi->tgo", o.view(len(o), groups, -1), self.r(w))
        return self.lin(f"{at}.wo_b", self.r(t.flatten(1)))

    def attention(self, u: Tensor, at: str, layer: int) -> Tensor:
        args, kind = self.args, self.args.attention[layer]
        rope = args.rope if kind == "window" else args.compress_rope
        where = torch.arange(len(u))
        latent, q = self.queries(u, at, rope, where)
        kv = self.keys(u, at, rope, where)
        ratio, chosen = args.ratio(layer), None
        if kind != "window":
            entries = self.kept(self.entries(u, f"{at}.compressor", ratio, kind == "csa"))
        if kind == "csa":
            chosen = self.choice(u, latent, f"{at}.indexer", ratio)
        out = []
        for t in range(len(u)):
            seen = kv[max(0, t + 1 - args.sliding_window) : t + 1]
            if kind != "window":
                picks = range((t + 1) // ratio) if chosen is None else chosen[t]
                seen = torch.cat([seen, entries[list(picks)]])
            out.append(self.attend(q[t], seen, self.w[f"{at}.attn_sink"]))
        return self.output(torch.stack(out), at, rope, where)

    def entries(self, u: Tensor, at: str, ratio: int, overlap: bool) -> Tensor:
        """Rotated entries of all whole groups, [groups, C]."""
        value, gate = (u @ self.r(self.w[f"{at}.{n}.weight"]).T for n in ("wkv", "wgate"))
        ape, weight = self.w[f"{at}.ape"], self.w[f"{at}.norm.weight"]
        c, out = weight.shape[0], []
        for e in range(len(u) // ratio):
            here = slice(e * ratio, e * ratio + ratio)
            values, gates = value[here], gate[here] + ape
            if overlap:
                values, gates = values[:, c:], gates[:, c:]
                if e:
                    before = slice(e * ratio - ratio, e * ratio)
                    values = torch.cat([value[before, :c], values])
                    gates = torch.cat([gate[before, :c] + ape[:, :c], gates])
            out.append((gates.softmax(0) * values).sum(0))
        pooled = self.r(torch.stack(out) if out else value.new_zeros(0, c))
        where = torch.arange(len(out)) * ratio
        return self.turn(self.norm(pooled, weight), self.args.compress_rope, where)

    def choice(self, u: Tensor, latent: Tensor, at: str, ratio: int) -> list[list[int]]:
        args, where = self.args, torch.arange(len(u))
        keys = self.indexed(self.entries(u, f"{at}.compressor", ratio, True))
        q = self.lin(f"{at}.wq_b", latent).view(len(u), args.index_n_heads, -1)
        q = self.indexed(self.turn(q, args.compress_rope, where))
        w = self.lin(f"{at}.weights_proj", u) * (args.index_head_dim * args.index_n_heads) ** -0.5
        scores = torch.einsum("tnh,th->tn", torch.einsum("thc,nc->tnh", q, keys).relu(), w)
        out = []
        for t in range(len(u)):
            reach = (t + 1) // ratio
            best = scores[t, :reach].sort(descending=True, stable=True)[1][: args.index_topk]
            out.append(sorted(best.tolist()))
        return out

    # ---- experts ---------------------------------------------------------------------------

    def expert(self, x: Tensor, at: str, weight: Tensor) -> Tensor:
        limit = self.args.swiglu_limit
        gate = self.lin(f"{at}.w1", x).clamp(max=limit)
        up = self.lin(f"{at}.w3", x).clamp(-limit, limit)
        return self.lin(f"{at}.w2", self.r(gate * gate.sigmoid() * up * weight))

    def experts(self, x: Tensor, at: str, ids: Tensor | None) -> Tensor:
        r = self.args.router
        scores = torch.nn.functional.softplus(x @ self.r(self.w[f"{at}.gate.weight"]).T).sqrt()
        if ids is None:
            picks = (scores + self.w[f"{at}.gate.bias"]).topk(r.picks, -1)[1]
        else:
            picks = self.w[f"{at}.gate.tid2eid"][ids].long()
        weight = scores.gather(1, picks)
        weight = weight / weight.sum(-1, keepdim=True) * r.scale
        out = []
        for t in range(len(x)):
            one = x[t : t + 1]
            y = self.expert(one, f"{at}.shared_experts", torch.ones(1, 1, dtype=x.dtype))
            for e, share in zip(picks[t].tolist(), weight[t], strict=True):
                y = y + self.expert(one, f"{at}.experts.{e}", share)
            out.append(y)
        return self.r(torch.cat(out))

    # ---- the whole -------------------------------------------------------------------------

    def streams(self, ids: list[int]) -> list[Tensor]:
        """Streams [T, S, D] before the first layer and after each."""
        tokens = torch.tensor(ids)
        x = self.w["embed.weight"][tokens].unsqueeze(1).expand(-1, self.args.hc_mult, -1)
        out = [self.r(x)]
        for layer in range(self.args.num_hidden_layers):
            hashed = tokens if layer < self.args.num_hash_layers else None
            out.append(self.layer(out[-1], layer, hashed))
        return out

    def layer(self, x: Tensor, layer: int, hashed: Tensor | None) -> Tensor:
        at = f"layers.{layer}"
        x = self.sublayer(x, at, "attn", lambda u: self.attention(u, f"{at}.attn", layer))
        return self.sublayer(x, at, "ffn", lambda u: self.experts(u, f"{at}.ffn", hashed))

    def logits(self, ids: list[int]) -> Tensor:
        """[T, V]."""
        h = self.norm(self.head_mix(self.streams(ids)[-1], "hc_head_"), self.w["norm.weight"])
        return h @ self.r(self.w["head.weight"]).T

    # ---- next-token prediction layer -------------------------------------------------------

    def predicted(self, ids: list[int], streams: Tensor) -> Tensor:
        """Streams [T, S, D] of the layer for tokens ids [T] behind streams [T, S, D]."""
        at = "mtp.0"
        tokens = self.norm(self.w["embed.weight"][torch.tensor(ids)], self.w[f"{at}.enorm.weight"])
        x = self.lin(f"{at}.h_proj", self.norm(streams, self.w[f"{at}.hnorm.weight"]))
        x = self.r(x + self.lin(f"{at}.e_proj", tokens).unsqueeze(1))
        window = self.args.attention.index("window")
        x = self.sublayer(x, at, "attn", lambda u: self.attention(u, f"{at}.attn", window))
        return self.sublayer(x, at, "ffn", lambda u: self.experts(u, f"{at}.ffn", None))

    def predicted_logits(self, streams: Tensor) -> Tensor:
        h = self.norm(self.head_mix(streams, "mtp.0.hc_head_"), self.w["mtp.0.norm.weight"])
        return h @ self.r(self.w["head.weight"]).T

    def next_drafts(self, ids: list[int], drafts: list[int]) -> Tensor:
        """Logits of each draft behind a text; those before it go in with the layer's streams."""
        streams, tokens, rows = self.streams(ids[:-1])[-1], ids[1:], []
        for draft in [*drafts, None]:
            out = self.predicted(tokens, streams)
            rows.append(self.predicted_logits(out[-1:])[0])
            if draft is not None:
                tokens, streams = [*tokens, draft], torch.cat([streams, out[-1:]])
        return torch.stack(rows)

    # ---- DSpark drafter --------------------------------------------------------------------

    def block_logits(self, ids: list[int], token: int, size: int) -> tuple[Tensor, Tensor]:
        """A block of drafts behind a text and one more token: logits [B, V] before the Markov
        correction, and hidden states [B, D]."""
        args, w, n = self.args, self.w, len(ids)
        streams = self.streams(ids)
        taps = [self.r(streams[layer + 1].mean(1)) for layer in args.dspark_target_layer_ids]
        main = self.norm(
            self.lin("mtp.0.main_proj", torch.cat(taps, 1)), w["mtp.0.main_norm.weight"]
        )
        block = torch.tensor([token] + [args.dspark_noise_token_id] * (size - 1))
        x = self.r(w["embed.weight"][block].unsqueeze(1).expand(-1, args.hc_mult, -1))
        where, back = n + torch.arange(size), max(0, n - args.sliding_window)
        for number in range(args.num_nextn_predict_layers):
            at = f"mtp.{number}"
            context = self.keys(main, f"{at}.attn", args.rope, torch.arange(n))[back:]
            x = self.sublayer(
                x,
                at,
                "attn",
                lambda u, at=at, seen=context: self.block_attention(u, at, seen, where),
            )
            x = self.sublayer(x, at, "ffn", lambda u, at=at: self.experts(u, f"{at}.ffn", None))
        h = self.head_mix(x, f"{at}.hc_head_")
        return self.norm(h, w[f"{at}.norm.weight"]) @ self.r(w["head.weight"]).T, h

    def block_attention(self, u: Tensor, at: str, context: Tensor, where: Tensor) -> Tensor:
        at, rope = f"{at}.attn", self.args.rope
        _, q = self.queries(u, at, rope, where)
        seen = torch.cat([context, self.keys(u, at, rope, where)])
        sink = self.w[f"{at}.attn_sink"]
        return self.output(
            torch.stack([self.attend(row, seen, sink) for row in q]), at, rope, where
        )

    def refined(self, base: Tensor, h: Tensor, before: list[int]) -> tuple[Tensor, Tensor]:
        """Logits [B, V] and raw confidences [B], given the token before each draft."""
        at = f"mtp.{self.args.num_nextn_predict_layers - 1}"
        e = self.r(self.w[f"{at}.markov_head.markov_w1.weight"])[torch.tensor(before)]
        logits = base + e @ self.r(self.w[f"{at}.markov_head.markov_w2.weight"]).T
        confidence = self.w[f"{at}.confidence_head.proj.weight"][0]
        return logits, torch.cat([h, e], 1) @ confidence
