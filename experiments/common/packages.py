"""Packages that are optional: peers in measurements."""

import importlib


def why_missing(name: str, install: str, *modules: str) -> str | None:
    """Why the modules of a package cannot be imported, with the remedy, or None."""
    try:
        for module in modules:
            importlib.import_module(module)
    except Exception as error:  # its libraries fail in many ways where a part of them is missing
        return f"needs {name} ({type(error).__name__}: {error}): {install}"
    return None
