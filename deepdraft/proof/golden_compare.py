"""Verdicts of the golden replay: what an array must satisfy, and by how much it does.

Owns: the structural checks (missing, shape, dtype, NaN, infinities), the error measures and the
tolerances of the data's README, by mode and array name.
Knows nothing of: the model, printing.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from deepdraft.proof.golden_run import Replay

Verdict = Literal["pass", "fail", "info"]
Arrays = dict[str, Tensor]

EXACT_REL, QSIM64_REL = 2e-5, 1e-6
_EXACT_LOOSER = (("confidence", 5e-5), ("gate", 1e-4), ("decode_gate", 1e-4))
SHORT_ROWS_SHARE = 110 / 128
"""Rows of the short prompts that qsim in float32 must hit."""
QUANT_COSINE, QUANT_REL_L2 = 0.91, 0.44
_QUANT_WINDOW0, _QUANT_FIRST_SOURCE = 0.06, 0.3

# Stored as bf16 in quant mode; every other float array is float32 in every mode.
_BF16_IN_QUANT = re.compile(
    r"main_hidden\w*|main_x|hidden|step0\.M\d+\.(stream_in|(attn|ffn)_(in|out))|emb\.\d+|kv\.\d+"
    r"|index_[qw]\.\d+|after\d+\.(window|draft_window|main|index_k)\.\d+|final_collapsed"
    r"|L\d+\.(stream_\w+|(attn|ffn)_(in|out)|attn_o|q_latent|latent)"
)
_LEADING = re.compile(r"kv\.\d+")
"""Recorded for the first tokens of the run only; the README's 16 is also the window and the
length of the short prompts."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One line of the report. `error` and `tolerance` are in the units of `rule`."""

    mode: str
    file: str
    array: str
    verdict: Verdict
    rule: str
    error: float | None = None
    tolerance: float | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Measure:
    """A rule's result: the error, its bound, whether it holds, and what to add."""

    rule: str
    error: float
    tolerance: float | None
    ok: bool
    note: str = ""
    verdict: Verdict | None = None


Rule = Callable[[Tensor, Tensor], Measure]


# ---- error measures ------------------------------------------------------------------------


def relative(ours: Tensor, golden: Tensor) -> float:
    """max |a - b| / max |b| over the entries that are finite in the reference."""
    a, b = ours.double(), golden.double()
    finite = torch.isfinite(b)
    if not bool(finite.any()):
        return 0.0
    difference = float((a - b)[finite].abs().max())
    largest = float(b[finite].abs().max())
    if largest == 0.0:
        return 0.0 if difference == 0.0 else float("inf")
    return difference / largest


def relative_rows(ours: Tensor, golden: Tensor) -> Tensor:
    """`relative` of every row of the last axis, flattened to [rows]."""
    a, b = ours.double().flatten(0, -2), golden.double().flatten(0, -2)
    return (a - b).abs().amax(-1) / b.abs().amax(-1).clamp(min=1e-300)


def relative_l2(ours: Tensor, golden: Tensor) -> float:
    """|a - b| / |b| over the entries that are finite on both sides."""
    a, b = ours.double(), golden.double()
    both = torch.isfinite(a) & torch.isfinite(b)
    norm = float(b[both].norm())
    difference = float((a - b)[both].norm())
    return difference / norm if norm else (0.0 if difference == 0.0 else float("inf"))


def mean_cosine(ours: Tensor, golden: Tensor) -> float:
    """Mean cosine of the rows of the last axis."""
    return float(torch.cosine_similarity(ours.double(), golden.double(), dim=-1).mean())


def overlap(ours: Tensor, golden: Tensor) -> float:
    """Mean share of the recorded set of each row that ours has too (-1: empty places)."""
    shares = []
    for a, b in zip(ours.flatten(0, -2).tolist(), golden.flatten(0, -2).tolist(), strict=True):
        recorded = set(b) - {-1}
        if recorded:
            shares.append(len(recorded & set(a)) / len(recorded))
    return sum(shares) / len(shares) if shares else 1.0


# ---- rules ---------------------------------------------------------------------------------


def identical(ours: Tensor, golden: Tensor) -> Measure:
    """Every value equal; the error counts those that are not."""
    wrong = int((ours != golden).sum())
    note = ""
    if wrong:
        first = (ours != golden).nonzero()[0].tolist()
        note = f"first at {first}"
    return Measure("identical", float(wrong), 0.0, wrong == 0, note)


def within(tolerance: float) -> Rule:
    """`relative` at most the tolerance."""

    def rule(ours: Tensor, golden: Tensor) -> Measure:
        error = relative(ours, golden)
        return Measure("rel", error, tolerance, error <= tolerance)

    return rule


