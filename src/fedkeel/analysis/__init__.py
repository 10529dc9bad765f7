"""The papers' diagnostics: why a run went as it did.

Each is a function that takes a run at one moment and returns numbers; its figures follow from their shape. What the
papers state stands beside it.

    fedkeel.analysis.run("representation-divergence", "runs/digits-shift-fedavg-seed0")
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from fedkeel.analysis.diagnostic import (
    DIAGNOSTICS,
    Diagnostic,
    Numbers,
    build,
    diagnostic,
    recorded,
    requested,
    write,
)
from fedkeel.analysis.figures import SHARE, leaves
from fedkeel.analysis.recorder import Recorder
from fedkeel.analysis.snapshot import Outputs, Snapshot, of_run
from fedkeel.core.method import Method
from fedkeel.data.federation import Federation
from fedkeel.errors import FedkeelError
from fedkeel.options import as_path
from fedkeel.registry import discover
from fedkeel.runs.run import Run

__all__ = ["DIAGNOSTICS", "Diagnostic", "Numbers", "Outputs", "Recorder", "Snapshot", "build", "diagnostic"]
__all__ += ["number", "requested", "run"]

discover(__name__)  # a file in this folder registers itself


def number(document: Mapping[str, Any], at: str = "") -> float | None:
    """The number of a diagnostic in which methods are compared, if it has one, or with `at` the first whose names end
    so; of the last round, shares in %.

    >>> rounds = [{"round": 0, "numbers": {"accuracy (0 to 1) by domain": {"photo": 0.25, "average": 0.5}}}]
    >>> number({"rounds": rounds, "figures": [{"kind": "bars"}]}, "average")
    50.0
    """
    if not at:
        key = next((figure["key"] for figure in document["figures"] if "key" in figure), None)
        return key and (100 * key["value"] if key["percent"] else key["value"])
    found = (leaf for entry in document["rounds"][-1:] for leaf in leaves(entry["numbers"]))
    path, value = next((leaf for leaf in found if leaf[0].endswith(f" {at}")), ("", None))
    return 100 * value if value is not None and SHARE in path else value


def run(
    name: str,
    run: Run | str | Path,
    *,
    save: bool | str | Path = True,
    federation: Federation | None = None,
    model: nn.Module | None = None,
    method: Method | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Look at a finished run through a diagnostic; returns its document: the numbers, and the figures as tables.

    What was recorded while it trained is shown, unless options are given.

    Args:
        name: as `fedkeel list diagnostics` has it, with options in brackets or as keywords.
        run: a run or its directory.
        save: also write it to `diagnostics/NAME.json` in the run directory, or in the directory given here. What was
            recorded there is kept.
        federation, model, method: of a run that got them as objects in Python.

    >>> trained = fedkeel.simulate(rounds=2, subsample=30)
    >>> [figure["kind"] for figure in fedkeel.analysis.run("singular-values", trained)["figures"]]
    ['bars', 'lines']
    """
    built = build(name, **options)
    run = run if isinstance(run, Run) else Run(run)
    rounds = recorded(run.directory, built.name)
    if rounds and built.options and save is True:
        raise FedkeelError(
            f"'{built.name}' was recorded while '{run.directory}' trained: leave its options out, or choose another "
            "directory with --out (save=)."
        )
    is_recorded = bool(rounds) and not built.options
    if not is_recorded:
        snapshot = of_run(run, federation=federation, model=model, method=method)
        built.check(snapshot.worker)
        rounds = {snapshot.round: built.measure(snapshot)}
    document = built.document(rounds, recorded=is_recorded)
    if save:
        write(run.directory if save is True else as_path(save, "save"), document)
    return document
