"""An entry of a docstring may have several names: `left, right: tokens to either side`."""

import re
from typing import Any

import griffe

NAMES = re.compile(r"^ +\w+(?:, \w+)+(?=: )", re.MULTILINE)


class SharedEntries(griffe.Extension):
    """Keep the names together: after a space the parser would expect a type."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            text = obj.docstring.value
            obj.docstring.value = NAMES.sub(lambda n: n[0].replace(", ", ",\xa0"), text)
