"""Fedkeel on a machine whose clock is off: `FEDKEEL_SHIFT=-400 python -m tests.deploy.shifted join ...`."""

from __future__ import annotations

import os
import sys
import time

usual, shift = time.time, float(os.environ["FEDKEEL_SHIFT"])
time.time = lambda: usual() + shift

from fedkeel.cli import main  # noqa: E402 - whatever it imports sees that clock

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
