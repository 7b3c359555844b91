"""Loading a real (tiny, random) checkpoint, and the engine over the real runner."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from deepdraft.checkpoint.progress import Bar
from deepdraft.checkpoint.reader import Checkpoint
from deepdraft.checkpoint.writer import write_checkpoint
from deepdraft.config import EngineConfig
from deepdraft.engine.engine import Engine
from deepdraft.engine.load import LoadedModel, load_engine, read_calibrations
from deepdraft.engine.runner import Runner
from deepdraft.engine.speculate import Speculation
from deepdraft.errors import CheckpointError, ConfigError
from deepdraft.proof.tiny_write import write_tiny
from deepdraft.spec.live import LiveCosts
from deepdraft.spec.schedule import FixedSchedule, ThresholdSchedule
from deepdraft.types import GenerateRequest, SamplingParams, TokenEvent
from tests.checkpoint.tiny import patch_tensor, random_tensors, tiny_config
from tests.server.toy import tokenizer_file

VOCAB = 288  # the tokenizer's 268 entries, padded
COMPRESSED = 239  # of the toy tokenizer
OPTIONS = EngineConfig(max_running=3, max_context=128)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny-v41"
    config = tiny_config(vocab_size=VOCAB, engram_compressed_vocab_size=COMPRESSED)
    write_checkpoint(directory, config, random_tensors(config))
    tokenizer_file(directory)
    return directory


@pytest.fixture
def copied(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(checkpoint, tmp_path / "copy"))


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> LoadedModel:
    return load_engine(checkpoint, OPTIONS)


def ask(i: int, num: int = 12) -> GenerateRequest:
    return GenerateRequest(
        request_id=str(i),
        prompt_ids=tuple((7 * i + k * k) % VOCAB for k in range(5 + 9 * i)),
        sampling=SamplingParams(seed=i, temperature=0.0 if i == 0 else 1.0, logprobs=2),
        max_new_tokens=num,
    )


def test_what_was_loaded(model: LoadedModel, checkpoint: Path) -> None:
    assert model.name == "tiny-v41"
    assert model.runner.vocab_size == VOCAB and model.runner.max_tokens == 128
    assert (model.bos_token_id, model.eos_token_id) == (0, 1)
    assert model.sampling_defaults == {}
    assert load_engine(checkpoint, OPTIONS, name="other").name == "other"


@pytest.mark.parametrize("drafts", [None, 0])
def test_loading_tells_how_far_it_is(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, drafts: int | None
) -> None:
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(Bar, "__call__", lambda self, done, total: told.append((done, total)))
    load_engine(checkpoint, EngineConfig(max_context=128, schedule="all", drafts=drafts))
    files = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
    (total,) = {total for _, total in told}
    assert 0.7 * files < total < files  # all but the headers
    assert [done for done, _ in told] == sorted({done for done, _ in told})
    # Without a drafter its layers are not read; some bytes are for training only.
    assert (told[-1][0] > 0.99 * total) == (drafts is None)


def test_answers_do_not_depend_on_company_or_chunks(model: LoadedModel) -> None:
    """The same tokens and the same log-probabilities, bit for bit: alone, and four together."""
    engine = Engine(model.runner, max_running=1, prefill_chunk=64)
    engine.start()
    engine.warm_up()

    def answer(events: Iterable[TokenEvent]) -> list[TokenEvent]:
        """Without what a slow machine says of the prompt's progress."""
        return [event for event in events if event.progress is None]

    alone = [answer(engine.generate(ask(i))) for i in range(5)]
    engine.close()
    engine = Engine(model.runner, max_running=3, prefill_chunk=5)
    engine.start()
    streams = [engine.generate(ask(i)) for i in range(5)]
    together = [answer(s) for s in streams]
    engine.close()
    assert together == alone
    assert all(len([i for e in events for i in e.token_ids]) == 12 for events in alone)


