"""How far a run over a network is, and what each of its sites last did.

examples:
  fedkeel status runs/fed
"""

import fedkeel
from fedkeel.cli.terminal.output import Table, show
from fedkeel.cli.terminal.parsing import Arguments, Parser
from fedkeel.config import from_one
from fedkeel.errors import FedkeelError

HELP = "how a federation and each of its sites are doing"
USAGE = "DIR [options]"


def add_arguments(parser: Parser) -> None:
    parser.add_argument("directory", metavar="DIR", help="the run directory, at the server")
    parser.add_shared("--json")


def run(arguments: Arguments) -> int:
    from fedkeel.engine.executors.flower.executor import STATUS, read_sites
    from fedkeel.experiments.tables import percent

    run = fedkeel.Run(arguments.directory)
    config = run.config
    if not (run.directory / STATUS).exists():
        raise FedkeelError(f"'{run.directory}' is no run over a network: see it with 'fedkeel show {run.directory}'.")
    sites, done, scores = read_sites(run.directory), len(run.records("round")), run.scores()
    accuracy = scores[-1]["average"] if scores else None
    document = {"method": config.method, "rounds": config.rounds, "done": done, "finished": run.finished}
    document |= {"accuracy": accuracy, "sites": sites}
    known = f", accuracy {percent(accuracy)} %" if accuracy is not None else ""
    state = f"finished after {done} rounds" if run.finished else f"round {from_one(done)} of {config.rounds}"
    rows = [[name, "yes" if s["connected"] else "no", s["state"], s["at"]] for name, s in sorted(sites.items())]
    lines: list[str | Table] = [
        f"{config.method}: {state}{known}",
        Table(["site", "connected", "last", "at"], rows),
    ]
    show(lines, document, as_json=arguments.json)
    return 0