def within_rows(tolerance: float) -> Rule:
    """As `within` for every row of the last axis by itself (logits: every position)."""

    def rule(ours: Tensor, golden: Tensor) -> Measure:
        rows = relative_rows(ours, golden)
        worst = int(rows.argmax())
        error = float(rows[worst])
        note = "" if error <= tolerance else f"{int((rows > tolerance).sum())} rows, first {worst}"
        return Measure("rel of each row", error, tolerance, error <= tolerance, note)

    return rule


def difference_within(tolerance: float, operands: float) -> Rule:
    """For a difference of two values: the error over the largest of the values subtracted.

    A margin is small against the numbers that it is the difference of, so rounding of those shows
    in it enlarged; the recorded float32 margins are off by more than 2e-5 themselves.
    """

    def rule(ours: Tensor, golden: Tensor) -> Measure:
        plain = relative(ours, golden)
        finite = torch.isfinite(golden)
        largest = float(golden[finite].abs().max()) if bool(finite.any()) else 0.0
        error = plain * largest / max(largest, operands) if largest else plain
        note = f"{plain:.1e} of the largest margin"
        return Measure("rel to operands", error, tolerance, error <= tolerance, note)

    return rule


def statistical(min_cosine: float, max_l2: float) -> Rule:
    """Mean cosine of the rows and relative L2 of the whole."""

    def rule(ours: Tensor, golden: Tensor) -> Measure:
        error, cosine = relative_l2(ours, golden), mean_cosine(ours, golden)
        ok = error <= max_l2 and cosine >= min_cosine
        return Measure(
            "rel L2", error, max_l2, ok, f"mean cosine {cosine:.3f} (at least {min_cosine:.3f})"
        )

    return rule


def l2_within(max_l2: float) -> Rule:
    """Relative L2 of the whole."""

    def rule(ours: Tensor, golden: Tensor) -> Measure:
        error = relative_l2(ours, golden)
        return Measure("rel L2", error, max_l2, error <= max_l2)

    return rule


def no_target(ours: Tensor, golden: Tensor) -> Measure:
    """Measured only: the README names no end-to-end target."""
    return Measure("rel L2", relative_l2(ours, golden), None, True, "no target", "info")


def agreement(ours: Tensor, golden: Tensor) -> Measure:
    """Measured only: the share of values that differ."""
    share = float((ours != golden).double().mean())
    return Measure("share that differs", share, None, True, "no target", "info")


def set_overlap(ours: Tensor, golden: Tensor) -> Measure:
    """Measured only: how much of the recorded sets ours has."""
    return Measure("1 - overlap", 1.0 - overlap(ours, golden), None, True, "no target", "info")


def overlap_within(most_missing: float) -> Rule:
    """At most this share of the recorded sets is missing in ours."""

    def rule(ours: Tensor, golden: Tensor) -> Measure:
        error = 1.0 - overlap(ours, golden)
        return Measure("1 - overlap", error, most_missing, error <= most_missing)

    return rule


# ---- structure -----------------------------------------------------------------------------


def stored_dtypes(mode: str, name: str, ours: Tensor) -> set[torch.dtype]:
    """What an array may be stored as."""
    if not ours.is_floating_point():
        return {ours.dtype}
    if mode == "quant" and _BF16_IN_QUANT.fullmatch(name):
        return {torch.bfloat16}
    return {torch.float32}


def check(
    mode: str,
    file: str,
    name: str,
    ours: Tensor,
    golden: Tensor,
    rule: Rule,
    *,
    leading: frozenset[int] = frozenset(),
    free_infinities: bool = False,
) -> Outcome:
    """Structure first, then the rule.

    `leading`: how many rows a shortened array may have. `free_infinities`: they follow from choices
    that may differ.
    """

    def failed(why: str) -> Outcome:
        return Outcome(mode, file, name, "fail", "structure", note=why)

    if golden.dtype not in stored_dtypes(mode, name, ours):
        wanted = " or ".join(str(d).removeprefix("torch.") for d in stored_dtypes(mode, name, ours))
        return failed(f"stored as {str(golden.dtype).removeprefix('torch.')}, expected {wanted}")
    if _LEADING.fullmatch(name) and golden.ndim and golden.shape[0] in leading:
        ours = ours[: golden.shape[0]]
    if ours.shape != golden.shape:
        return failed(f"shape {list(golden.shape)} recorded, {list(ours.shape)} computed")
    if ours.is_floating_point():
        if bool(torch.isnan(golden.float()).any()):
            return failed("NaN in the recorded array")
        if bool(torch.isnan(ours).any()):
            return failed("NaN computed")
        same = torch.equal(_infinities(ours), _infinities(golden))
        if not same and not free_infinities:
            return failed("infinities at other places or of other sign")
    measure = rule(ours, golden)
    verdict = measure.verdict or ("pass" if measure.ok else "fail")
    return Outcome(
        mode, file, name, verdict, measure.rule, measure.error, measure.tolerance, measure.note
    )


def _infinities(x: Tensor) -> Tensor:
    return torch.where(torch.isinf(x), x.sign().double(), 0.0)


