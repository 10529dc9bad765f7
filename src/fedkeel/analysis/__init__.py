"""The papers' diagnostics: why a run went as it did.

Each is a file of its own: the few lines that get its inputs from a run, and its figures. The formulas that the papers
state are in `fedkeel.formulas`.

    fedkeel.analysis.run("representation-divergence", "runs/digits-shift-fedavg-seed0")
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from fedkeel.analysis.diagnostic import DIAGNOSTICS, Diagnostic, Measured, Values, build, diagnostic, over_rounds
from fedkeel.analysis.recorder import Recorder, requested
from fedkeel.analysis.snapshot import Objects, Outputs, Snapshot
from fedkeel.core.method import Method
from fedkeel.data.federation import Federation
from fedkeel.options import as_path
from fedkeel.registry import discover
from fedkeel.runs.run import Run

__all__ = ["DIAGNOSTICS", "Diagnostic", "Measured", "Objects", "Outputs", "Recorder", "Snapshot", "Values"]
__all__ += ["build", "diagnostic", "number", "over_rounds", "requested", "run"]

discover(__name__)  # a diagnostic takes what is above from here, inside of the package as outside


def number(document: Mapping[str, Any], at: str = "") -> float | None:
    """The one number of a diagnostic that stands in a paper's table, or in which methods are compared, if it has one;
    `at`: of several, that one.

    >>> number({"figures": [{"kind": "lines"}, {"kind": "bars", "number": 0.25}]})
    0.25
    """
    if at:
        return next((f["numbers"][at] for f in document["figures"] if at in f.get("numbers", {})), None)
    found = [figure["number"] for figure in document["figures"] if "number" in figure]
    return next(iter(found + [figure["key"]["value"] for figure in document["figures"] if "key" in figure]), None)


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
    """Look at a run through a diagnostic; returns its document, the figures as tables.

    Args:
        name: as `fedkeel list diagnostics` has it, with options in brackets or as keywords.
        run: a run or its directory; one that is not finished is taken as it is.
        save: also write it to `diagnostics/NAME.json` in the run directory, or in the directory given here.
        federation, model, method: of a run that got them as objects in Python.

    >>> trained = fedkeel.simulate(rounds=2, subsample=30)
    >>> [figure["kind"] for figure in fedkeel.analysis.run("convergence", trained)["figures"]]
    ['lines', 'lines', 'lines']
    """
    built = build(name, **options)
    run = run if isinstance(run, Run) else Run(run)
    document = built.document(built.of_run(run, Objects(federation, model, method)))
    if save:
        built.write(run.directory if save is True else as_path(save, "save"), document)
    return document
