"""Run a federation over a network: wait for the sites, agree with them, train, write the model.
The first start makes a kit for each site, and says what to carry where. The same command again
continues where it was stopped.

examples:
  fedkeel server --config fed.toml --sites north,south,west --host fl.example.org
  fedkeel server --config fed.toml --sites north,south,west,east --host fl.example.org      one more site
  fedkeel server --config fed.toml --sites north,south             a trial on this machine alone
"""

from __future__ import annotations

import sys
from pathlib import Path

from fedkeel.cli.show import show_run
from fedkeel.cli.terminal.interrupts import interruptible
from fedkeel.cli.terminal.parsing import Arguments, Parser, given_options, whole
from fedkeel.config import RAY_OPTIONS, from_dict, option_names
from fedkeel.deploy import need_nvflare
from fedkeel.spec import names

HELP = "run a federation whose sites are other machines"
PORT = 8002
WITHOUT = (
    *("data", "partition", "executor", "workers", "record", "record_every"),
    *RAY_OPTIONS,
)


def add_arguments(parser: Parser) -> None:
    parser.add_shared("--config")
    add = parser.add_argument
    add("--data", metavar="TEXT", help="how sites read their images (default: folder(size=32))")
    add("--sites", metavar="NAMES", required=True, help="the sites, separated by commas")
    add("--host", metavar="NAME", default="localhost", help="by which sites reach this machine (default: localhost)")
    add("--port", type=whole("port", 1), metavar="N", default=PORT, help=f"the one port (default: {PORT})")
    add("--kits", metavar="DIR", default="kits", help="for the kits of the server and the sites (default: kits)")
    wait = "for all sites, then begin with 'min_clients' or more (default: 600)"
    add("--wait", type=whole("wait", 0), metavar="SECONDS", default=600, help=wait)
    out = "the run directory (default: runs/ and the name of the configuration file)"
    add("--out", metavar="DIR", help=out)
    parser.add_shared("--json", "--quiet", "--import")
    parser.add_options({*option_names()}.difference(WITHOUT))


def run(arguments: Arguments) -> int:
    config = from_dict({"data": "folder", **given_options(arguments)})
    out = Path(arguments.out or Path("runs") / (Path(arguments.config).stem if arguments.config else "federation"))
    need_nvflare()

    from fedkeel.deploy import kits
    from fedkeel.deploy.jobs import Federation

    def say(text: str) -> None:
        if not arguments.quiet:
            print(f"fedkeel: {text}", file=sys.stderr, flush=True)

    folder, sites = Path(arguments.kits), names(arguments.sites)
    imports = [str(Path(one).expanduser().absolute()) for one in arguments.imports]
    federation = Federation(config, out, folder, sites, arguments.wait, say, imports)
    federation.check()
    for name in kits.make(folder, arguments.host, arguments.port, sites):
        kit = folder / "sites" / name
        say(f"carry '{kit}' to the site {name}, and start there: fedkeel join {name} --data DIR")
    with interruptible():
        result = federation.run()
    return show_run(result, as_json=arguments.json)
