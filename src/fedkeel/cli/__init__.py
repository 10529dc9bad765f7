"""The `fedkeel` command. Each file of this folder is a command of that name, found by itself:

    HELP                    its line in `fedkeel --help`
    USAGE                   what follows its name, unless that is "[options]"
    add_arguments(parser)   its flags
    run(arguments) -> int   what it does, and its exit code; none where `add_arguments` adds commands of its own

Its docstring is what `fedkeel NAME --help` shows. What commands share is in `terminal/`. A command's module imports
nothing that needs torch before `run`, so that help comes at once.
"""

import atexit
import errno
import gc
import importlib
import logging
import os
import pkgutil
import sys
from collections.abc import Sequence

import fedkeel
from fedkeel.cli.terminal.interrupts import EXIT_CODE
from fedkeel.cli.terminal.parsing import Parser
from fedkeel.core import imports
from fedkeel.core.naming import visible
from fedkeel.core.readable import shell
from fedkeel.errors import FedkeelError, shortages_explained
from fedkeel.stopping import Stopped

ABOUT = """Federated learning that stays upright when clients' data shift.

Train one model over clients whose data look different, and compare the methods for it.
'fedkeel COMMAND --help' explains a command."""
EXAMPLES = """examples:
  fedkeel demo                                    compare the methods on built-in digits
  fedkeel advise --data digits-shift              which methods to try, and why
  fedkeel run --method fedbn --rounds 20          train one federation
  fedkeel compare fedavg fedbn gn --seeds 3       train several, get a table
  fedkeel reproduce hbn/table1                    a table of a paper, ours beside it
  fedkeel run --data folder --root ./images       your own images: ./images/DOMAIN/CLASS/*.png
  fedkeel report runs/demo                        the results as one HTML page
  fedkeel list methods                            what there is to choose from"""
# The order in which a person meets them; others follow by name.
ORDER = (
    *("advise", "run", "compare", "tune", "resume", "demo", "reproduce", "show", "data", "list"),
    *("report", "watch", "predict", "evaluate", "calibrate", "export", "server", "join"),
)


def build_parser(given: Sequence[str] | None = None) -> Parser:
    """For these words, or for any: a command that is not among them has its line in the help and no flags."""
    parser = Parser(prog="fedkeel", description=ABOUT, epilog=EXAMPLES)
    parser.add_argument("--version", action="version", version=f"fedkeel {fedkeel.__version__}")
    parser.begin_commands(required=False)
    names = {module.name for module in pkgutil.iter_modules(__path__) if not module.ispkg}
    for name in (*(name for name in ORDER if name in names), *sorted(names.difference(ORDER))):
        module = importlib.import_module(f"{__name__}.{name}")
        texts = {"help": module.HELP, "page": module.__doc__, "usage": getattr(module, "USAGE", "[options]")}
        command = parser.add_command(name, getattr(module, "run", None), **texts)
        if given is None or name in given:
            module.add_arguments(command)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code: 0 done, 1 partly failed, 2 bad input, 130 stopped."""
    given = sys.argv[1:] if arguments is None else [*arguments]
    if arguments is None:  # this process is the command's own
        gc.set_threshold(100_000)  # with Python's 700, looking for garbage is a tenth of the time that imports take
        atexit.register(gc.freeze)  # or Python, about to exit, would look through all of torch once more
    _log_to_stderr()
    try:
        parser = build_parser(given)
        parsed = parser.parse_args(given)
        if not hasattr(parsed, "run"):
            parser.print_help()
            return 0
        parsed.continue_with = shell(["fedkeel", *given])  # after Ctrl-C, unless the command knows better
        for code in getattr(parsed, "imports", ()):
            imports.load(code)
        with shortages_explained():
            code = int(parsed.run(parsed))
        sys.stdout.flush()
        return code
    except SystemExit as request:  # argparse leaves so after --help and --version
        return int(request.code or 0)
    except FedkeelError as error:
        return _fail(str(error))
    except BrokenPipeError:
        # The reader of a pipe left, as `head` does. Python must not find that out again when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Stopped:
        print(f"fedkeel: stopped; continue with: {parsed.continue_with}", file=sys.stderr)
        return EXIT_CODE
    except KeyboardInterrupt:
        return EXIT_CODE
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EPERM, errno.EDQUOT):
            raise
        return _fail(f"'{error.filename}' cannot be used: {error.strerror}; make room or choose another directory.")


def _fail(sentence: str) -> int:
    print(f"fedkeel: {visible(sentence)}", file=sys.stderr)
    return 2


def _log_to_stderr() -> None:
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
