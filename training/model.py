"""The trainable V4.1 text model: batched, parallel over positions, differentiable.

Owns: the forward pass of architecture sections 2 to 5 on packed rows of documents, index selection,
and fake quantisation of weights and KV entries. The drafter is in `drafter.py`.
Knows nothing of: losses, optimisers, files.

Rows: `tokens`, `pos` (position in the document) and `seg` (document number in the row) are [B, T].
Every document starts at a multiple of `alignment(args)` in its row, so that compressor groups and
candidate blocks of the document are those of the row. T is a multiple of the window.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

from deepdraft.arch import LayerRole, V41Args
from training import ops, quantise
from training.spec import Param, engram_tables, parameter_table


def alignment(args: V41Args) -> int:
    """Documents start at multiples of this in a row."""
    return math.lcm(2, args.candidate_block_size)


@dataclass
class Options:
    """What a forward pass does besides the exact dense computation."""

    sparse: bool = False
    """Attend to the indexer's selection instead of to every compressed entry."""
    index_rows: int = 0
    """Compute the indexer's loss on this many rows of the batch."""
    weight_quant: bool = False
    kv_quant: bool = False
    act_quant: bool = False
    """Fake-quantise the inputs of quantised linears."""
    trunk_grad: bool = True


@dataclass
class Batch:
    """Packed rows. `*_cut` [B]: window attention of the encoder (decoder) layers does not look
    back over this row position (bounded replay); 0 = no cut. `own` [B, T]: tokens after which the
    drafter learns; None: all."""

    tokens: Tensor
    pos: Tensor
    seg: Tensor
    encoder_cut: Tensor | None = None
    decoder_cut: Tensor | None = None
    own: Tensor | None = None


@dataclass
class Output:
    """`hidden` [B, T, d] after the last norm, `taps` [B, T, taps * d], routing loads per layer."""

    hidden: Tensor
    taps: Tensor
    loads: dict[str, Tensor] = field(default_factory=dict)
    index_loss: Tensor | None = None


@dataclass
class _Shared:
    """What layers of one forward pass share."""

    rope: dict[bool, tuple[Tensor, Tensor]]
    window_masks: dict[bool, Tensor]
    entry_masks: dict[int, Tensor]
    kv: dict[int, Tensor] = field(default_factory=dict)
    latent: dict[int, Tensor] = field(default_factory=dict)
    index_k: dict[int, Tensor] = field(default_factory=dict)
    selected: dict[int, Tensor] = field(default_factory=dict)
    candidates: Tensor | None = None
    index_losses: list[Tensor] = field(default_factory=list)


