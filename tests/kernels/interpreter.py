"""Triton's interpreter, made to work with the installed numpy. conftest imports it first."""

import os

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

import triton.language as tl  # noqa: E402
from triton.runtime import interpreter  # noqa: E402

_patch_tensor, _patch_lang = interpreter._patch_lang_tensor, interpreter._patch_lang
_patched = {}


def _patch_lang_tensor(tensor, scope):
    """Loop bounds are arrays of one element, which numpy 2.4 no longer turns into an int."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def _patch_lang_once(fn):
    """The language is replaced by its interpreted twin at the first launch and stays so; doing it
    again at every call of a device function takes a quarter of the time."""
    modules = frozenset(n for n, m in fn.__globals__.items() if m is tl or m is tl.core)
    if modules not in _patched:
        _patched[modules] = _patch_lang(fn)
    return interpreter._LangPatchScope()


interpreter._patch_lang_tensor = _patch_lang_tensor
interpreter._patch_lang = _patch_lang_once