def test_a_cancelled_sequence_gives_its_memory_back(model: LoadedModel) -> None:
    engine = Engine(model.runner, max_running=3)
    engine.start()
    for _ in range(3):
        streams = [engine.generate(ask(i, 60)) for i in range(3)]
        for stream in streams:
            next(stream)
            stream.close()
        assert [list(s)[-1].finish_reason for s in streams] == ["abort"] * 3
    assert list(engine.generate(ask(1)))[-1].finish_reason == "length"
    assert engine.failure is None
    engine.close()


def test_no_more_run_than_there_is_memory_for(model: LoadedModel) -> None:
    """`max_running` is what one asks for; the memory of sequences decides."""
    loaded = model.runner.model  # type: ignore[attr-defined]
    one = Runner(loaded, max_context=128).pool.allocated_bytes
    runner = Runner(loaded, max_context=128, num_sequences=16, state_bytes=5 * one // 2)
    assert runner.num_sequences == 2 and runner.pool.allocated_bytes <= 5 * one // 2
    engine = Engine(runner, max_running=16)
    streams = [engine.generate(ask(i)) for i in range(5)]
    with torch.inference_mode():
        while not engine._scheduler.idle:
            engine._step_once()
            assert engine._scheduler.num_running <= 2
    assert [list(s)[-1].finish_reason for s in streams] == ["length"] * 5
    with pytest.raises(ConfigError, match="raise state_memory, or lower max_context"):
        Runner(loaded, max_context=128, state_bytes=one - 1)


def test_the_fingerprint_tells_models_apart(copied: Path, model: LoadedModel) -> None:
    def fingerprint(**options: str) -> str:
        return load_engine(copied, EngineConfig(max_context=128, **options)).fingerprint  # type: ignore[arg-type]

    assert fingerprint() == model.fingerprint
    assert fingerprint(numerics="qsim") != model.fingerprint
    assert fingerprint(prefill="encoder") != model.fingerprint
    patch_tensor(copied, "norm.weight", 0, b"\x00\x3f")
    assert fingerprint() != model.fingerprint


def test_presets_of_the_checkpoint(copied: Path) -> None:
    file = copied / "generation_config.json"
    file.write_text(json.dumps({"temperature": 0.6, "top_p": 0.95, "eos_token_id": 1}))
    assert load_engine(copied, OPTIONS).sampling_defaults == {"temperature": 0.6, "top_p": 0.95}
    file.write_text(json.dumps({"do_sample": False, "temperature": 0.6}))
    assert load_engine(copied, OPTIONS).sampling_defaults == {"temperature": 0.0}
    for text, message in (
        ('{"temperature": "hot"}', "temperature must be a number, got 'hot'"),
        ('{"top_p": 2}', "top_p must lie in"),
        ('{"eos_token_id": [1, true]}', "eos_token_id holds True; token ids run from 0 to"),
        ('{"eos_token_id": 1000000}', "eos_token_id holds 1000000"),
        ("[1]", "must hold an object"),
        ("{", "cannot be read as JSON"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=message):
            load_engine(copied, OPTIONS)


def test_several_end_tokens(copied: Path, tmp_path: Path) -> None:
    (copied / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 1, 9]}))
    model = load_engine(copied, OPTIONS)
    assert (model.eos_token_id, model.more_end_ids) == (1, {7, 9})
    llama = write_tiny(tmp_path / "llama", "llama")
    file = llama / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": [1, 5, 6]}))
    model = load_engine(llama, OPTIONS)
    assert (model.eos_token_id, model.more_end_ids) == (1, {5, 6})


