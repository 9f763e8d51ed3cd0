"""Files: written whole or not at all, and read so that a fault is one error with their name.

There is one reader for each kind of file. Files are data: nothing in one is run, and what a library
advises about a damaged file is not passed on.
"""

import base64
import bz2
import gzip
import hashlib
import io
import json
import lzma
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from omegaconf import OmegaConf

from masks.files import replace

PACKED = {b"\x1f\x8b": gzip.open, b"\xfd7zXZ": lzma.open, b"BZh": bz2.open}  # by their first bytes
BOM = b"\xef\xbb\xbf"


# ---- writing


def write_whole(path: Path, write: Callable[[IO[bytes]], object], option: str) -> None:
    """Write a file beside its place, flushes it to the disk, and renames it.

    option: names the setting that puts the file elsewhere.
    ValueError, with the remedy, if it cannot be written; what was there before stays.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace(path, write)
    except (OSError, RuntimeError) as error:
        reason = error
        while not isinstance(reason, OSError):  # torch.save raises a RuntimeError after it
            if reason.__context__ is None:
                raise
            reason = reason.__context__
        raise ValueError(
            f"cannot write {path} ({reason.strerror}): free some space, or name another place with"
            f" {option}="
        ) from error


def write_text(path: Path, text: str, option: str) -> None:
    """Write a text as `write_whole` does."""
    write_whole(path, lambda file: file.write(text.encode()), option)


def rounded(values: Any) -> Any:
    """Return the values with floats rounded to six digits, as JSON can hold them."""
    if isinstance(values, float):
        return float(f"{values:.6g}")
    if isinstance(values, Mapping):
        return {str(key): rounded(value) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [rounded(value) for value in values]
    return values


def write_json_lines(path: Path, rows: Iterable[Mapping[str, Any]], option: str) -> None:
    """Write each row once, one a line, compressed if the name ends in .gz. The same rows give the
    same bytes.
    """
    lines = (json.dumps(rounded(row), separators=(",", ":")) + "\n" for row in rows)
    data = "".join(dict.fromkeys(lines)).encode()
    data = gzip.compress(data, mtime=0) if path.suffix == ".gz" else data
    write_whole(path, lambda file: file.write(data), option)


def digest(values: Mapping[str, Any]) -> str:
    """Twelve hex digits of the values (JSON-able), in whatever order they come."""
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


# ---- reading


class DamagedFile(ValueError):
    """A file that cannot be read, by its name."""


@contextmanager
def reading(name: object, remedy: str, fault: str = "") -> Iterator[None]:
    """Turn every error inside the block into a `DamagedFile` of one line.

    Args:
        name: of the file, with the option that names it if the error should say so.
        remedy: what to do about it.
        fault: what is wrong, for libraries whose own message would mislead.
    """
    try:
        yield
    except DamagedFile:
        raise
    except Exception as error:  # whatever a library finds in the bytes
        if isinstance(error, OSError) and error.strerror:
            fault = f"cannot be read ({error.strerror})"
        raise DamagedFile(
            f"{name} {fault or f'cannot be read ({reason(error)})'}: {remedy}"
        ) from error


def reason(error: BaseException) -> str:
    """Return the first line of an error's message, or what stands for it."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    line = next(iter(str(error).splitlines()), type(error).__name__)
    return line.partition("; use sys.")[0]  # of numbers with thousands of digits


def read_bytes(path: Path, remedy: str, name: object = None) -> bytes:
    """Return the content of a file, unpacked if it is packed with gzip, xz or bzip2."""
    with reading(name or path, remedy), open(path, "rb") as file:
        start, _ = file.read(6), file.seek(0)
        kind = next((kind for magic, kind in PACKED.items() if start.startswith(magic)), None)
        return file.read() if kind is None else kind(file).read()


def read_text(path: Path, remedy: str, name: object = None) -> str:
    """Return the text of a file in UTF-8, packed or not, without a byte-order mark."""
    data = read_bytes(path, remedy, name)
    with reading(name or path, remedy):
        return data.decode("utf-8-sig")


def table(value: Any) -> dict[str, Any]:
    """Return the value. Raise ValueError unless it is a dict."""
    if not isinstance(value, dict):
        raise ValueError(f"it is a {type(value).__name__}, and not a table")
    return value


def read_json(path: Path, remedy: str) -> dict[str, Any]:
    """Return the dict of a JSON file."""
    text = read_text(path, remedy)
    with reading(path, remedy):
        return table(json.loads(text))


def read_json_lines(path: Path, remedy: str, *, cut: bool = False) -> list[dict[str, Any]]:
    """Return the dicts of a file with one JSON object a line, packed or not.

    cut: allow half a last line, as a killed process leaves it.
    """
    data = read_bytes(path, remedy)
    found, lines = [], data.removeprefix(BOM).split(b"\n")
    for number, line in enumerate(lines, 1):
        with reading(f"{path}, line {number}", remedy):
            try:
                found += [table(json.loads(line))] if line.strip() else []
            except ValueError:
                if not (cut and number == len(lines)):
                    raise
    return found


def read_yaml(path: Path, remedy: str, name: object = None) -> dict[str, Any]:
    """Return the table in a YAML file."""
    text = read_text(path, remedy, name)
    with reading(name or path, remedy):
        found: Any = table(OmegaConf.to_container(OmegaConf.create(text)))
        return {str(key): value for key, value in found.items()}


def read_lines(path: Path, remedy: str) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file and their numbers, without their ends and a byte-order mark.

    Blank lines at the end are left out; elsewhere they are an error.
    """
    blank = 0
    with reading(path, remedy), open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            line = (line.removeprefix(BOM) if number == 1 else line).rstrip(b"\r\n")
            if line.strip() and blank:
                raise DamagedFile(f"{path}, line {blank} is blank: {remedy}")
            blank = blank or (0 if line.strip() else number)
            if not blank:
                yield number, line


def read_arrays(path: Path, remedy: str) -> dict[str, NDArray[Any]]:
    """Return the arrays of an npz file, packed again or not."""
    data = io.BytesIO(read_bytes(path, remedy))
    with reading(path, remedy, "is not an npz file of plain arrays, or it is damaged"):
        with np.load(data, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}


def read_array(path: Path, remedy: str, mmap_mode: Any = None) -> NDArray[Any]:
    """Return the array of an npy file."""
    with reading(path, remedy, "is not a NumPy file of plain values, or it is damaged"):
        found = np.load(path, mmap_mode, allow_pickle=False)
        if not isinstance(found, np.ndarray):
            raise TypeError
        return found


# ---- boolean arrays as short texts, for results in JSON


def pack(values: np.ndarray) -> str:
    """Return a boolean array (n,) as a text of about n / 6 characters, which begins with n."""
    return f"{len(values)}:{base64.b64encode(np.packbits(values).tobytes()).decode()}"


def unpack(text: str) -> np.ndarray:
    """Return the array of a text of `pack`."""
    count, _, bits = text.partition(":")
    packed = np.frombuffer(base64.b64decode(bits), np.uint8)
    return np.unpackbits(packed, count=int(count)).astype(bool)
