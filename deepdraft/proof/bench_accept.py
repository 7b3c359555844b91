"""`deepdraft bench accept`: how many drafts stand, by domain, temperature, rule and schedule.

Owns: the grid of runs, reliability of confidences, calibration, the schedule's worth on recorded
drafts. Knows nothing of: thresholds, plots.

Answers are made one at a time, or several together: what is accepted is the same, ms and rates are
those of so many streams.
"""

import random
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deepdraft.checkpoint.reader import Checkpoint
from deepdraft.config import memory_of_machine
from deepdraft.engine.block import Block
from deepdraft.engine.engine import Engine
from deepdraft.engine.load import STATE_SHARE
from deepdraft.engine.measure import measure_costs
from deepdraft.engine.runner import Runner
from deepdraft.engine.speculate import BlockTarget, Speculation
from deepdraft.errors import ConfigError, EngineError
from deepdraft.proof.prompts import Prompt, context_for, evenly, load_prompts
from deepdraft.proof.replay import AsTold, replay, replay_fixed
from deepdraft.spec.calibrate import (
    Calibration,
    Observation,
    brier,
    calibration_error,
    fit,
    pairs,
    reliability,
)
from deepdraft.spec.costs import StepCosts
from deepdraft.spec.live import LiveCosts
from deepdraft.spec.protocol import RULES, Proposal, Verdict
from deepdraft.spec.schedule import ThresholdSchedule
from deepdraft.text.tokenizer import Tokenizer
from deepdraft.types import (
    DecodeStats,
    GenerateRequest,
    Rule,
    SamplingParams,
    SpeculationParams,
    TokenEvent,
)

TEMPERATURES = (0.0, 0.7, 1.0)
THRESHOLDS = (0.2, 0.3, 0.5, 0.7)
BLOCK_SIZES = (1, 2, 3, 4, 7)
BOOTSTRAPS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One cell of the grid. `schedule`: all, cost, none, or a threshold."""

    temperature: float
    rule: Rule = "coupled"
    num_drafts: int | None = None
    schedule: str | float = "all"


@dataclass(slots=True)
class Answer:
    """What one answer took, and its verified blocks in order."""

    prompt: Prompt
    stats: DecodeStats
    seconds: float
    """Of decoding; of several streams an equal share of the whole run."""
    cpu_seconds: float
    token_ids: tuple[int, ...]
    blocks: list[Observation] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Those of steps of decoding: all but the first, which is the prompt's own."""
        return len(self.token_ids) - 1


class Bench:
    """A loaded model, and answers under any setting."""

    def __init__(
        self,
        model: str | Path,
        prompts: Sequence[Prompt],
        tokens: int,
        *,
        numerics: str = "exact",
        streams: int = 1,
    ) -> None:
        """With room for these prompts and answers of `tokens` tokens. Raises ConfigError."""
        torch.set_num_threads(1)
        self.streams = streams
        self.tokenizer = Tokenizer.load(model)
        checkpoint = Checkpoint.open(model)
        self.eos = checkpoint.args.eos_token_id
        self.runner = Runner.from_checkpoint(
            checkpoint,
            self.tokenizer,
            numerics=numerics,
            drafter=True,
            max_context=context_for(prompts, tokens, checkpoint.args.max_position_embeddings),
            num_sequences=max(4, streams),
            state_bytes=memory_of_machine() // STATE_SHARE,
        )
        if self.runner.num_sequences < streams:
            raise ConfigError(
                f"the state of {streams} streams does not fit this machine's memory; "
                f"that of {self.runner.num_sequences} does"
            )
        self.block_size = self.runner.block_size
        self.costs = measure_costs(self.runner, repeats=6)
        self.live = LiveCosts(self.costs)
        """As a server knows them: corrected by all answers drafted by cost."""
        self.last_stats: dict[str, int] = {}
        """The engine's counters after the last `run`."""

    def run(
        self,
        prompts: Sequence[Prompt],
        setting: Setting,
        tokens: int,
        calibration: Calibration | None = None,
    ) -> list[Answer]:
        """Answers in the order of the prompts, without those that took no step of decoding.

        Raises ConfigError where none took one.
        """
        self.runner.block_size = setting.num_drafts or self.block_size
        options = Speculation(
            rule=setting.rule,
            costs=self.live if setting.schedule == "cost" else None,
            calibrations={} if calibration is None else {setting.rule: calibration},
            schedule=ThresholdSchedule(threshold=setting.schedule)
            if isinstance(setting.schedule, float)
            else None,
        )
        engine = Engine(
            self.runner, max_running=self.streams, max_queue=len(prompts), speculation=options
        )
        blocks: dict[str, list[Observation]] = defaultdict(list)

        def observe(
            block: Block, proposal: Proposal, target: BlockTarget, verdict: Verdict
        ) -> None:
            # The cut off confidences go with it: what was not verified was not observed.
            raw = tuple(block.raw[: len(proposal)])
            seen = Observation(raw=raw, num_accepted=verdict.num_accepted)
            blocks[block.request.request_id].append(seen)

        engine.speculator.observer = observe
        engine.start()
        answers = []
        begin, cpu = time.perf_counter(), time.process_time()
        try:
            for at in range(0, len(prompts), 1 if self.streams == 1 else len(prompts)):
                some = prompts if self.streams > 1 else prompts[at : at + 1]
                requests = [
                    self._request(p, setting, tokens, seed) for seed, p in enumerate(some, at)
                ]
                streams = [engine.generate(request) for request in requests]
                for prompt, request, events in zip(some, requests, streams, strict=True):
                    answer = _answer(prompt, events)
                    if answer is not None:
                        # The first one is the prompt's own token.
                        answer.blocks = blocks.pop(request.request_id)[1:]
                        answers.append(answer)
        finally:
            self.last_stats = engine.stats()
            engine.close()
            self.runner.block_size = self.block_size
        if not answers:
            raise ConfigError(
                "no answer took a step of decoding, as the prompt gives the first token: ask for "
                "longer answers, or other prompts"
            )
        if self.streams > 1:
            for answer in answers:
                answer.seconds = (time.perf_counter() - begin) / len(answers)
                answer.cpu_seconds = (time.process_time() - cpu) / len(answers)
        return answers

    def _request(self, prompt: Prompt, setting: Setting, tokens: int, seed: int) -> GenerateRequest:
        return GenerateRequest(
            request_id=f"bench-{seed}",
            prompt_ids=prompt.ids,
            sampling=SamplingParams(temperature=setting.temperature, seed=seed),
            max_new_tokens=tokens,
            stop_token_ids=frozenset({self.eos}),
            speculation=SpeculationParams(num_drafts=0 if setting.schedule == "none" else None),
        )


