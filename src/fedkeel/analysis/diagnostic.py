"""What a diagnostic is: a function that takes a run at one moment and returns numbers."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import wraps
from pathlib import Path
from typing import Any, Literal, TypeVar

from fedkeel import spec
from fedkeel.analysis.figures import SHARE, of_numbers
from fedkeel.analysis.snapshot import Snapshot
from fedkeel.config import Config
from fedkeel.core.state import batch_norms
from fedkeel.engine.local import Worker
from fedkeel.errors import FedkeelError, first_line
from fedkeel.files import explained, plain, write_atomically
from fedkeel.nn.calibration import normalised_layers
from fedkeel.nn.hybrid_batch_norm import hybrid_norms
from fedkeel.registry import Registry

FOLDER = "diagnostics"
Numbers = Mapping[str, Any]
"""What a diagnostic returns; `fedkeel.analysis.figures` says which shapes there are."""
Function = TypeVar("Function", bound=Callable[..., Numbers])


def clips(worker: Worker) -> bool:
    """Whether gradients are clipped and not changed otherwise."""
    parts = [part.name for part in worker.method.parts if part.overrides("gradients")]
    return all(name in ("fedcoda", "fixbn") for name in parts) and bool(parts or worker.config.clip_norm)


NEEDS: dict[str, Callable[[Worker], object]] = {
    "batch norm": lambda worker: batch_norms(worker.model),
    "batch-norm statistics": lambda worker: normalised_layers(worker.model),  # also of HBN's layers
    "batch-norm statistics of the server": lambda worker: any("running_mean" in n for n in worker.layout.statistics),
    "factors of 'hbn'": lambda worker: any(norm.mix == "learned" for norm in hybrid_norms(worker.model).values()),
    "gradients that are clipped": clips,
    "weights of a global model": lambda worker: worker.layout.weights,
}
"""What a diagnostic can look at."""


@dataclass(frozen=True)
class Diagnostic:
    """A function that was made a diagnostic; see `diagnostic`.

    Attributes:
        better: which way the number is good by which methods are compared: the first that it returns.
        needs: one of `NEEDS`; a run without is refused before it trains.
        steps: it looks at the gradients of every local step, see `fedkeel.analysis.gradients`.
        options: that the function is called with.
    """

    function: Callable[..., Numbers]
    name: str
    paper: str = ""
    better: Literal["low", "high"] | None = None
    needs: str = ""
    steps: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return (self.function.__doc__ or self.name).partition("\n")[0].rstrip(".")

    @property
    def what(self) -> str:
        return " ".join((self.function.__doc__ or "").partition("\n")[2].split())

    def check(self, worker: Worker) -> None:
        """Refuse, before anything trains, a run in which there is nothing to measure."""
        if self.needs and not NEEDS[self.needs](worker):
            raise FedkeelError(
                f"'{self.name}' looks at {self.needs}, and a run of '{worker.method.name}' with this model has none: "
                "choose another diagnostic, method or model."
            )

    def measure(self, run: Snapshot) -> Numbers:
        """Its numbers as JSON can hold them; a sentence where there are none, as of a model that has diverged."""
        try:
            found = self.function(run, **self.options)
        except FedkeelError:
            raise
        except (ArithmeticError, RuntimeError, ValueError) as error:
            raise FedkeelError(f"'{self.name}' cannot be computed: {first_line(error)}.") from error
        numbers: Numbers = plain(json.loads(json.dumps(found, default=lambda array: array.tolist())))
        return numbers

    def document(self, rounds: Mapping[int, Numbers], *, recorded: bool) -> dict[str, Any]:
        """The numbers by round, and the figures that follow from their shape."""
        figures = of_numbers(rounds)
        label, value = next(iter(rounds[max(rounds)].items()))
        if isinstance(value, float):
            figures[0]["key"] = {
                "label": label.replace(SHARE, ""),
                "value": value,
                "better": self.better,
                "percent": SHARE in label,
            }
        about = {"name": self.name, "title": self.title, "what": self.what, "paper": self.paper, "recorded": recorded}
        return {**about, "rounds": [{"round": r, "numbers": n} for r, n in rounds.items()], "figures": figures}


DIAGNOSTICS: Registry[Diagnostic] = Registry("diagnostic", given=("run",))
"""The diagnostics by name."""


def diagnostic(name: str, **about: Any) -> Callable[[Function], Function]:
    """Decorator: make a function `(run: Snapshot, *, options) -> Numbers` known under `name`.

    The first line of its docstring is the title, the rest what a reader is told. `about`: the attributes of
    `Diagnostic`. No example here, since it looks at a run: see "Add a diagnostic in one file" in Contributing.
    """

    def remember(function: Function) -> Function:
        made = Diagnostic(function, name, **about)
        build = wraps(function)(lambda **options: replace(made, options=options))
        DIAGNOSTICS.register(name, summary=made.title, paper=made.paper)(build)
        return function

    return remember


def build(text: str, **options: Any) -> Diagnostic:
    """A diagnostic from its name, with options as in `tsne(samples=500)` or as keywords.

    >>> from fedkeel import analysis
    >>> analysis.build("tsne", samples=500).options
    {'samples': 500}
    """
    parsed = spec.parse(text)
    return DIAGNOSTICS.make(parsed.name, **{**parsed.options, **options})


def requested(config: Config) -> list[Diagnostic]:
    """The diagnostics that `record` names.

    >>> [diagnostic.name for diagnostic in requested(Config(record="loss-gap, tsne(samples=500)"))]
    ['loss-gap', 'tsne']
    """
    found = [build(text) for text in spec.split(config.record, ",")] if config.record.strip() else []
    names = [diagnostic.name for diagnostic in found]
    if twice := [name for name in names if names.count(name) > 1]:
        raise FedkeelError(f"'record' names '{twice[0]}' twice: keep one.")
    return found


# -- files -----------------------------------------------------------------------------------------------------------
def write(directory: Path, document: Mapping[str, Any]) -> None:
    path = directory / FOLDER / f"{document['name']}.json"
    with explained(path, then=""):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(document, allow_nan=False).encode() + b"\n")


def recorded(directory: Path, name: str) -> dict[int, Numbers]:
    """What was recorded of a run while it trained, by round."""
    path = directory / FOLDER / f"{name}.json"
    document = json.loads(path.read_bytes()) if path.exists() else {}
    return {entry["round"]: entry["numbers"] for entry in document.get("rounds", ()) if document["recorded"]}
