"""Triton's interpreter without what it does again and again for nothing."""

from dataclasses import replace
from functools import cache
from inspect import getmembers

from triton.language.core import is_builtin
from triton.runtime import interpreter


def hasten() -> None:
    """Every result stays the same.

    It looks for the builtins of triton.language and replaces them at every call of a function,
    not only at every launch, makes a table of dtypes for every array, and computes whether integers
    overflow, for an assertion that it makes in debug mode alone.
    """
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter._patch_builtin = _patch_builtin
    interpreter._patch_lang = _patch_lang
    interpreter._LangPatchScope.restore = _restore
    interpreter._get_np_dtype = _np_dtype


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
