"""What a model is made of, as data: one frozen record of checked sizes per family.

Owns: the records, and what follows from them by arithmetic (roles of layers, rotary factors).
Knows nothing of: files, tensors, torch.
"""

from deepdraft.arch.decoder import DecoderArgs, Rope, Router, StateKind
from deepdraft.arch.llama import LlamaArgs
from deepdraft.arch.mla import DeepseekV2Args, DeepseekV3Args, MlaArgs
from deepdraft.arch.v4 import V4Args
from deepdraft.arch.v41 import LayerRole, V41Args

ModelArgs = V41Args | LlamaArgs | DeepseekV2Args | DeepseekV3Args | V4Args

__all__ = [
    "DecoderArgs",
    "DeepseekV2Args",
    "DeepseekV3Args",
    "LayerRole",
    "LlamaArgs",
    "MlaArgs",
    "ModelArgs",
    "Rope",
    "Router",
    "StateKind",
    "V4Args",
    "V41Args",
]