def rope_frequencies(args: V41Args, compressed: bool) -> Tensor:
    """Angles per position [rope/2], float64 (architecture 3.1)."""
    dim = args.qk_rope_head_dim
    k = torch.arange(dim // 2, dtype=torch.float64)
    if not compressed:
        return args.rope_theta ** (-2 * k / dim)
    theta = args.compress_rope_theta
    f = theta ** (-2 * k / dim)

    def bound(turns: float) -> float:
        span = args.rope_original_max_positions / (2 * math.pi * turns)
        return dim * math.log(span) / (2 * math.log(theta))

    lo = max(math.floor(bound(args.rope_beta_fast)), 0)
    hi = min(math.ceil(bound(args.rope_beta_slow)), dim - 1)
    t = ((k - lo) / max(hi - lo, 1e-3)).clamp(0, 1)
    return f / args.rope_factor * t + f * (1 - t)


def top_mask(scores: Tensor, k: int) -> Tensor:
    """The k largest finite scores of the last axis as a mask; ties go to the lower index.

    Ties are common: an entry whose heads are all cut off by the ReLU scores exactly 0.
    """
    k = min(k, scores.shape[-1])
    last = scores.topk(k, -1, sorted=False).values.amin(-1, keepdim=True)
    above, tied = scores > last, scores == last
    room = k - above.sum(-1, keepdim=True)
    chosen = above | (tied & (tied.cumsum(-1, dtype=torch.int32) <= room))
    return chosen & (scores > float("-inf"))


class Base(nn.Module):
    """Parameters under published names, quantised on demand, and the parts blocks share."""

    def __init__(self, args: V41Args, token_map: list[int] | Tensor) -> None:
        super().__init__()
        self.args = args
        self.table: dict[str, Param] = {p.name: p for p in parameter_table(args)}
        self.params: dict[str, nn.Parameter] = {}
        for p in self.table.values():
            param = nn.Parameter(torch.empty(p.shape), requires_grad=p.optimiser != "none")
            self.params[p.name] = param
            self.register_parameter(p.name.replace(".", "/"), param)
        for name, compressed in (("window", False), ("compressed", True)):
            f = rope_frequencies(args, compressed).float().double()
            angles = torch.arange(args.max_position_embeddings, dtype=torch.float64)[:, None] * f
            angles = angles.float().double()
            self.register_buffer(f"cos_{name}", angles.cos().float(), persistent=False)
            self.register_buffer(f"sin_{name}", angles.sin().float(), persistent=False)
        self.register_buffer(
            "token_map", torch.as_tensor(token_map, dtype=torch.int64), persistent=False
        )
        tables = engram_tables(args)
        for k in range(len(args.engram_layer_ids)):
            for kind in ("primes", "offsets", "multipliers"):
                value = torch.from_numpy(getattr(tables, kind)[k])
                self.register_buffer(f"engram_{kind}_{k}", value, persistent=False)
        self.compute_dtype = torch.float32
        self.options = Options()

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Start values by the table; deterministic for a seed, on any device."""
        gen = torch.Generator().manual_seed(seed)
        n = self.args.hc_mult
        for p in self.table.values():
            w = torch.zeros(p.shape)
            if isinstance(p.init, float):
                w = torch.randn(p.shape, generator=gen) * p.init
            elif p.init == "one":
                w = torch.ones(p.shape)
            elif p.init == "hc_scale":
                w = torch.full(p.shape, 0.1)
            elif p.init.startswith("hc_base:"):
                chosen = (int(p.init.partition(":")[2]) + 1) % n
                w[:n] = -1.5
                w[chosen] = 1.5
                w[n : 2 * n] = 0.3 * torch.randn(n, generator=gen)
                w[2 * n :] = (4.0 * torch.eye(n)).flatten()
            self.params[p.name].copy_(w)

    def weight(self, name: str) -> Tensor:
        """The weight in the compute dtype, fake-quantised if asked."""
        w: Tensor = self.params[name]
        if self.options.weight_quant:
            quantiser = quantise.WEIGHT_QUANTISERS.get(self.table[name].fmt)
            if quantiser is not None:
                w = quantiser(w)
        return w.to(self.compute_dtype)

    def quant_input(self, x: Tensor) -> Tensor:
        return quantise.fp8_group32(x) if self.options.act_quant else x

    def linear(self, x: Tensor, name: str) -> Tensor:
        """A quantised linear: its input is fake-quantised too."""
        return functional.linear(self.quant_input(x), self.weight(name))

    def stat(self, name: str) -> Tensor:
        """A float32 parameter (float64 in a float64 model)."""
        w = self.params[name]
        return w if self.compute_dtype == torch.float64 else w.float()

    def norm(self, x: Tensor, name: str) -> Tensor:
        return ops.rms_norm(x, self.stat(name), self.args.rms_norm_eps)

    def mix(self, streams: Tensor, prefix: str) -> tuple[Tensor, Tensor, Tensor]:
        a = self.args
        return ops.mixes(
            streams,
            self.stat(f"{prefix}_fn"),
            self.stat(f"{prefix}_scale"),
            self.stat(f"{prefix}_base"),
            a.hc_sinkhorn_iters,
            a.hc_eps,
        )

    def moe(self, v: Tensor, p: str, top_k: int, loads: dict[str, Tensor]) -> Tensor:
        """Mixture of experts computed densely: unselected experts have weight 0 (section 4)."""
        a = self.args
        logits = functional.linear(ops.acc(v), self.stat(f"{p}.gate.weight"))
        scores = functional.softplus(logits / a.gate_temp).sqrt()
        experts = scores.shape[-1]
        with torch.no_grad():
            chosen = (scores + self.stat(f"{p}.gate.bias")).topk(top_k, dim=-1).indices
            hot = torch.zeros_like(scores).scatter_(-1, chosen, 1.0)
            loads[p] = hot.sum(tuple(range(hot.dim() - 1)))
        picked = scores * hot
        w = a.routed_scaling_factor * picked / (picked.sum(-1, keepdim=True) + 1e-20)
        w = torch.cat((w, torch.ones_like(w[..., :1])), -1)
        wi = torch.cat(
            [
                part
                for k in ("w1", "w3")
                for part in (
                    self.weight(f"{p}.experts.{k}").flatten(0, 1),
                    self.weight(f"{p}.shared_experts.{k}.weight"),
                )
            ]
        )
        h = functional.linear(self.quant_input(v), wi)
        h = h.unflatten(-1, (2, experts + 1, a.moe_intermediate_size))
        f = self.quant_input(ops.swiglu(h, w, a.swiglu_limit)).flatten(-2)
        wo = torch.cat(
            (
                self.weight(f"{p}.experts.w2").transpose(0, 1).flatten(1, 2),
                self.weight(f"{p}.shared_experts.w2.weight"),
            ),
            1,
        )
        return functional.linear(f, wo)

    def output_projection(self, o: Tensor, p: str) -> Tensor:
        """Grouped output (3.8): o [.., H, D] -> [.., d]."""
        g = self.args.o_groups
        o = o.flatten(-2).unflatten(-1, (g, -1))
        wa = self.weight(f"{p}.wo_a.weight").unflatten(0, (g, -1))
        t = torch.stack([functional.linear(o[..., k, :], wa[k]) for k in range(g)], -2)
        return self.linear(t.flatten(-2), f"{p}.wo_b.weight")

    def rope_at(self, pos: Tensor, compressed: bool) -> tuple[Tensor, Tensor]:
        """cos, sin [.., rope/2] in the statistics dtype."""
        kind = "compressed" if compressed else "window"
        cos, sin = getattr(self, f"cos_{kind}"), getattr(self, f"sin_{kind}")
        index = pos.long()
        return cos[index], sin[index]

    def queries(self, c: Tensor, p: str, rope: tuple[Tensor, Tensor]) -> Tensor:
        """Rotated, scaled queries [.., H, D] from the latent c [.., q_lora]."""
        a = self.args
        q = self.linear(c, f"{p}.wq_b.weight").unflatten(-1, (a.num_attention_heads, a.head_dim))
        q = ops.rotate(q, rope[0][..., None, :], rope[1][..., None, :])
        return q * a.head_dim**-0.5

    def window_keys(self, u: Tensor, p: str, rope: tuple[Tensor, Tensor]) -> Tensor:
        k = self.norm(self.linear(u, f"{p}.wkv.weight"), f"{p}.kv_norm.weight")
        k = ops.rotate(k, *rope)
        return quantise.fp8_group32(k) if self.options.kv_quant else k


class Model(Base):
    """Backbone: `forward(batch)` gives the hidden states, `logits` the head."""

    def engram_rows(self, batch: Batch, k: int) -> Tensor:
        """Table rows [B, T, slots] (section 5.2); look-backs leaving the document are the pad."""
        a = self.args
        pad = self.token_map[a.engram_pad_token_id]
        t = self.token_map[batch.tokens.long()]
        mult: Tensor = getattr(self, f"engram_multipliers_{k}")
        primes: Tensor = getattr(self, f"engram_primes_{k}")
        offsets: Tensor = getattr(self, f"engram_offsets_{k}")
        xi = t * mult[0]
        out = []
        for s in range(1, a.engram_max_ngram_size):
            back = functional.pad(t, (s, 0))[:, : t.shape[1]]
            back = torch.where(batch.pos >= s, back, pad)
            xi = xi ^ (back * mult[s])
            heads = slice((s - 1) * a.engram_n_heads, s * a.engram_n_heads)
            out.append(xi[..., None] % primes[heads] + offsets[heads])
        return torch.cat(out, -1)

    def engram(self, streams: Tensor, batch: Batch, layer: int) -> Tensor:
        p = f"layers.{layer}.engram"
        rows = self.engram_rows(batch, self.args.engram_layer_ids.index(layer))
        e = functional.embedding(rows, self.weight(f"{p}.embed.weight")).flatten(-2)
        kv = self.linear(e, f"{p}.wkv.weight").unflatten(-1, (self.args.hc_mult + 1, -1))
        return ops.engram_inject(
            streams, kv, self.stat(f"{p}.q_weight"), self.stat(f"{p}.k_weight")
        )

    def _masks(self, batch: Batch) -> _Shared:
        a, w = self.args, self.args.sliding_window
        _, length = batch.tokens.shape
        dev = batch.tokens.device
        row = torch.arange(length, device=dev)
        # key k of block n is row n*w - w + k
        key = (row // w * w - w)[:, None] + torch.arange(2 * w, device=dev)
        near = (key >= 0) & (key <= row[:, None]) & (row[:, None] - key < w)
        key = key.clamp(min=0)
        same = batch.seg[:, key] == batch.seg[:, :, None]
        windows = {}
        for decoder in (False, True):
            cut = batch.decoder_cut if decoder else batch.encoder_cut
            mask = near & same
            if cut is not None:
                past = row >= cut[:, None]
                mask = mask & ~(past[:, :, None] & (key < cut[:, None, None]))
            windows[decoder] = mask
        entries = {}
        for r in sorted({x for x in a.compress_ratios if x}):
            last = torch.arange(length // r, device=dev) * r + r - 1
            entries[r] = (last <= row[:, None]) & (
                batch.seg[:, None, last] == batch.seg[:, :, None]
            )
        ropes = {c: self.rope_at(batch.pos, c) for c in (False, True)}
        return _Shared(ropes, windows, entries)

    def _blocks_of_keys(self, k: Tensor) -> Tensor:
        """Window keys [B, T, D] -> [B, T/w, 2w, D]: the previous block and the own one."""
        w = self.args.sliding_window
        b = k.unflatten(1, (-1, w))
        prev = functional.pad(b, (0, 0, 0, 0, 1, 0))[:, :-1]
        return torch.cat((prev, b), 2)

    def _compress(self, u: Tensor, layer: int, role: LayerRole, sh: _Shared, pos: Tensor) -> None:
        p = f"layers.{layer}.attn"
        value = functional.linear(u, self.weight(f"{p}.compressor.wkv.weight"))
        if role.ratio == 2:
            gate = functional.linear(u, self.weight(f"{p}.compressor.wgate.weight"))
            pairs = u.shape[1] // 2
            value = ops.acc(value[:, : 2 * pairs]).unflatten(1, (pairs, 2))
            share = torch.softmax(ops.acc(gate[:, : 2 * pairs]).unflatten(1, (pairs, 2)), 2)
            value = (share * value).sum(2).to(u.dtype)
        z = self.norm(value, f"{p}.compressor.norm.weight")
        rope = self.rope_at(pos[:, :: role.ratio][:, : z.shape[1]], True)
        main = ops.rotate(z, *rope)
        sh.kv[layer] = quantise.fp4_group16(main) if self.options.kv_quant else main
        sh.latent[layer] = z.detach()

    def _index_keys(self, layer: int, z: Tensor, pos: Tensor, ratio: int) -> Tensor:
        p = f"layers.{layer}.attn.indexer"
        k = self.norm(functional.linear(z, self.weight(f"{p}.wk.weight")), f"{p}.k_norm.weight")
        k = ops.rotate(k, *self.rope_at(pos[:, ::ratio][:, : k.shape[1]], True))
        return quantise.mxfp4_group32(k) if self.options.kv_quant else k

    def _index_scores(
        self, layer: int, role: LayerRole, u: Tensor, c: Tensor, sh: _Shared, pos: Tensor
    ) -> Tensor:
        """I [B, T, S] (section 3.5) from detached inputs."""
        a, p = self.args, f"layers.{layer}.attn.indexer"
        heads, dim = a.index_n_heads, a.index_head_dim
        b = u.shape[0]
        z = sh.latent[role.kv_source][:b]
        keys = self._index_keys(role.kv_source, z, pos[:b], role.ratio)
        q = self.linear(c, f"{p}.wq_b.weight").unflatten(-1, (heads, dim))
        cos, sin = sh.rope[True]
        q = ops.rotate(q, cos[:b, :, None], sin[:b, :, None])
        if self.options.kv_quant:
            q = quantise.mxfp4_group32(q)
        w = functional.linear(u, self.weight(f"{p}.weights_proj.weight"))
        w = ops.acc(w) * (dim**-0.5 * heads**-0.5)
        total: Tensor | None = None
        for h in range(heads):
            s = ops.acc(q[:, :, h] @ keys.transpose(1, 2)).relu() * w[:, :, h, None]
            total = s if total is None else total + s
        assert total is not None
        return total

    @torch.no_grad()
    def _select(self, scores: Tensor, role: LayerRole, mask: Tensor, sh: _Shared) -> Tensor:
        """Visible and selected entries [B, T, S] (sections 3.5, 3.6)."""
        a, size = self.args, self.args.candidate_block_size
        entries = scores.shape[-1]
        scores = scores.masked_fill(~mask, float("-inf"))
        if role.publishes_candidates:
            blocks = functional.pad(scores, (0, -entries % size), value=float("-inf"))
            best = blocks.unflatten(-1, (-1, size)).amax(-1)
            reach = mask.sum(-1, keepdim=True)
            first = mask.float().argmax(-1, keepdim=True)
            newest = (first + reach - 1).clamp(min=0) // size
            has = reach > 0
            best = torch.where(
                has & (torch.arange(best.shape[-1], device=best.device) == newest),
                float("inf"),
                best,
            )
            keep = top_mask(best, a.candidate_topk_blocks)
            sh.candidates = keep.repeat_interleave(size, -1)[..., :entries]
        if role.restricted:
            assert sh.candidates is not None
            scores = scores.masked_fill(~sh.candidates, float("-inf"))
        return top_mask(scores, a.index_topk)

    def _index_loss(self, scores: Tensor, probs: Tensor, mask: Tensor) -> Tensor:
        """KL from the head-mean attention over the entries to the indexer's softmax."""
        target = ops.acc(probs.detach()).mean(2) * mask
        mass = target.sum(-1, keepdim=True)
        target = target / (mass + 1e-9)
        logp = torch.log_softmax(scores.masked_fill(~mask, -1e9), -1)
        kl = (target * (torch.log(target + 1e-9) - logp)).sum(-1)
        seen = (mass[..., 0] > 1e-6).to(kl.dtype)
        return (kl * seen).sum() / seen.sum().clamp(min=1)

    def attention(self, u: Tensor, layer: int, batch: Batch, sh: _Shared) -> Tensor:
        a, role, p = self.args, self.args.roles[layer], f"layers.{layer}.attn"
        w, heads, dim = a.sliding_window, a.num_attention_heads, a.head_dim
        bsz, length = u.shape[:2]
        rope = sh.rope[role.ratio > 0]
        c = self.norm(self.linear(u, f"{p}.wq_a.weight"), f"{p}.q_norm.weight")
        q = self.queries(c, p, rope)
        keys = self._blocks_of_keys(self.window_keys(u, p, rope))
        qb = q.reshape(bsz, length // w, w * heads, dim)
        sw = (qb @ keys.transpose(-1, -2)).view(bsz, length, heads, 2 * w)
        mw = sh.window_masks[role.decoder]
        if role.owns_kv:
            self._compress(u, layer, role, sh, batch.pos)
        if role.ratio == 0:
            pw, _ = ops.SinkSoftmax.apply(sw, None, mw, None, self.stat(f"{p}.attn_sink"))
            o = (pw.reshape(bsz, length // w, w * heads, 2 * w) @ keys).view(q.shape)
        else:
            main = sh.kv[role.kv_source]
            mask = sh.entry_masks[role.ratio]
            if role.runs_indexer and self.options.sparse:
                with torch.no_grad():
                    scores = self._index_scores(layer, role, u, c, sh, batch.pos)
                sh.selected[layer] = self._select(scores, role, mask, sh)
            if self.options.sparse:
                mask = sh.selected[role.index_source]
            sc = (q.reshape(bsz, length * heads, dim) @ main.transpose(1, 2)).view(
                bsz, length, heads, -1
            )
            pw, pc = ops.SinkSoftmax.apply(sw, sc, mw, mask, self.stat(f"{p}.attn_sink"))
            o = (pw.reshape(bsz, length // w, w * heads, 2 * w) @ keys).view(q.shape)
            o = o + (pc.reshape(bsz, length * heads, -1) @ main).view(q.shape)
            rows = min(self.options.index_rows, bsz)
            if role.runs_indexer and rows:
                scores = self._index_scores(
                    layer, role, u[:rows].detach(), c[:rows].detach(), sh, batch.pos
                )
                sh.index_losses.append(self._index_loss(scores, pc[:rows], mask[:rows]))
        o = ops.rotate(o, rope[0][:, :, None], -rope[1][:, :, None])
        return self.output_projection(o, p)

    def forward(self, batch: Batch) -> Output:
        a = self.args
        sh = self._masks(batch)
        x = functional.embedding(batch.tokens.long(), self.params["embed.weight"])
        x = x.to(self.compute_dtype)
        streams = x[:, :, None, :].expand(-1, -1, a.hc_mult, -1)
        mix = torch.zeros(*x.shape[:2], a.hc_mult, device=x.device, dtype=ops.acc(x).dtype)
        mix[..., 0] = 1.0
        loads: dict[str, Tensor] = {}
        taps = []
        for layer in range(a.num_hidden_layers):
            p = f"layers.{layer}"
            if layer in a.engram_layer_ids:
                streams = self.engram(streams, batch, layer)
            if layer in a.dspark_target_layer_ids:
                taps.append(ops.acc(streams).mean(-2).to(x.dtype).detach())
            streams = streams.contiguous()
            pre, post, comb = self.mix(streams, f"{p}.hc_attn")
            u = ops.collapse_norm(streams, mix, self.stat(f"{p}.attn_norm.weight"), a.rms_norm_eps)
            streams = ops.expand(self.attention(u, layer, batch, sh), streams, post, comb)
            mix, post, comb = self.mix(streams, f"{p}.hc_ffn")
            v = ops.collapse_norm(streams, pre, self.stat(f"{p}.ffn_norm.weight"), a.rms_norm_eps)
            y = self.moe(v, f"{p}.ffn", a.num_experts_per_tok, loads)
            streams = ops.expand(y, streams, post, comb)
        hidden = ops.collapse_norm(streams, mix, self.stat("norm.weight"), a.rms_norm_eps)
        loss = torch.stack(sh.index_losses).sum() if sh.index_losses else None
        return Output(hidden, torch.cat(taps, -1), loads, loss)

    def logits(self, hidden: Tensor, detach: bool = False) -> Tensor:
        """Head in the compute dtype (the reference uses float32)."""
        w = self.params["head.weight"]
        return functional.linear(hidden, (w.detach() if detach else w).to(hidden.dtype))
