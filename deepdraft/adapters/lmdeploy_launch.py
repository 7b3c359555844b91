"""How LMDeploy is started on a checkpoint: which engine of it, its arguments, what it cannot serve.

Owns: facts about LMDeploy 0.18 as code; the module map it needs for stacked experts. Knows nothing
of: processes; nothing of LMDeploy is imported here. It has no CPU engine.
"""

import contextlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from deepdraft.arch import DeepseekV2Args, DeepseekV3Args, LlamaArgs, V4Args, V41Args
from deepdraft.checkpoint import stacks as splitter
from deepdraft.checkpoint.layouts import read, stacks
from deepdraft.checkpoint.spec_styles import missing_for
from deepdraft.errors import ConfigError

Engine = Literal["turbomind", "pytorch"]
_PACKAGE = Path(__file__).with_name("lmdeploy_package")
_V4_RATIOS = {0, 4, 128}
_MTP = ("deepseek_v3", "deepseek_v32")


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """LMDeploy's settings for one checkpoint."""

    checkpoint: Path
    engine: Engine
    session_len: int
    hf_overrides: dict[str, Any]
    drafts: int = 0
    stacked: bool = False
    """Whether it needs our module map, which only `serve.py` of `write_server` can give it."""
    notes: tuple[str, ...] = ()
    """What to know before relying on it."""

    def words(self) -> list[str]:
        """Arguments of the `lmdeploy` command."""
        words = ["serve", "api_server", str(self.checkpoint), "--backend", self.engine]
        words += ["--session-len", str(self.session_len)]
        if self.hf_overrides:
            words += ["--hf-overrides", json.dumps(self.hf_overrides)]
        if self.drafts:
            words += ["--speculative-algorithm", "deepseek_mtp"]
            words += ["--speculative-num-draft-tokens", str(self.drafts)]
        return words

    @staticmethod
    def server_words(port: int, name: str) -> list[str]:
        """Further ones: where it listens, what the model is called."""
        return ["--server-name", "127.0.0.1", "--server-port", str(port), "--model-name", name]


def plan(
    checkpoint: Path,
    *,
    session_len: int | None = None,
    drafts: int = 0,
    accept_unknown: Iterable[str] = (),
) -> Launch:
    """Settings that serve a checkpoint on a GPU. `drafts`: tokens drafted a step by its own layer.

    Raises ConfigError for what LMDeploy cannot serve, CheckpointError for a checkpoint that is not
    whole.
    """
    config, spec, layout = read(checkpoint, accept_unknown=accept_unknown)
    args: Any = spec.args
    engine, notes = _engine(args)
    if drafts:
        _check_drafts(config, drafts)
    if layout == "stacked":
        if not isinstance(args, DeepseekV2Args | DeepseekV3Args) or getattr(args, "index_topk", 0):
            raise ConfigError(
                f"this {config['model_type']} checkpoint holds all experts of a layer in one "
                "tensor; our module map splits them for deepseek_v2 and deepseek_v3 only"
            )
        if drafts:
            raise ConfigError("LMDeploy's drafting layer knows no expert stacks; leave drafts out")
    if not (checkpoint / "tokenizer.json").is_file():
        raise ConfigError(f"{checkpoint} has no tokenizer.json, which LMDeploy needs")
    overrides = missing_for("lmdeploy", config)
    if isinstance(args, DeepseekV2Args | DeepseekV3Args) and args.pad_token_id is not None:
        # It zeroes the row of the padding token when it loads, which often is the end of a turn.
        overrides["pad_token_id"] = None
    return Launch(
        checkpoint=checkpoint,
        engine=engine,
        session_len=min(args.max_position_embeddings, session_len or 4096),
        hf_overrides=overrides,
        drafts=drafts,
        stacked=layout == "stacked",
        notes=tuple(notes),
    )


def _engine(args: Any) -> tuple[Engine, list[str]]:
    if isinstance(args, V41Args):
        raise ConfigError(
            "LMDeploy 0.18 has no DeepSeek-V4.1, in neither of its engines. Serve it with "
            "deepdraft, or with vLLM on a GPU"
        )
    if isinstance(args, LlamaArgs):
        return "turbomind", []
    notes = []
    if isinstance(args, V4Args):
        ratios = {args.ratio(n) for n in range(args.num_hidden_layers)} - _V4_RATIOS
        if ratios:
            raise ConfigError(
                f"LMDeploy has DeepSeek-V4 with compress_ratios 0, 4 and 128 only, not "
                f"{', '.join(map(str, sorted(ratios)))}"
            )
        notes.append(
            "LMDeploy's DeepSeek-V4 imports flash_mla, deep_gemm, fast_hadamard_transform and "
            "tile_kernels, which its wheel does not bring"
        )
    router = getattr(args, "router", None)
    if (
        isinstance(args, DeepseekV2Args)
        and router is not None
        and router.kept_groups < router.groups
    ):
        notes.append(
            "LMDeploy 0.18 takes the softmax of V2's router after it has zeroed the logits of the "
            "groups left out: experts get other weights than DeepSeek's (`lmdeploy check` shows it)"
        )
    if getattr(args, "rms_norm_eps", 1e-6) != 1e-6 and not isinstance(args, V4Args):
        notes.append("LMDeploy norms the latents with eps 1e-6, whatever rms_norm_eps says")
    return "pytorch", notes


def _check_drafts(config: dict[str, Any], drafts: int) -> None:
    if drafts < 0:
        raise ConfigError(f"drafts must be 0 or more, got {drafts}")
    if config["model_type"] not in _MTP:
        raise ConfigError(f"LMDeploy drafts with no layer of {config['model_type']}")
    if not config.get("num_nextn_predict_layers"):
        raise ConfigError("this checkpoint announces no next-token prediction layer to draft with")


def write_map(folder: Path) -> Path:
    """The module map for stacked experts, with what it imports, into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    source = Path(splitter.__file__).read_text()
    source += f"\n\nSTACKS = {json.dumps(stacks(), indent=4)}\n"
    (folder / "deepdraft_stacks.py").write_text(source)
    made = folder / "module_map.py"
    made.write_text((_PACKAGE / "module_map.py").read_text())
    return made


def write_server(launch: Launch, folder: Path, name: str) -> Path:
    """The module map and a program that serves the checkpoint with it. Raises ConfigError."""
    settings = {
        "checkpoint": str(launch.checkpoint.resolve()),
        "name": name,
        "engine": {"session_len": launch.session_len, "hf_overrides": launch.hf_overrides or None},
    }
    try:
        write_map(folder)
        made = folder / "serve.py"
        made.write_text((_PACKAGE / "serve.py").read_text())
        (folder / "serve.json").write_text(json.dumps(settings, indent=1) + "\n")
    except OSError as error:
        with contextlib.suppress(OSError):  # without it, half of them start nothing
            (folder / "serve.json").unlink()
        raise ConfigError(f"cannot write into {folder}: {error.strerror}") from error
    return made