def compare_file(
    mode: str,
    stem: str,
    replay: Replay,
    golden: Arrays | None,
    choose: Callable[[str, Tensor], Rule],
    *,
    leading: frozenset[int] = frozenset(),
    free_infinities: frozenset[str] = frozenset(),
) -> list[Outcome]:
    """Every array of one file, in both directions.

    `free_infinities`: arrays, by the part of their name before `.pos`, whose infinities may lie
    elsewhere.
    """
    file, ours = f"{stem}-{mode}", replay.arrays.get(stem, {})
    if golden is None:
        return [Outcome(mode, file, "*", "fail", "structure", note="the file is missing")]
    out = []
    for name in sorted(replay.required.get(stem, set()) - golden.keys()):
        out.append(Outcome(mode, file, name, "fail", "structure", note="missing in the file"))
    for name in sorted(golden):
        if name not in ours:
            note = "not an array of this model in this format"
            out.append(Outcome(mode, file, name, "fail", "structure", note=note))
            continue
        rule = choose(name, ours[name])
        free = name.partition(".pos")[0] in free_infinities
        pair = (ours[name], golden[name])
        out.append(check(mode, file, name, *pair, rule, leading=leading, free_infinities=free))
    return out


# ---- which rule for which array ------------------------------------------------------------


def exact_rules(rel: float, operands: dict[str, float]) -> Callable[[str, Tensor], Rule]:
    """Rules of exact mode (`rel` 2e-5) and of qsim in float64 (1e-6).

    `operands`: for arrays that are differences, the largest value subtracted.
    """

    def choose(name: str, ours: Tensor) -> Rule:
        if not ours.is_floating_point():
            return identical
        if name in operands:
            return difference_within(rel, operands[name])
        if rel == EXACT_REL:
            for start, looser in _EXACT_LOOSER:
                if name == start or name.startswith(f"{start}."):
                    return within(looser)
        return within_rows(rel) if name.endswith("logits") else within(rel)

    return choose


def far_rule(drift: dict[str, Any]) -> Rule:
    """Logits of long texts in quant mode. `drift`: prompt121_quant_vs_qsim of consistency.json.

    The README's tolerance for the short prompts is 1.58 times the recorded distance from one and
    1.31 times the recorded relative L2; longer texts get the same allowance over their figures.
    """
    return statistical(
        1.0 - 1.58 * (1.0 - float(drift.get("cos_mean", 0.887))),
        1.31 * float(drift.get("rel_l2", 0.475)),
    )


def quant_rules(
    short: str, prefix_window: str, first_source: int, drift: dict[str, Any]
) -> Callable[[str, Tensor], Rule]:
    """End-to-end rules of quant mode. `drift`: as in `far_rule`."""
    far = far_rule(drift)
    table = re.compile(r"(decode_)?rows\.\d+|emb\.\d+|position|positions")
    sets = re.compile(r"(decode_)?topk\.\d+|experts\.\w+")

    def choose(name: str, ours: Tensor) -> Rule:
        if table.fullmatch(name):
            return identical
        if sets.fullmatch(name):
            return set_overlap
        if not ours.is_floating_point():
            return agreement
        if name == short:
            return statistical(QUANT_COSINE, QUANT_REL_L2)
        if name.endswith("_logits") and name != "base_logits":
            return far
        if name == prefix_window:
            return l2_within(_QUANT_WINDOW0)
        if re.fullmatch(rf"{prefix_window.split('.')[0]}\.(main|index_k)\.{first_source}", name):
            return l2_within(_QUANT_FIRST_SOURCE)
        return no_target

    return choose


_LAYER_FIGURES = {"attn_in": 0.0024, "attn_out": 0.146, "ffn_in": 0.03, "ffn_out": 0.175}
_TOPK_FIGURE = 0.97
_NEAREST_FIGURE = {
    "q_latent": "ffn_in",
    "latent": "ffn_in",
    "attn_o": "attn_out",
    "stream_mid": "attn_out",
    "stream_out": "ffn_out",
}


def layer_rules(measured: dict[str, Any]) -> Callable[[str, Tensor], Rule]:
    """Rules of a layers file in quant mode, one layer at a time: twice the recorded figures.

    `measured`: layerwise_quant_vs_fp32_arithmetic of consistency.json; the README's largest values
    stand in where it has none. An array without a figure takes that of the nearest one that has.
    """

    def choose(name: str, ours: Tensor) -> Rule:
        match = re.fullmatch(r"L(\d+)\.(\w+)", name)
        if match is None or match[2] in ("stream_in", "premix_in"):
            return no_target
        figures = measured.get(match[1], {})
        if match[2] == "topk":
            return overlap_within(2 * (1 - float(figures.get("topk_overlap", _TOPK_FIGURE))))
        near = _NEAREST_FIGURE.get(match[2], match[2])
        near = near if near in _LAYER_FIGURES else "ffn_in"
        return l2_within(2 * float(figures.get(near, _LAYER_FIGURES[near])))

    return choose
