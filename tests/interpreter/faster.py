"""Triton's interpreter without what it does again and again for nothing."""

from dataclasses import replace
from functools import cache
from inspect import getmembers

from triton import language as tl
from triton.language.core import is_builtin
from triton.runtime import interpreter


def hasten() -> None:
    """Every result stays the same.

    It looks for the builtins of triton.language and replaces them at every call of a function,
    not only at every launch, makes a table of dtypes and checks the shape for every array, and
    computes whether integers overflow, for an assertion that it makes in debug mode alone.
    """
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter._patch_builtin = _patch_builtin
    interpreter._patch_lang = _patch_lang
    interpreter._LangPatchScope.restore = _restore
    interpreter._get_np_dtype = _np_dtype
    tl.block_type.__init__ = _init_block_type
    tl.tensor.__init__ = _init_tensor


@cache
def _builtins(owner: object) -> tuple[str, ...]:
    return tuple(name for name, member in getmembers(owner) if is_builtin(member))


def _patch_builtin(owner, builder, *scope) -> None:
    for name in _builtins(owner):
        if is_builtin(member := getattr(owner, name)):
            interpreter._patch_attr(owner, name, member, builder, *scope)


_patch_all = interpreter._patch_lang
_restore_all = interpreter._LangPatchScope.restore
_patched = set()  # modules of the functions of this launch, by their globals


def _patch_lang(fn):
    """Called by a launch, which gets what restores, and by functions that it calls."""
    if id(fn.__globals__) in _patched:
        return None
    scope = _patch_all(fn)
    _patched.add(id(fn.__globals__))
    return scope


def _restore(scope) -> None:
    _patched.clear()
    _restore_all(scope)


_table_of_dtypes = interpreter._get_np_dtype
_dtypes = {}  # by the names of scalar types


def _np_dtype(dtype):
    scalar = dtype.scalar
    if scalar.is_ptr():
        return _table_of_dtypes(scalar)
    if scalar.name not in _dtypes:
        _dtypes[scalar.name] = _table_of_dtypes(scalar)
    return _dtypes[scalar.name]


_check_block_type, _check_tensor = tl.block_type.__init__, tl.tensor.__init__
_block_types = {}  # their attributes, by element type and shape


def _init_block_type(self, element_ty, shape) -> None:
    sizes = [getattr(n, "value", n) for n in shape]
    # each launch has pointer types of its own; 2.0 is as good a key as 2
    if element_ty.is_ptr() or any(type(n) is not int for n in sizes):
        return _check_block_type(self, element_ty, shape)
    if (key := (element_ty.name, *sizes)) not in _block_types:
        _check_block_type(self, element_ty, shape)
        _block_types[key] = self.__dict__
    self.__dict__.update(_block_types[key])


def _init_tensor(self, handle, type) -> None:
    known = type.__dict__.get("in_tensors")
    if known is None:
        _check_tensor(self, handle, type)
        own = {"handle", "type"}
        known = {name: value for name, value in self.__dict__.items() if name not in own}
        type.in_tensors = known
    else:
        self.handle, self.type = handle, type
        self.__dict__.update(known)
