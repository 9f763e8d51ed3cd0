"""Boolean arrays as short texts, for results in JSON."""

import base64

import numpy as np


def pack(values: np.ndarray) -> str:
    """Return a boolean array (n,) as a text of about n / 6 characters, which begins with n."""
    return f"{len(values)}:{base64.b64encode(np.packbits(values).tobytes()).decode()}"


def unpack(text: str) -> np.ndarray:
    """Return the array of a text of `pack`."""
    count, _, bits = text.partition(":")
    packed = np.frombuffer(base64.b64decode(bits), np.uint8)
    return np.unpackbits(packed, count=int(count)).astype(bool)