def _answer(prompt: Prompt, events: Iterable[TokenEvent]) -> Answer | None:
    begin, cpu, stats = None, 0.0, None
    token_ids: list[int] = []
    for event in events:
        if event.error is not None:
            raise EngineError(event.error)
        if begin is None and event.token_ids:
            # At the first token: decoding alone is timed. A prompt that is read slowly has events
            # before it.
            begin, cpu = time.perf_counter(), time.process_time()
        token_ids += event.token_ids
        stats = event.stats or stats
    assert begin is not None
    if stats is None:
        return None
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    return Answer(prompt, stats, seconds, cpu, tuple(token_ids))


def accept(
    model: str | Path,
    *,
    prompts: str | None = None,
    num_prompts: int | None = None,
    tokens: int = 96,
    numerics: str = "exact",
    quick: bool = False,
    streams: int = 1,
) -> dict[str, Any]:
    """The whole report. `quick` leaves out block sizes and thresholds."""
    chosen = evenly(load_prompts(prompts, Tokenizer.load(model)), num_prompts)
    bench = Bench(model, chosen, tokens, numerics=numerics, streams=streams)
    grid = [Setting(temperature=0.0)]
    grid += [Setting(temperature=t, rule=r) for t in TEMPERATURES[1:] for r in RULES]
    recorded = {setting: bench.run(chosen, setting, tokens) for setting in grid}
    by_rule: dict[Rule, list[Observation]] = defaultdict(list)
    for setting, answers in recorded.items():
        by_rule[setting.rule] += [b for a in answers for b in a.blocks]
    calibrations = {r: fit(x, num_positions=bench.block_size) for r, x in by_rule.items()}
    rows = [row for s, a in recorded.items() for row in _rows(s, a, bench)]
    rest = [Setting(temperature=t, schedule=s) for t in (0.0, 1.0) for s in ("none", "cost")]
    if not quick:
        rest += [Setting(temperature=t, num_drafts=n) for t in (0.0, 1.0) for n in BLOCK_SIZES]
        rest += [Setting(temperature=t, schedule=c) for t in (0.0, 1.0) for c in THRESHOLDS]
    for setting in rest:
        calibration = calibrations[setting.rule] if setting.schedule == "cost" else None
        answers = bench.run(chosen, setting, tokens, calibration)
        rows += _rows(setting, answers, bench)
    return {
        "what": "accepted drafts",
        "numerics": numerics,
        "prompts": len(chosen),
        "tokens_per_answer": tokens,
        "streams": streams,
        "block_size": bench.block_size,
        "costs": bench.costs.to_dict(),
        "runs": rows,
        "reliability": [_reliability(s, a, bench.block_size) for s, a in recorded.items()],
        "calibrations": {r: c.to_dict() for r, c in calibrations.items()},
        "schedule": [
            _worth(s, a, bench.costs, calibrations[s.rule], bench.block_size)
            for s, a in recorded.items()
        ],
    }


