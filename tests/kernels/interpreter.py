"""Triton's interpreter, made to work with the installed numpy. conftest imports it first."""

import os

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

from triton.runtime import interpreter  # noqa: E402

_patch = interpreter._patch_lang_tensor


def _patch_lang_tensor(tensor, scope):
    """Loop bounds are arrays of one element, which numpy 2.4 no longer turns into an int."""
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patch_lang_tensor
