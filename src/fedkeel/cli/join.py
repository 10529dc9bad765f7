"""Be a site: connect to the server with the kit that it made, and train on the images in
DIR/CLASS/*.png when asked, until stopped. The images stay here. What the method remembers of this
site stays in --state.

examples:
  fedkeel join kits/north --data /data/scans
  fedkeel join kits/north --data /data/scans --group '(patient\\d+)_' --calibrate
  fedkeel join kits/north --data /data/scans --import my_methods.py      code that you have read
"""

import argparse
import sys
from pathlib import Path

from fedkeel.cli.terminal.interrupts import interruptible
from fedkeel.cli.terminal.parsing import Arguments, Parser
from fedkeel.core.naming import file_name
from fedkeel.deploy import need_nvflare
from fedkeel.files import state_folder
from fedkeel.options import checked
from fedkeel.stopping import Stopped

HELP = "be a site of a federation: train on the images in a folder, which stay here"
USAGE = "KIT --data DIR [options]"


class ShowPolicy(argparse.Action):
    """Prints the default policy of a site and ends, as --help does."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from fedkeel.deploy.policy import Policy

        print(Policy().to_toml(), end="")
        parser.exit()


def add_arguments(parser: Parser) -> None:
    add = parser.add_argument
    add("kit", metavar="KIT", help="this site's folder that 'fedkeel server' made")
    add("--data", metavar="PATH", required=True, help="the folder with a folder for each class, or a table")
    parser.add_shared("--tolerate")
    group = "what names the patient in a file's name, in brackets, like '(patient\\d+)_': none is in two splits"
    add("--group", metavar="PATTERN", help=group)
    add("--bits", metavar="N", type=int, help="that 16-bit grey images use, such as 12 (default: 16)")
    add("--state", metavar="DIR", help="for its memory and logs (default: ~/.local/state/fedkeel/NAME)")
    add("--device", metavar="TEXT", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")
    own = "after the last round, keep the model with this site's own statistics in --state: see 'Calibration'"
    add("--calibrate", action="store_true", help=own)
    add("--quiet", action="store_true", help="only warnings")
    parser.add_shared("--import")
    trust = parser.add_argument_group("trust").add_argument
    trust("--accept", metavar="FILE", help="what the server may ask for (default: see --show-policy)")
    trust("--show-policy", action=ShowPolicy, nargs=0, help="print the default policy, a TOML file, and exit")


def run(arguments: Arguments) -> int:
    need_nvflare()

    from fedkeel.data.formats.images import Bits
    from fedkeel.data.site import site_reader
    from fedkeel.deploy.jobs import join
    from fedkeel.deploy.kits import name_of
    from fedkeel.deploy.policy import Policy

    kit, folder = Path(arguments.kit).resolve(), Path(arguments.data).expanduser().absolute()
    name = name_of(kit)
    if arguments.accept:
        Policy.read(Path(arguments.accept).expanduser())
    given = {"group": arguments.group, "tolerate": arguments.tolerate}
    given["bits"] = checked(arguments.bits, Bits | None, "--bits")
    own = {option: value for option, value in given.items() if value is not None}
    # What is wrong with its images is told here and not to the server: names of files may be names of patients.
    if not folder.is_file():  # of a table the server says what its columns are
        reader = site_reader(folder, name, **own)
        reader.split(reader.scan(reader.folder()).domains)
    state = Path(arguments.state) if arguments.state else state_folder() / file_name(name)
    settings = {"name": name, "data": str(folder), "own": own, "state": str(state.absolute())}
    settings |= {"device": arguments.device, "calibrate": arguments.calibrate}
    settings["accept"] = str(Path(arguments.accept).expanduser().absolute()) if arguments.accept else ""
    settings["imports"] = [str(Path(one).expanduser().absolute()) for one in arguments.imports]

    def say(text: str) -> None:
        if not arguments.quiet:
            print(f"fedkeel: {text}", file=sys.stderr, flush=True)

    say(f"the site '{name}' joins; stop it with Ctrl-C")
    try:
        with interruptible():
            join(kit, settings, say)
    except Stopped:
        say(f"the site '{name}' left")
    return 0
