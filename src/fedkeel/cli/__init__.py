"""The `fedkeel` command. Nothing here waits for torch until a command needs it."""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections.abc import Sequence

import fedkeel
from fedkeel.cli import (
    analysing,
    benchmarking,
    exporting,
    federation,
    listing,
    looking,
    reporting,
    reproducing,
    training,
)
from fedkeel.cli.parsing import Parser, examples
from fedkeel.core.naming import visible
from fedkeel.errors import FedkeelError, shortages_explained

ABOUT = """Federated learning that stays upright when clients' data shift.

Train one model over clients whose data look different, and compare the methods for it.
'fedkeel COMMAND --help' explains a command."""


def build_parser() -> Parser:
    parser = Parser(
        prog="fedkeel",
        description=ABOUT,
        epilog=examples(
            [
                "fedkeel demo                                    compare the methods on built-in digits",
                "fedkeel run --method fedbn --rounds 20          train one federation",
                "fedkeel compare fedavg fedbn gn --seeds 3       train several, get a table",
                "fedkeel reproduce hbn/table1 --root ./data      a table of a paper, ours beside it",
                "fedkeel run --data folder --root ./images       your own images: ./images/DOMAIN/CLASS/*.png",
                "fedkeel report runs/demo                        the results as one HTML page",
                "fedkeel list methods                            what there is to choose from",
            ]
        ),
    )
    parser.add_argument("--version", action="version", version=f"fedkeel {fedkeel.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    training.add_commands(commands)
    reproducing.add_commands(commands)
    looking.add_commands(commands)
    listing.add_commands(commands)
    analysing.add_commands(commands)
    reporting.add_commands(commands)
    benchmarking.add_commands(commands)
    exporting.add_commands(commands)
    federation.add_commands(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code: 0 done, 1 partly failed, 2 bad input, 130 stopped."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    notes_to_stderr()
    try:
        parser = build_parser()
        parsed = parser.parse_args(given)
        if parsed.command is None:
            parser.print_help()
            return 0
        parsed.typed = given
        with shortages_explained():
            code = int(parsed.act(parsed))
        sys.stdout.flush()
        return code
    except SystemExit as request:  # argparse leaves so after --help and --version
        return int(request.code or 0)
    except FedkeelError as error:
        return complain(str(error))
    except BrokenPipeError:
        # The reader of a pipe left, as `head` does. Python must not find that out again when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EPERM, errno.EDQUOT):
            raise
        return complain(f"'{error.filename}' cannot be used: {error.strerror}; make room or choose another directory.")


def complain(sentence: str) -> int:
    print(f"fedkeel: {visible(sentence)}", file=sys.stderr)
    return 2


def notes_to_stderr() -> None:
    """What the library logs, one sentence each, to wherever stderr goes at that moment."""

    class Notes(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            # A sentence is one line, whatever names are in it; the traceback of a bug has its own.
            lines = self.format(record).split("\n") if record.exc_info else [record.getMessage()]
            print("fedkeel: " + "\n".join(map(visible, lines)), file=sys.stderr)

    log = logging.getLogger("fedkeel")
    log.handlers = [Notes()]
    # pytest and programs that embed the command have handlers of their own above.
    log.propagate = False
