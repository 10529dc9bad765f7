"""What a run began with: the version, the user's own code, and the machine.

It is compared when the run is resumed or used again. Data are compared by their `fedkeel.data.outline`.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fedkeel
from fedkeel.config import Config
from fedkeel.core import imports
from fedkeel.core.composition import Composition
from fedkeel.core.method import Method
from fedkeel.data.federation import Federation
from fedkeel.data.outline import FILE as FEDERATION
from fedkeel.data.outline import Outline, changed
from fedkeel.engine.executors.executor import executor_class
from fedkeel.engine.setup import Setup, load_federation
from fedkeel.errors import StoreError
from fedkeel.files import digest, read_sealed, seal
from fedkeel.models.wrapped import Wrapped
from fedkeel.spec import parse

FILE = "origin.json"
MACHINE = ("cpu", "capability", "gpu", "torch", "settings")  # what decides the last bits, beside the threads


@dataclass(frozen=True)
class Origin:
    """The code and the machine of a run."""

    fedkeel: str
    commit: str = ""  # of Fedkeel's repository, where it runs from one
    code: Mapping[str, str] = field(default_factory=dict)  # the sha256 of each of the user's files
    given: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # in Python: see `identify`
    machine: Mapping[str, str] = field(default_factory=dict)
    threads: int | None = None  # of a local step, where that decides bits
    folder: str = ""  # where a relative path of its data begins; nothing where there is none

    @staticmethod
    def of(setup: Setup, given: Mapping[str, Any] | None = None) -> Origin:
        """Of a run that is ready to start; `given` are the objects that its configuration cannot name."""
        worker = setup.worker
        executor = executor_class(setup.executor_name)
        threads = 1 if executor.single_threaded else setup.config.threads or torch.get_num_threads()
        return Origin(
            fedkeel=fedkeel.__version__,
            commit=commit(),
            code=own_code(setup.config, (worker.method, worker.model)),
            given={name: identify(thing) for name, thing in (given or {}).items() if thing is not None},
            machine=machine(worker.device),
            threads=threads if worker.device.type == "cpu" and not executor.elsewhere else None,
            folder="" if all(path.is_absolute() for path in data_paths(setup.config).values()) else os.getcwd(),
        )

    @staticmethod
    def load(directory: Path) -> Origin | None:
        stored = read_sealed(directory / FILE)
        if stored is None:
            return None
        kinds = {entry.name: stored.get(entry.name, entry.default) for entry in fields(Origin)}
        found = Origin(**{name: {} if value is MISSING else value for name, value in kinds.items()})
        texts = [found.fedkeel, found.commit, found.folder]
        tables = [found.code, found.machine, found.given]
        if all(isinstance(table, dict) for table in tables):
            texts += [*found.code.values(), *found.machine.values()]
            tables += found.given.values()
        if not all(isinstance(t, str) for t in texts) or not all(isinstance(t, dict) for t in tables):
            raise StoreError(f"'{directory / FILE}' is not what a run wrote: put it back from a copy, or remove it.")
        return found

    @property
    def version(self) -> str:
        return f"{self.fedkeel} ({self.commit})" if self.commit else self.fedkeel

    def changed_code(self, now: Mapping[str, str]) -> str:
        """The file of the user's that is another now, or nothing."""
        return next((file for file, digest in now.items() if self.code.get(file, digest) != digest), "")

    def notes(self, before: Origin, directory: Path) -> list[str]:
        """What a person should know who goes on with a run, a sentence each."""
        said = []
        if before.version != self.version:
            said.append(
                f"'{directory}' began with fedkeel {before.version}, and this is {self.version}: its result may be of "
                "neither."
            )
        if what := before.changed_code(self.code):
            said.append(f"The code of {what} is not what '{directory}' began with: the result is of different codes.")
        moved = [name for name in MACHINE if before.machine.get(name) != self.machine.get(name)]
        if moved and self.machine.get("gpu") == before.machine.get("gpu") != "":
            moved = [name for name in moved if name in ("gpu", "torch")]  # the CPU only carries things to and fro
        if moved:
            was, now = (", ".join(o.machine.get(n) or f"no {n}" for n in moved) for o in (before, self))
            said.append(f"'{directory}' began on {was}, and goes on on {now}: the last bits of its result may differ.")
        return said


def outline_of(setup: Setup) -> Outline:
    """Of the data as they were given: pooled, they would depend on how a seed divided them."""
    return Outline.of(setup.given)


def records(setup: Setup, given: Mapping[str, Any]) -> dict[str, bytes]:
    """The files in which a run directory keeps what the run began with."""
    return {FEDERATION: seal(outline_of(setup).to_dict()), FILE: seal(asdict(Origin.of(setup, given)))}