def test_broken_checkpoints_say_what_is_broken(copied: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no checkpoint directory at .*nowhere"):
        load_engine(tmp_path / "nowhere", OPTIONS)
    with pytest.raises(ConfigError, match="max_context"):
        load_engine(copied, EngineConfig(max_context=1 << 40))
    patch_tensor(copied, "norm.weight", 0, b"\xc0\x7f")  # NaN in bfloat16
    with pytest.raises(CheckpointError, match=r"norm\.weight"):
        load_engine(copied, OPTIONS)
    (copied / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        load_engine(copied, OPTIONS)


def test_a_small_model_runs_on_one_thread_unless_told(checkpoint: Path) -> None:
    before = torch.get_num_threads()
    try:
        for asked, expected in ((None, 1), (2, 2)):
            load_engine(checkpoint, EngineConfig(max_context=128, threads=asked))
            assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(before)


def test_an_unknown_key_is_refused_unless_named(copied: Path) -> None:
    file = copied / "config.json"
    config = json.loads(file.read_text())
    config["text_config"]["my_key"] = 3
    file.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"text_config\.my_key"):
        load_engine(copied, OPTIONS)
    accepting = EngineConfig(max_running=3, max_context=128, accept_keys=("text_config.my_key",))
    assert load_engine(copied, accepting).runner.vocab_size == VOCAB


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("llama-a", "Llama"),
        ("deepseek-v2-a", "DeepseekV2"),
        ("deepseek-v3-a", "DeepseekV3"),
        ("deepseek-v4-a", "DeepseekV4"),
    ],
)
def test_a_checkpoint_gets_the_model_of_its_family(folder: str, name: str) -> None:
    directory = Path(__file__).parents[1] / "families" / "data" / folder / "checkpoint"
    runner = Runner.from_checkpoint(Checkpoint.open(directory), None, max_context=64)
    assert type(runner.model).__name__ == name
    sequence = runner.open_sequence()
    logits = runner.prefill(sequence, [1, 2, 3], final=True)
    assert logits is not None and logits.shape == (runner.vocab_size,)


def test_speculation_is_set_up_as_asked(checkpoint: Path, tmp_path: Path) -> None:
    def load(**options: object) -> Speculation:
        fields = {"max_running": 1, "max_context": 128, **options}
        loaded = load_engine(checkpoint, EngineConfig(**fields)).speculation  # type: ignore[arg-type]
        assert loaded is not None
        return loaded

    by_cost = load()
    # Measured at the start, and corrected while serving; those of a file stay as they are.
    assert isinstance(by_cost.costs, LiveCosts)
    assert by_cost.schedule is None and by_cost.rule == "coupled"
    start = by_cost.costs.start
    assert start.verify.step_ms(1) <= start.verify.step_ms(16)
    file = tmp_path / "costs.json"
    file.write_text(json.dumps(start.to_dict()))
    assert load(cost_table=str(file)).costs == start
    assert load(schedule="threshold", draft_threshold=0.2).schedule == ThresholdSchedule(
        threshold=0.2
    )
    assert load(schedule="all", drafts=3).schedule == FixedSchedule(num_drafts=3)
    off = load_engine(checkpoint, EngineConfig(max_context=128, drafts=0))
    assert off.speculation == Speculation() and off.runner.block_size == 0  # type: ignore[attr-defined]
    assert load(rule="block").rule == "block"
    for text, message in (
        ("{", "cannot be read as JSON"),
        ("[]", "must hold an object"),
        ("{}", "costs: tables verify and draft are needed"),
        ('{"verify": {"rows": [2, 1], "ms": [[1, 2]]}, "draft": {}}', "rows must rise"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=message):
            load(cost_table=str(file))
    with pytest.raises(ConfigError, match="cannot be read"):
        load(cost_table=str(tmp_path / "none"))


def test_a_checkpoint_brings_its_calibration(copied: Path) -> None:
    assert read_calibrations(copied) == {}
    file = copied / "speculation.json"
    file.write_text('{"calibrations": {"block": {"temperatures": [2.0], "means": [0.5]}}}')
    assert read_calibrations(copied)["block"].apply([2.0]) == pytest.approx([0.7310586])
    for text, message in (
        ('{"calibrations": {"best": {}}}', "one entry per rule"),
        ('{"calibrations": []}', "one entry per rule"),
        ('{"calibrations": {"block": {"temperatures": [0]}}}', "temperatures must be > 0"),
        ('{"calibrations": {"block": {}}}', "a list of temperatures is needed"),
        (" " * (1 << 20) + "{}", "larger than 1048576 bytes"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=message):
            load_engine(copied, OPTIONS)
