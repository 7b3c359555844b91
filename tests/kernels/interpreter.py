"""Triton's interpreter, made to work with the installed numpy. conftest imports it first."""

import dataclasses
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

# Every operation makes a block's type and a tensor. Each built its shape as Triton's own tuple,
# which has a type with a name, and each look at a numpy type made a table of all: with the overflow
# checks below that took four fifths of the time.
_find_np_dtype = interpreter._get_np_dtype
_make_block_type, _make_tensor = tl.block_type.__init__, tl.tensor.__init__
_np_dtypes, _block_types, _shapes = {}, {}, {}


def _get_np_dtype(of):
    if of.name not in _np_dtypes:
        _np_dtypes[of.name] = _find_np_dtype(of)
    return _np_dtypes[of.name]


def _plain(value):
    return value.value if isinstance(value, tl.constexpr) else value


def _init_block_type(self, element_ty, shape):
    key = (element_ty.name, getattr(element_ty, "address_space", 0), *map(_plain, _plain(shape)))
    if key not in _block_types:
        _make_block_type(self, element_ty, shape)
        _block_types[key] = vars(self).copy()
    vars(self).update(_block_types[key])


def _init_tensor(self, handle, type):
    sizes = type.shape if type.is_block() else ()
    key = id(sizes)
    if key not in _shapes:
        _make_tensor(self, handle, type)
        _shapes[key] = self.shape, self.numel, sizes
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel, _ = _shapes[key]


if DEVICE == "cpu":
    builder = interpreter.interpreter_builder
    # Looked for at every operation, and told in Triton's debug mode only.
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    interpreter._get_np_dtype = _get_np_dtype
    tl.block_type.__init__, tl.tensor.__init__ = _init_block_type, _init_tensor
