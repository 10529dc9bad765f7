"""Make what a server and its sites need to trust each other, for a trial: a private certificate
authority, a server certificate and a key for each site. Run again with more sites, it adds theirs.

examples:
  fedkeel certificates --out keys --host fl.example.org --sites north,south,east
  fedkeel certificates --out keys --host 127.0.0.1 --sites a,b
"""

import shlex
from pathlib import Path

from fedkeel.cli.terminal.parsing import Arguments, Parser, whole
from fedkeel.deploy import need_flower
from fedkeel.errors import FedkeelError

HELP = "make a private authority, a server certificate and keys of sites, for a trial"


def add_arguments(parser: Parser) -> None:
    add = parser.add_argument
    add("--out", metavar="DIR", default="certificates", help="where to (default: certificates)")
    add("--sites", metavar="NAMES", required=True, help="names of the sites, separated by commas")
    hosts = "names and addresses by which sites reach the server (default: localhost,127.0.0.1)"
    add("--host", metavar="NAMES", default="localhost,127.0.0.1", help=hosts)
    days = "how long they are valid (default: 365)"
    add("--days", type=whole("days", 1), metavar="N", default=365, help=days)


def run(arguments: Arguments) -> int:
    need_flower()

    from fedkeel.deploy.certificates import make

    sites, hosts = read_names(arguments.sites, "sites"), read_names(arguments.host, "host")
    make(Path(arguments.out), sites, hosts, days=arguments.days)
    out = shlex.quote(arguments.out)
    print(f"server: fedkeel server --config FILE --certificates {out}/server")
    for name in sites:
        own = shlex.quote(f"{arguments.out}/sites/{name}")
        print(f"site {name}: fedkeel join {hosts[0]} --data DIR --certificates {own}")
    print(f"Give each site its own folder and nothing else; keep {out}/authority.key away from all of them.")
    return 0


def read_names(text: str, what: str) -> list[str]:
    found = [name.strip() for name in text.split(",") if name.strip()]
    if not found:
        raise FedkeelError(f"'{what}' is '{text}': give at least one name.")
    if twice := next((name for name in found if found.count(name) > 1), ""):
        raise FedkeelError(f"'{what}' has '{twice}' twice: give each once.")
    return found
