"""The commands of a real federation: certificates, server, join, status."""

from __future__ import annotations

import argparse
import json
import logging
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from fedkeel.cli.interrupts import interruptible
from fedkeel.cli.parsing import add_options, examples, given_options
from fedkeel.cli.training import add_place, show_result, stopped
from fedkeel.config import from_dict
from fedkeel.core.naming import file_name
from fedkeel.errors import FedkeelError
from fedkeel.stopping import Stopped

PORT = 9092
WITHOUT = ("data", "partition", "executor", "workers", "profile", "compile", "record", "record_every")


def add_commands(commands: Any) -> None:
    certificates = commands.add_parser(
        "certificates",
        help="make a private authority, a server certificate and keys of sites, for a trial",
        description="Make what a server and its sites need to trust each other, for a trial: a private certificate\n"
        "authority, a server certificate and a key for each site. Run again with more sites, it adds theirs.",
        epilog=examples(
            [
                "fedkeel certificates --out keys --host fl.example.org --sites north,south,east",
                "fedkeel certificates --out keys --host 127.0.0.1 --sites a,b",
            ]
        ),
    )
    certificates.add_argument("--out", metavar="DIR", default="certificates", help="where to (default: certificates)")
    certificates.add_argument("--sites", metavar="NAMES", required=True, help="names of the sites, separated by commas")
    certificates.add_argument(
        "--host", metavar="NAMES", default="localhost,127.0.0.1",
        help="names and addresses by which sites reach the server (default: localhost,127.0.0.1)",
    )  # fmt: skip
    certificates.add_argument("--days", metavar="N", default="365", help="how long they are valid (default: 365)")
    certificates.set_defaults(act=make_certificates)

    server = commands.add_parser(
        "server",
        help="run a federation whose sites are other machines",
        description="Run a federation over a network: wait for the sites, agree with them, train, write the model.\n"
        "The same command again continues where it was stopped.",
        epilog=examples(
            [
                "fedkeel server --config fed.toml --certificates keys/server",
                "fedkeel server --method hbn --rounds 50 --data 'folder(size=64)' --certificates keys/server",
                "fedkeel server --config fed.toml --insecure --sites 2          a trial on this machine alone",
            ]
        ),
    )
    server.add_argument("--config", metavar="FILE", help="read options from a TOML file; flags come on top")
    server.add_argument("--data", metavar="TEXT", help="how sites read their images (default: folder(size=32))")
    server.add_argument("--host", metavar="ADDRESS", default="", help="where to listen (default: every address)")
    server.add_argument("--port", metavar="N", default=str(PORT), help=f"the one port that sites use (default: {PORT})")
    server.add_argument("--sites", metavar="N", default="0", help="sites to wait for (default: one for each key)")
    server.add_argument(
        "--wait", metavar="SECONDS", default="600", help="then begin with 'min_clients' or more (default: 600)"
    )
    trust = server.add_argument_group("trust")
    trust.add_argument("--certificates", metavar="DIR", help="the folder 'server' that 'fedkeel certificates' made")
    trust.add_argument("--ca", metavar="FILE", help="certificate of the authority, in PEM")
    trust.add_argument("--certificate", metavar="FILE", help="certificate of this server, in PEM")
    trust.add_argument("--key", metavar="FILE", help="private key of this server, in PEM")
    trust.add_argument("--keys", metavar="DIR", help="public keys of the sites, NAME.pub, in OpenSSH's format")
    trust.add_argument("--insecure", action="store_true", help="no TLS and no keys, on this machine alone")
    add_place(server, "the run directory (default: runs/ and the name of the configuration file)")
    add_options(server, without=WITHOUT)
    server.set_defaults(act=run_server)

    join = commands.add_parser(
        "join",
        usage="%(prog)s HOST[:PORT] --data DIR [options]",
        help="be a site of a federation: train on the images in a folder, which stay here",
        description="Be a site: connect to the server and train on the images in DIR/CLASS/*.png when asked, until\n"
        "stopped. The images stay here. What the method remembers of this site stays in --state.",
        epilog=examples(["fedkeel join fl.example.org --data /data/scans --certificates keys/sites/north"]),
    )
    join.add_argument("address", metavar="HOST[:PORT]", help=f"the server (default port: {PORT})")
    join.add_argument("--data", metavar="DIR", required=True, help="the folder with a folder for each class")
    join.add_argument("--name", metavar="NAME", help="of this site (default: as its key, else as the folder is called)")
    join.add_argument("--state", metavar="DIR", help="for its memory and logs (default: ~/.local/state/fedkeel/NAME)")
    join.add_argument("--device", metavar="TEXT", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")
    join.add_argument("--quiet", action="store_true", help="only warnings")
    trust = join.add_argument_group("trust")
    trust.add_argument("--accept", metavar="FILE", help="what the server may ask for (default: see --show-policy)")
    trust.add_argument(
        "--show-policy", action=ShowPolicy, nargs=0, help="print the default policy, a TOML file, and exit"
    )
    trust.add_argument("--certificates", metavar="DIR", help="this site's folder that 'fedkeel certificates' made")
    trust.add_argument("--ca", metavar="FILE", help="certificate of the authority, in PEM")
    trust.add_argument("--key", metavar="FILE", help="private key of this site, in OpenSSH's format")
    trust.add_argument("--insecure", action="store_true", help="no TLS and no key, on this machine alone")
    join.set_defaults(act=be_a_site)

    status = commands.add_parser(
        "status",
        usage="%(prog)s DIR [options]",
        help="how a federation and each of its sites are doing",
        description="How far a run over a network is, and what each of its sites last did.",
        epilog=examples(["fedkeel status runs/fed"]),
    )
    status.add_argument("directory", metavar="DIR", help="the run directory, at the server")
    status.add_argument("--json", action="store_true", help="print one JSON document")
    status.set_defaults(act=show_status)


class ShowPolicy(argparse.Action):
    """Prints the default policy of a site and ends, as --help does."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from fedkeel.deploy.policy import Policy

        print(Policy().to_toml(), end="")
        parser.exit()


def make_certificates(arguments: argparse.Namespace) -> int:
    from fedkeel.deploy import need_flower

    need_flower()
    from fedkeel.deploy.certificates import make

    sites, hosts = _names(arguments.sites, "sites"), _names(arguments.host, "host")
    make(Path(arguments.out), sites, hosts, days=_whole(arguments.days, "days", 1))
    out = shlex.quote(arguments.out)
    print(f"server: fedkeel server --config FILE --certificates {out}/server")
    for name in sites:
        own = shlex.quote(f"{arguments.out}/sites/{name}")
        print(f"site {name}: fedkeel join {hosts[0]} --data DIR --certificates {own}")
    print(f"Give each site its own folder and nothing else; keep {out}/authority.key away from all of them.")
    return 0


def run_server(arguments: argparse.Namespace) -> int:
    options = given_options(arguments)
    options.setdefault("data", "folder")
    config = from_dict(options)
    port, sites = _whole(arguments.port, "port", 1), _whole(arguments.sites, "sites", 0)
    wait = _whole(arguments.wait, "wait", 0)
    out = Path(arguments.out or Path("runs") / (Path(arguments.config).stem if arguments.config else "federation"))

    from fedkeel.deploy import need_flower

    need_flower()
    from fedkeel.cli.console import RunProgress
    from fedkeel.deploy.certificates import ServerFiles
    from fedkeel.deploy.deployment import ServerOptions, serve

    files = None
    given = (arguments.ca, arguments.certificate, arguments.key, arguments.keys)
    if not _insecure(arguments, any(given)):
        files = ServerFiles.of(Path(arguments.certificates or "certificates/server"))
        ca, certificate, key, keys = (Path(path) if path else None for path in given)
        files = ServerFiles(ca or files.ca, certificate or files.certificate, key or files.key, keys or files.sites)
    try:
        with interruptible(), RunProgress(quiet=arguments.quiet) as progress:
            run = serve(config, out, ServerOptions(files, arguments.host, port, sites, wait), progress)
    except Stopped:
        return stopped(shlex.join(["fedkeel", *arguments.typed]))
    return show_result(arguments, run)


def be_a_site(arguments: argparse.Namespace) -> int:
    from fedkeel.deploy import need_flower

    need_flower()
    from fedkeel.deploy.certificates import SiteFiles
    from fedkeel.deploy.deployment import join
    from fedkeel.deploy.policy import Policy

    folder = Path(arguments.data).expanduser()
    policy = Policy.read(Path(arguments.accept).expanduser()) if arguments.accept else Policy()
    files = None
    name = arguments.name or folder.resolve().name
    if not _insecure(arguments, bool(arguments.ca or arguments.key)):
        own = Path(arguments.certificates) if arguments.certificates else None
        files = SiteFiles.of(own or Path("certificates"))
        files = SiteFiles(Path(arguments.ca or files.ca), Path(arguments.key or files.key))
        if own is not None and not arguments.name:
            name = own.resolve().name
    states = Path(os.environ.get("XDG_STATE_HOME", "~/.local/state")).expanduser()
    state = Path(arguments.state) if arguments.state else states / "fedkeel" / file_name(name)
    if not arguments.quiet:
        logging.getLogger("fedkeel").setLevel(logging.INFO)
        print(f"fedkeel: the site '{name}' joins {arguments.address}; stop it with Ctrl-C", file=sys.stderr)
    try:
        with interruptible():
            join(arguments.address, folder, name, state, files=files, device=arguments.device, policy=policy)
    except Stopped:
        print(f"fedkeel: the site '{name}' left", file=sys.stderr)
    return 0


def show_status(arguments: argparse.Namespace) -> int:
    from fedkeel.cli.console import console, plain_table
    from fedkeel.engine.executors.flower.executor import STATUS
    from fedkeel.experiments.tables import percent
    from fedkeel.runs.run import Run

    run = Run(arguments.directory)
    path = run.directory / STATUS
    if not path.exists():
        raise FedkeelError(f"'{run.directory}' is no run over a network: see it with 'fedkeel show {run.directory}'.")
    sites = read_sites(path)
    rounds, scores = run.records("round"), run.scores()
    accuracy = scores[-1]["average"] if scores else None
    document = {
        "method": run.config.method,
        "rounds": run.config.rounds,
        "done": len(rounds),
        "finished": run.finished,
        "accuracy": accuracy,
        "sites": sites,
    }
    if arguments.json:
        print(json.dumps(document, indent=1))
        return 0
    known = f", accuracy {percent(accuracy)} %" if accuracy is not None else ""
    state = "finished" if run.finished else f"round {len(rounds) + 1}"
    print(f"{run.config.method}: {state} of {run.config.rounds}{known}")
    rows = [[name, "yes" if s["connected"] else "no", s["state"], s["at"]] for name, s in sorted(sites.items())]
    console(sys.stdout).print(plain_table(["site", "connected", "last", "at"], rows))
    return 0


def read_sites(path: Path) -> dict[str, dict[str, Any]]:
    """What each site last did; one sentence where that cannot be read."""
    try:
        sites = json.loads(path.read_bytes())
        return {name: {key: site[key] for key in ("state", "connected", "at")} for name, site in sites.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise FedkeelError(
            f"'{path}' cannot be read ({type(error).__name__}): the server writes it anew at its next exchange."
        ) from error


def _insecure(arguments: argparse.Namespace, paths: bool) -> bool:
    if arguments.insecure and (paths or arguments.certificates):
        raise FedkeelError("'--insecure' is given together with certificates: keep one.")
    return bool(arguments.insecure)


def _whole(text: str, what: str, least: int) -> int:
    if not text.isdigit() or int(text) < least:
        raise FedkeelError(f"'{what}' is '{text}': give a whole number, at least {least}.")
    return int(text)


def _names(text: str, what: str) -> list[str]:
    found = [name.strip() for name in text.split(",") if name.strip()]
    if not found:
        raise FedkeelError(f"'{what}' is '{text}': give at least one name.")
    return list(dict.fromkeys(found))
