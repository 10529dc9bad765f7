"""Be a site: connect to the server and train on the images in DIR/CLASS/*.png when asked, until
stopped. The images stay here. What the method remembers of this site stays in --state.

examples:
  fedkeel join fl.example.org --data /data/scans --certificates keys/sites/north
  fedkeel join fl.example.org --data /data/scans --certificates keys/sites/north --group '(patient\\d+)_'
  fedkeel join fl.example.org --data /data/scans --import my_methods.py      code that you have read
"""

import argparse
import logging
import sys
from pathlib import Path

from fedkeel.cli.server import PORT, trusted_files
from fedkeel.cli.terminal.interrupts import interruptible
from fedkeel.cli.terminal.parsing import Arguments, Parser
from fedkeel.core.naming import file_name
from fedkeel.deploy import need_flower
from fedkeel.files import state_folder
from fedkeel.options import checked
from fedkeel.stopping import Stopped

HELP = "be a site of a federation: train on the images in a folder, which stay here"
USAGE = "HOST[:PORT] --data DIR [options]"


class ShowPolicy(argparse.Action):
    """Prints the default policy of a site and ends, as --help does."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from fedkeel.deploy.policy import Policy

        print(Policy().to_toml(), end="")
        parser.exit()


def add_arguments(parser: Parser) -> None:
    add = parser.add_argument
    add("address", metavar="HOST[:PORT]", help=f"the server (default port: {PORT})")
    add("--data", metavar="PATH", required=True, help="the folder with a folder for each class, or a table")
    parser.add_shared("--tolerate", "--no-cache")
    group = "what names the patient in a file's name, in brackets, like '(patient\\d+)_': none is in two splits"
    add("--group", metavar="PATTERN", help=group)
    add("--bits", metavar="N", type=int, help="that 16-bit grey images use, such as 12 (default: 16)")
    add("--name", metavar="NAME", help="of this site (default: as its key, else as the folder is called)")
    add("--state", metavar="DIR", help="for its memory and logs (default: ~/.local/state/fedkeel/NAME)")
    add("--device", metavar="TEXT", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")
    own = "after the last round, keep the model with this site's own statistics in --state: see 'Calibration'"
    add("--calibrate", action="store_true", help=own)
    add("--quiet", action="store_true", help="only warnings")
    parser.add_shared("--import")
    trust = parser.add_argument_group("trust").add_argument
    trust("--accept", metavar="FILE", help="what the server may ask for (default: see --show-policy)")
    trust("--show-policy", action=ShowPolicy, nargs=0, help="print the default policy, a TOML file, and exit")
    trust("--certificates", metavar="DIR", help="this site's folder that 'fedkeel certificates' made")
    trust("--ca", metavar="FILE", help="certificate of the authority, in PEM")
    trust("--key", metavar="FILE", help="private key of this site, in OpenSSH's format")
    trust("--insecure", action="store_true", help="no TLS and no key, on this machine alone")


def run(arguments: Arguments) -> int:
    need_flower()

    from fedkeel.data.formats.images import Bits
    from fedkeel.data.site import class_folders, site_reader
    from fedkeel.deploy.certificates import SiteFiles
    from fedkeel.deploy.deployment import join
    from fedkeel.deploy.policy import Policy
    from fedkeel.deploy.site import Site, own_folder
    from fedkeel.deploy.site_models import SiteModels

    folder = Path(arguments.data).expanduser()
    policy = Policy.read(Path(arguments.accept).expanduser()) if arguments.accept else Policy()
    files = trusted_files(arguments, SiteFiles, "certificates", ca=arguments.ca, key=arguments.key)
    name = arguments.name or Path(arguments.certificates or folder).resolve().name
    if not folder.is_file():
        class_folders(folder)
    given = {"group": arguments.group, "tolerate": arguments.tolerate}
    given["bits"] = checked(arguments.bits, Bits | None, "--bits")
    own = {option: value for option, value in given.items() if value is not None}
    # What is wrong with its images is told here and not to the server: names of files may be names of patients.
    if not folder.is_file():  # of a table the server says what its columns are
        reader = site_reader(folder, name, **own)
        reader.split(reader.scan(folder).domains)
    read = own_folder(folder, name, **own)
    state = Path(arguments.state) if arguments.state else state_folder() / file_name(name)
    models = SiteModels(state / "models") if arguments.calibrate else None
    site = Site(read, state / "memory", name, arguments.device, policy=policy, models=models)
    if not arguments.quiet:
        logging.getLogger("fedkeel").setLevel(logging.INFO)
        print(f"fedkeel: the site '{name}' joins {arguments.address}; stop it with Ctrl-C", file=sys.stderr)
    try:
        with interruptible():
            join(arguments.address, site, state, files=files)
    except Stopped:
        print(f"fedkeel: the site '{name}' left", file=sys.stderr)
    return 0
