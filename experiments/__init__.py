"""Programs that use the library: run from a clone, as ``python -m experiments.<name>``."""

import os
import signal
import sys
from types import FrameType


def interrupted(number: int, frame: FrameType | None) -> None:
    """End the process in one line. `program` gives Ctrl-C its usual effect once its work begins.

    A KeyboardInterrupt in the middle of an import is a long trace, and some imports swallow it.
    """
    os.write(2, b"interrupted\n")
    os._exit(130)


PROGRAM = sys.argv[0] == "-m" or os.path.basename(sys.argv[0]).startswith("sparseflash-")
if PROGRAM and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, interrupted)
