"""`deepdraft parity CHECKPOINT --reference ...`: runs both sides, compares, names the cause.

Owns: the order of work, the report as text and JSON, exit codes. Knows nothing of: measures.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from deepdraft import __version__
from deepdraft.checkpoint.reader import Checkpoint
from deepdraft.checkpoint.section import read_config
from deepdraft.checkpoint.spec import ModelSpec
from deepdraft.errors import CheckpointError, ConfigError, DeepdraftError
from deepdraft.proof.doctor.finding import Finding
from deepdraft.proof.native import (
    decided_text,
    half_numerics,
    probe_length,
    probe_text,
    reach,
)
from deepdraft.proof.parity.bisect import Place, first_wrong, layer_errors
from deepdraft.proof.parity.compare import (
    FLOAT32_TOLERANCE,
    GreedyMeasures,
    Measures,
    compare_greedy,
    measure,
    text_difference,
)
from deepdraft.proof.parity.diagnose import diagnose
from deepdraft.proof.parity.page import write_html
from deepdraft.proof.parity.reference import Trace
from deepdraft.proof.parity.sources import (
    Engine,
    from_engine,
    from_golden,
    from_native,
    from_transformers,
)
from deepdraft.proof.parity.target import Target, try_run
from deepdraft.proof.parity.wire import from_wire

REFERENCES = ("hf", "golden", "native", "openai", "vllm")
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(slots=True)
class Result:
    """What a run found."""

    checkpoint: str
    reference: str
    family: str
    tokens: int
    passes: dict[str, int] = field(default_factory=dict)
    """Length that shows a thing -> tokens it takes; the text is as long as all of them."""
    measures: Measures | None = None
    greedy: GreedyMeasures | None = None
    layers: list[dict[str, Any]] = field(default_factory=list)
    place: Place | None = None
    findings: list[Finding] = field(default_factory=list)
    dtypes: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether the two sides compute the same."""
        return not self.findings

    def as_json(self) -> dict[str, Any]:
        """The report as JSON values."""
        return {
            "checkpoint": self.checkpoint,
            "reference": self.reference,
            "family": self.family,
            "passed": self.passed,
            "tokens": self.tokens,
            "text_passes": {n: c for n, c in self.passes.items() if c <= self.tokens},
            "text_too_short_for": {n: c for n, c in self.passes.items() if c > self.tokens},
            "tolerance": FLOAT32_TOLERANCE,
            "logits": self.measures.as_json() if self.measures else None,
            "greedy": self.greedy.as_json() if self.greedy else None,
            "first_wrong": self.place.text if self.place else None,
            "layers": self.layers,
            "findings": [
                {k: getattr(f, k) for k in ("cause", "what", "evidence", "fix")}
                for f in self.findings
            ],
            "dtypes": self.dtypes,
            "notes": self.notes,
            "seconds": {k: round(v, 2) for k, v in self.seconds.items()},
            "about": self.about,
        }


def main(
    checkpoint: str,
    at: str | None = None,
    *,
    reference: str,
    as_json: bool = False,
    html: str | None = None,
    **options: Any,
) -> int:
    """Prints the report; returns 1 where the two sides differ, else 0."""
    result = examine(Path(checkpoint), reference, at, **options)
    if html:
        write_html(Path(html), result)
    print(json.dumps(result.as_json(), indent=2) if as_json else render(result))
    return 0 if result.passed else 1


def examine(
    path: Path,
    kind: str,
    at: str | None = None,
    *,
    tokens: int | None = None,
    greedy: int = 16,
    dtype: str = "float32",
    python: str | None = None,
    target: Target | None = None,
    accept_keys: Iterable[str] = (),
    search: bool = True,
    model_name: str | None = None,
    engine: Engine | None = None,
) -> Result:
    """Compares the native engine on `path` with a reference. `target`: an engine's own view of the
    checkpoint (its spec and weights) in place of the checkpoint as it is. `engine`: what computes
    the reference `vllm`; with `python`, transformers of that interpreter is a third side.

    Raises ConfigError for a reference that cannot be had, CheckpointError for unreadable files.
    """
    _check_options(kind, at, dtype)
    if (kind == "vllm") != (engine is not None):
        raise ConfigError("an engine is given with --reference vllm, and only there")
    torch.set_num_threads(1)
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a directory; give the checkpoint's directory")
    if target is None:
        opened = _open(path, accept_keys)
        if isinstance(opened, list):
            return Result(str(path), kind, "", 0, findings=opened)
        target = opened
    args: Any = target.spec.args
    result = Result(str(path), kind, target.spec.config["model_type"], 0, reach(args))
    count = tokens or probe_length(target.checkpoint.args, leave=greedy)
    start = time.perf_counter()
    if engine is not None:
        trace = from_engine(engine, _text(target, None, count), greedy=greedy)
    else:
        trace = _reference(kind, path, at, target, count, greedy, "float32", python, model_name)
    result.seconds["reference"] = time.perf_counter() - start
    result.reference, result.tokens, result.notes = trace.name, len(trace.ids), trace.notes
    result.about = {"deepdraft": __version__, "torch": str(torch.__version__), **trace.about}
    start = time.perf_counter()
    compare(result, target, trace, search=search)
    result.seconds["ours and diagnosis"] = time.perf_counter() - start
    if engine is not None and python is not None:
        start = time.perf_counter()
        directory = Path(at) if at is not None else path
        third = from_transformers(directory, trace.ids, greedy=greedy, python=python)
        compare_third(result, trace, third)
        result.seconds["transformers"] = time.perf_counter() - start
    if dtype != "float32" and result.passed:
        start = time.perf_counter()
        _halves(result, kind, path, at, target, trace, dtype, python)
        result.seconds[dtype] = time.perf_counter() - start
    return result


