"""Compiles for the Triton that this process finds: one JSON line for each kernel.

    python -m experiments.bench.compile_matrix.child < request

The request, JSON: {"target": "sm_90a", "calls": [...], "known": [variants not to compile again]}.
The Triton is the first on PYTHONPATH. TRITON_INTERPRET must not be set.
"""

import json
import sys
from typing import Any, TextIO

from experiments.bench.compile_matrix.calls import Call
from experiments.bench.compile_matrix.chips import CHIPS
from experiments.bench.compile_matrix.offline import compiled


def main(request: dict[str, Any], out: TextIO) -> None:
    known = set(request["known"])
    for fields in request["calls"]:
        call = Call(**fields)
        try:
            kernels = list(compiled(call, CHIPS[request["target"]], known))
            lines = [{"kernel": k.name, "variant": k.variant, **k.report()} for k in kernels]
        except Exception as error:  # one call that does not compile must not end the others
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            lines = [{"kernel": "", "variant": "", "status": f"failed: {reason[-300:]}"}]
        known |= {line["variant"] for line in lines}
        for line in lines:
            print(json.dumps(line | {"label": call.label, "backend": call.backend}), file=out)
        print(json.dumps({"done": call.label}), file=out, flush=True)


if __name__ == "__main__":
    lines, sys.stdout = sys.stdout, sys.stderr  # what compilers print is no part of the answer
    main(json.load(sys.stdin), lines)
