"""`python -m fedkeel` is the `fedkeel` command."""

import sys

from fedkeel.cli import main

if __name__ == "__main__":
    sys.exit(main())