def _check_options(kind: str, at: str | None, dtype: str) -> None:
    if kind not in REFERENCES:
        raise ConfigError(f"reference {kind!r} is not known; known: {', '.join(REFERENCES)}")
    if dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype!r} is not known; known: {', '.join(DTYPES)}")
    if at is None and kind not in ("hf", "vllm"):
        what = {"golden": "the golden directory", "native": "the directory to compare with"}
        raise ConfigError(f"--reference {kind} needs {what.get(kind, 'the URL of the server')}")
    if dtype != "float32" and kind == "openai":
        raise ConfigError(f"dtype {dtype} needs whole logits, which a server does not give")


def _open(path: Path, accept: Iterable[str]) -> Target | list[Finding]:
    """The checkpoint, or what `doctor` says of one that does not load."""
    try:
        checkpoint = Checkpoint.open(path, accept_unknown=accept)
        spec = ModelSpec.of(read_config(path / "config.json"), accept_unknown=accept)
        return Target(checkpoint, spec, checkpoint)
    except DeepdraftError as error:
        from deepdraft.proof.doctor.static import static_checks

        found = [
            f for f in static_checks(path, accept_unknown=accept).findings if f.severity == "error"
        ]
        return found or [
            Finding("parity", "checkpoint", "it does not load", error.message, "correct it")
        ]


def _reference(
    kind: str,
    path: Path,
    at: str | None,
    target: Target,
    count: int,
    greedy: int,
    dtype: str,
    python: str | None,
    model_name: str | None = None,
) -> Trace:
    if kind == "golden":
        assert at is not None
        return from_golden(Path(at), target.checkpoint.args)
    ids = _text(target, at if kind in ("hf", "native") else None, count)
    if kind == "native":
        assert at is not None
        return from_native(Path(at), ids, greedy=greedy)
    if kind == "openai":
        assert at is not None
        return from_wire(at, target.checkpoint.path, ids, greedy=max(greedy, 32), name=model_name)
    directory = Path(at) if at is not None else path
    return from_transformers(directory, ids, greedy=greedy, dtype=dtype, python=python)


def _text(target: Target, at: str | None, count: int) -> list[int]:
    """The text, chosen for the reference's checkpoint: it is the one that is right."""
    try:
        right = target.checkpoint if at is None else Checkpoint.open(at)
        return decided_text(right, count)
    except DeepdraftError:
        return probe_text(target.checkpoint.args, count)


def compare(result: Result, target: Target, trace: Trace, *, search: bool = True) -> None:
    """Runs the target on the reference's text and fills in the result."""
    ours = try_run(target, trace.ids, greedy=len(trace.greedy), layers=bool(trace.layers))
    if isinstance(ours, str):
        result.findings = diagnose(target, trace, ours, None, search=search)
        return
    if trace.partial:
        ours.logits = ours.logits.log_softmax(-1)
        worst = text_difference(ours.logits, trace.logits, trace.ids)
        result.about["text_log_probability_difference"] = worst
    result.measures = found = measure(ours.logits[trace.first :], trace.logits[trace.first :])
    if trace.greedy:
        result.greedy = compare_greedy(ours.greedy, trace.greedy, trace.greedy_logits)
    if trace.layers:
        result.layers = layer_errors(ours, trace)
    wrong = not found.passed("float32")
    result.place = first_wrong(result.layers, wrong) if wrong else None
    if wrong:
        result.findings = diagnose(target, trace, ours, result.place, search=search)
    elif result.greedy is not None and not result.greedy.passed(found.dl):
        result.findings = [
            Finding(
                "parity",
                "engine: decoding",
                "prefill agrees, but the greedy continuation parts where the reference is sure",
                f"token {result.greedy.first_difference}, margin {result.greedy.margin}",
                "run `deepdraft doctor`: steps and prefill must give the same bits",
            )
        ]