def _rows(setting: Setting, answers: Sequence[Answer], bench: Bench) -> list[dict[str, Any]]:
    """One row a domain, and one of all; rates of one domain only where streams are single."""
    groups: dict[str, list[Answer]] = defaultdict(list)
    for answer in answers:
        groups[answer.prompt.domain].append(answer)
    groups["all"] = list(answers)
    rows = []
    for domain, own in groups.items():
        steps = sum(a.stats.steps for a in own)
        length = 1 + sum(a.stats.accepted for a in own) / steps
        seconds = sum(a.seconds for a in own)
        rows.append(
            {
                "domain": domain,
                "temperature": setting.temperature,
                "rule": setting.rule,
                "block_size": setting.num_drafts or bench.block_size,
                "schedule": setting.schedule,
                "answers": len(own),
                "tokens": sum(a.num_tokens for a in own),
                "steps": steps,
                "accepted_length": round(length, 4),
                "drafts": sum(a.stats.drafts for a in own),
                "verified": sum(a.stats.verified for a in own),
                "steps_by_accepted": [
                    sum(counts)
                    for counts in zip_longest(*(a.stats.histogram for a in own), fillvalue=0)
                ],
                "ms_per_step": round(
                    sum(a.stats.average_iteration_ms * a.stats.steps for a in own) / steps, 3
                ),
                "tokens_per_s": round(sum(a.num_tokens for a in own) / seconds, 1)
                if bench.streams == 1 or domain == "all"
                else None,
            }
        )
    return rows


def _reliability(setting: Setting, answers: Sequence[Answer], num: int) -> dict[str, Any]:
    """Confidences against what came of the drafts: half of the answers fit, the others judge."""
    halves = [[b for a in answers[i::2] for b in a.blocks] for i in (0, 1)]
    fitted = fit(halves[0], num_positions=num)
    result: dict[str, Any] = {"temperature": setting.temperature, "rule": setting.rule}
    for name, calibration in (("raw", Calibration()), ("calibrated", fitted)):
        said, came = [], []
        for position in range(num):
            raw, accepted = pairs(halves[1], position)
            said += [calibration.apply([0.0] * position + [x])[-1] for x in raw]
            came += accepted.tolist()
        bins = reliability(np.array(said), np.array(came))
        result[name] = {
            "drafts": len(said),
            "brier": round(brier(np.array(said), np.array(came)), 5) if said else None,
            "expected_calibration_error": round(calibration_error(bins), 5),
            "bins": [
                {
                    "from": b.low,
                    "to": b.high,
                    "count": b.count,
                    "predicted": round(b.predicted, 4),
                    "observed": round(b.observed, 4),
                }
                for b in bins
            ],
        }
    result["temperatures"] = [round(t, 4) for t in fitted.temperatures]
    return result


def _worth(
    setting: Setting,
    answers: Sequence[Answer],
    costs: StepCosts,
    calibration: Calibration,
    num: int,
) -> dict[str, Any]:
    """The schedule against every fixed count on the same drafts, by domain and over all."""
    sampled = setting.temperature > 0
    machine = AsTold(costs, sampled=sampled)
    cells: dict[str, list[list[tuple[float, float]]]] = defaultdict(list)
    for answer in answers:
        cells[answer.prompt.domain].append(
            [
                replay(answer.blocks, machine, LiveCosts(costs), calibration, sampled=sampled),
                *(replay_fixed(answer.blocks, machine, k) for k in range(num + 1)),
            ]
        )
    domains = {}
    for domain, own in cells.items():
        rates = _rates(own)
        domains[domain] = {
            "scheduled": round(rates[0], 5),
            "fixed": [round(r, 5) for r in rates[1:]],
            "of_best_fixed": round(rates[0] / max(rates[1:]), 4),
        }
    everything = [cell for own in cells.values() for cell in own]
    rates = _rates(everything)
    rng = random.Random(0)
    gains = []
    for _ in range(BOOTSTRAPS):
        again = _rates([rng.choice(everything) for _ in everything])
        gains.append(again[0] / max(again[1:]))
    gains.sort()
    return {
        "temperature": setting.temperature,
        "rule": setting.rule,
        "unit": "accepted length per ms",
        "domains": domains,
        "mixed": {
            "scheduled": round(rates[0], 5),
            "fixed": [round(r, 5) for r in rates[1:]],
            "over_best_fixed": round(rates[0] / max(rates[1:]), 4),
            "interval_95": [round(gains[int(BOOTSTRAPS * q)], 4) for q in (0.025, 0.975)],
        },
    }


def _rates(cells: Sequence[Sequence[tuple[float, float]]]) -> list[float]:
    """Tokens per ms of each way, over cells [answer][way] of (tokens, ms)."""
    return [sum(t for t, _ in way) / sum(ms for _, ms in way) for way in zip(*cells, strict=True)]