def read_outline(directory: Path) -> Outline | None:
    stored = read_sealed(directory / FEDERATION)
    return None if stored is None else Outline.from_dict(stored)


def refuse_other_data(directory: Path, setup: Setup) -> None:
    """Before a run goes on: with other images it would be a run of neither."""
    before = read_outline(directory)
    what = changed(before, outline_of(setup)) if before is not None else ""
    if what:
        raise StoreError(
            f"The data of '{directory}' have changed, {what}: put them back as they were, or start a new run."
        )


def data_paths(config: Config) -> dict[str, Path]:
    """The options of the data set that are paths."""
    options = {} if config.data.startswith("(") else parse(config.data).options
    return {name: Path(str(options[name])).expanduser() for name in ("root", "file") if options.get(name) is not None}


def data_from_afar(directory: Path, config: Config) -> Federation | None:
    """The data of a stored run whose relative paths lead nowhere from here: read from where it began; else None."""
    lost = {name: path for name, path in data_paths(config).items() if not path.exists()}
    if not lost:
        return None
    origin, data = Origin.load(directory), parse(config.data)
    there = {name: str(Path(origin.folder if origin else "").absolute() / path) for name, path in lost.items()}
    for name, path in there.items():
        if not Path(path).exists():
            here = "" if lost[name].is_absolute() else f", or go to where '{lost[name]}' is"
            raise StoreError(f"The data of '{directory}' are not in '{path}' any more: put them back there{here}.")
    return load_federation(config.replace(data=str(replace(data, options={**data.options, **there}))))


# -- code ------------------------------------------------------------------------------------------------------------
def own_code(config: Config, objects: Iterable[Any] = ()) -> dict[str, str]:
    """Of each file of the user's that these come from, by its name, the sha256. What was typed into a notebook has
    none."""
    kinds = [type(part) for thing in objects for part in _parts(thing)]
    files = [*imports.files(config), *(file for kind in kinds if (file := _file_of(kind)) is not None)]
    return {f"'{file.name}'": digest(file.read_bytes()) for file in dict.fromkeys(files)}


def _parts(thing: Any) -> Iterable[Any]:
    if isinstance(thing, nn.Module):
        return thing.modules()
    return thing.parts if isinstance(thing, Composition) else [thing]


def _file_of(kind: type) -> Path | None:
    """The user's file that a class is from: neither this package's, nor Python's, nor an installed one's."""
    file = Path(getattr(sys.modules.get(kind.__module__), "__file__", None) or "")
    top = kind.__module__.partition(".")[0]
    foreign = top in ("fedkeel", *sys.stdlib_module_names) or {"site-packages", "dist-packages"} & {*file.parts}
    return file if file.is_file() and not foreign else None


@cache
def commit() -> str:
    """Of the repository that this package is in, marked where files have changed since; nothing if it is in none."""
    root = Path(fedkeel.__file__).parents[2]
    if not (root / ".git").exists():
        return ""
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    with suppress(OSError):
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return ""


def identify(thing: Any) -> dict[str, str]:
    """A name for a table, and a digest that differs where the thing does."""
    kind = type(thing).__name__
    if isinstance(thing, nn.Module):
        state = thing.state_dict()
        weights = [tensor.detach().cpu().reshape(-1).view(torch.uint8) for tensor in state.values()]
        shapes = "".join(f"{name}{tuple(tensor.shape)}" for name, tensor in state.items())
        name = type(thing.network).__name__ if isinstance(thing, Wrapped) else kind
        return {"name": name, "digest": _short(name + shapes), "weights": digest(torch.cat(weights).numpy().tobytes())}
    if isinstance(thing, Method):
        text = "+".join(with_options(part) for part in getattr(thing, "parts", [thing]))
        return {"name": text, "digest": _short(text)}
    # A federation that is made anew for each seed is another each time, and still the same row of a table.
    return {"name": str(getattr(thing, "name", kind)), "digest": ""}


def _short(text: str) -> str:
    return digest(text.encode("utf-8", "surrogatepass"))[:32]


def with_options(method: Method) -> str:
    """`Momentum(beta=0.3)`: its class and what it was made with, as far as that is plain."""
    options = [
        f"{name}={value!r}"
        for name, value in vars(method).items()
        if isinstance(value, bool | int | float | str | None) and name != "name" and not name.startswith("_")
    ]
    return type(method).__name__ + (f"({', '.join(options)})" if options else "")


# -- the machine -----------------------------------------------------------------------------------------------------
def machine(device: torch.device) -> dict[str, str]:
    """The kind of machine, as far as it decides the last bits of a result."""
    asked = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_CBWR")
    return {
        "cpu": cpu_name(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else "",
        "torch": f"torch {torch.__version__}",
        "settings": " ".join(f"{name}={os.environ[name]}" for name in asked if name in os.environ),
    }


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()