def compare_third(result: Result, trace: Trace, third: Trace) -> None:
    """The reference, whose logits are log-probabilities, against a third engine on its text."""
    rows = third.logits.log_softmax(-1)
    found = measure(rows[trace.first :], trace.logits[trace.first :])
    text = text_difference(rows, trace.logits, trace.ids)
    free = compare_greedy(third.greedy, trace.greedy, trace.greedy_logits)
    about = {"dl": found.dl, "text_log_probability_difference": text, **free.as_json()}
    result.about[third.name] = about
    where = "equal" if free.first_difference is None else f"part at {free.first_difference}"
    said = f"dl {found.dl:.2e}, log-probabilities of the text at most {text:.2e} apart"
    result.notes.append(f"{third.name} against {trace.name}: {said}, greedy tokens {where}")
    if not found.passed("float32") or not free.passed(found.dl):
        result.findings.append(
            Finding(
                "parity",
                f"engine: {trace.name}",
                f"it does not compute what {third.name} computes",
                f"{said}, greedy tokens {where}",
                "`deepdraft parity --reference hf` says whether our engine and transformers agree",
            )
        )


def _halves(
    result: Result,
    kind: str,
    path: Path,
    at: str | None,
    target: Target,
    exact: Trace,
    dtype: str,
    python: str | None,
) -> None:
    """What our engine loses in half precision against the reference's float32, and what the
    reference itself loses there."""
    numerics = half_numerics(target.spec.args, dtype)
    ours = try_run(dataclasses.replace(target, numerics=numerics), exact.ids)
    if isinstance(ours, str):
        result.findings.append(
            Finding("parity", dtype, f"the model does not run in {dtype}", ours, "use float32")
        )
        return
    ours.name = f"deepdraft native ({numerics})"
    _half(result, dtype, dtype, ours, exact)
    if kind == "hf":
        theirs = _reference(kind, path, at, target, len(exact.ids), 0, dtype, python)
        _half(result, dtype, f"{dtype}, {theirs.name}", theirs, exact)


def _half(result: Result, dtype: str, label: str, trace: Trace, exact: Trace) -> None:
    found = measure(trace.logits[exact.first :], exact.logits[exact.first :])
    passed = found.passed(dtype)
    result.dtypes[label] = {"engine": trace.name, "passed": passed, **found.as_json()}
    if passed or any(f.cause == dtype for f in result.findings):
        return
    if found.not_finite:
        result.findings.append(
            Finding(
                "parity",
                dtype,
                f"the model overflows in {dtype}",
                f"{trace.name}: {found.not_finite} of {len(exact.ids)} positions are not finite, "
                "float32 is",
                "run it in bfloat16 or float32",
            )
        )
    else:
        result.findings.append(
            Finding(
                "parity",
                dtype,
                f"{dtype} changes what the model says",
                f"{trace.name}: mean KL {found.mean_kl:.2g}, best token equal at "
                f"{found.top1_clear:.1%} of the positions with a clear margin",
                "run it in float32",
            )
        )


def render(result: Result) -> str:
    """The report for a terminal."""
    lines = [f"{result.checkpoint} against {result.reference}"]
    if m := result.measures:
        lines += [
            f"  {result.tokens} tokens, logits at every position: dl {m.dl:.2e} (tolerance "
            f"{FLOAT32_TOLERANCE:g}; first 8 positions {m.dl_short:.2e})",
            f"  mean KL {m.mean_kl:.2e}, best token equal at {m.top1:.1%}",
        ]
    if (worst := result.about.get("text_log_probability_difference")) is not None:
        lines.append(f"  log-probabilities of the text's own tokens: at most {worst:.2e} apart")
    if g := result.greedy:
        where = "equal" if g.first_difference is None else f"parts at token {g.first_difference}"
        lines.append(f"  greedy continuation of {len(g.theirs)} tokens: {where}")
    for name, count in result.passes.items():
        if 0 < result.tokens < count:
            lines.append(f"  the text is too short to judge the {name} ({count} tokens)")
    for name, values in result.dtypes.items():
        lines.append(f"  {name}: mean KL {values['mean_kl']:.2e}, dl {values['dl']:.2e}")
    lines += [f"  note: {note}" for note in result.notes]
    if result.place:
        lines.append(f"  first wrong: {result.place.text}")
    for f in result.findings:
        lines += ["", f"error: {f.cause}", f"  {f.what}", f"  evidence: {f.evidence}"]
        lines.append(f"  fix: {f.fix}")
    lines += ["", "passed" if result.passed else "FAILED"]
    return "\n".join(lines)
