"""Run a federation over a network: wait for the sites, agree with them, train, write the model.
The same command again continues where it was stopped.

examples:
  fedkeel server --config fed.toml --certificates keys/server
  fedkeel server --method hbn --rounds 50 --data 'folder(size=64)' --certificates keys/server
  fedkeel server --config fed.toml --insecure --sites 2          a trial on this machine alone
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from fedkeel.cli.show import show_run
from fedkeel.cli.terminal.interrupts import interruptible
from fedkeel.cli.terminal.parsing import Arguments, Parser, given_options, whole
from fedkeel.config import RAY_OPTIONS, from_dict, option_names
from fedkeel.deploy import need_flower
from fedkeel.errors import FedkeelError

if TYPE_CHECKING:
    from fedkeel.deploy.certificates import ServerFiles, SiteFiles

    Files = TypeVar("Files", ServerFiles, SiteFiles)

HELP = "run a federation whose sites are other machines"
PORT = 9092
WITHOUT = (
    *("data", "partition", "executor", "workers", "compile", "record", "record_every"),
    *RAY_OPTIONS,
)


def add_arguments(parser: Parser) -> None:
    parser.add_shared("--config")
    add = parser.add_argument
    add("--data", metavar="TEXT", help="how sites read their images (default: folder(size=32))")
    add("--host", metavar="ADDRESS", default="", help="where to listen (default: every address)")
    port, sites = f"the one port that sites use (default: {PORT})", "sites to wait for (default: one for each key)"
    wait = "then begin with 'min_clients' or more (default: 600)"
    add("--port", type=whole("port", 1), metavar="N", default=PORT, help=port)
    add("--sites", type=whole("sites", 0), metavar="N", default=0, help=sites)
    add("--wait", type=whole("wait", 0), metavar="SECONDS", default=600, help=wait)
    trust = parser.add_argument_group("trust").add_argument
    trust("--certificates", metavar="DIR", help="the folder 'server' that 'fedkeel certificates' made")
    trust("--ca", metavar="FILE", help="certificate of the authority, in PEM")
    trust("--certificate", metavar="FILE", help="certificate of this server, in PEM")
    trust("--key", metavar="FILE", help="private key of this server, in PEM")
    trust("--keys", metavar="DIR", help="public keys of the sites, NAME.pub, in OpenSSH's format")
    trust("--insecure", action="store_true", help="no TLS and no keys, on this machine alone")
    out = "the run directory (default: runs/ and the name of the configuration file)"
    add("--out", metavar="DIR", help=out)
    parser.add_shared("--json", "--quiet", "--import")
    parser.add_options({*option_names()}.difference(WITHOUT))


def run(arguments: Arguments) -> int:
    config = from_dict({"data": "folder", **given_options(arguments)})
    out = Path(arguments.out or Path("runs") / (Path(arguments.config).stem if arguments.config else "federation"))
    need_flower()

    from fedkeel.deploy.certificates import ServerFiles
    from fedkeel.deploy.deployment import ServerOptions, serve
    from fedkeel.runs.progress import RunProgress

    paths = {"ca": arguments.ca, "certificate": arguments.certificate, "key": arguments.key, "sites": arguments.keys}
    files = trusted_files(arguments, ServerFiles, "certificates/server", **paths)
    options = ServerOptions(files, arguments.host, arguments.port, arguments.sites, arguments.wait)
    with interruptible(), RunProgress(quiet=arguments.quiet) as progress:
        result = serve(config, out, options, progress)
    return show_run(result, as_json=arguments.json)


def trusted_files(arguments: Arguments, kind: type[Files], folder: str, **paths: str | None) -> Files | None:
    """Certificates and keys: those of --certificates, or of `folder`, but for `paths`. With --insecure, none."""
    given = {name: Path(path) for name, path in paths.items() if path}
    if not arguments.insecure:
        return replace(kind.of(Path(arguments.certificates or folder)), **given)
    if arguments.certificates or given:
        raise FedkeelError("'--insecure' is given together with certificates: keep one.")
    return None
