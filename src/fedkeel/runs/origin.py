"""What a run began with: the version, the code of its method and model, and the machine.

It is compared when the run is resumed or used again. Data are compared by their `fedkeel.data.outline`.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import FunctionType
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
from fedkeel.registry import REGISTRIES
from fedkeel.runs.bytecode import PLAIN, code_digest, is_followed, python_version
from fedkeel.spec import parse

FILE = "origin.json"
MACHINE = ("cpu", "capability", "gpu", "torch", "settings")  # what decides the last bits, beside the threads


@dataclass(frozen=True)
class Origin:
    """The code and the machine of a run."""

    fedkeel: str
    python: str
    code: Mapping[str, str]  # a digest for each part of the method and for the model, by what messages call it
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
            python=python_version(),
            code={**own_code(setup.config), **method_code(worker.method), "the model": model_digest(worker.model)},
            given={name: identify(thing) for name, thing in (given or {}).items() if thing is not None},
            machine=machine(worker.device),
            threads=threads if worker.device.type == "cpu" and not executor.elsewhere else None,
            folder="" if all(path.is_absolute() for path in data_paths(setup.config).values()) else os.getcwd(),
        )

    @staticmethod
    def load(directory: Path) -> Origin | None:
        stored = read_sealed(directory / FILE)
        try:
            return None if stored is None else Origin(**stored)
        except TypeError as error:
            raise StoreError(
                f"'{directory / FILE}' is of another version of Fedkeel ({error}): read it with that one."
            ) from error

    def changed_code(self, now: Mapping[str, str]) -> str:
        """Whose code is another now, or nothing. Compiled by another Python, it cannot be compared."""
        if self.python != python_version():
            return ""
        return next((what for what, digest in now.items() if self.code.get(what, digest) != digest), "")

    def notes(self, before: Origin, directory: Path) -> list[str]:
        """What a person should know who goes on with a run, a sentence each."""
        said = []
        if before.fedkeel != self.fedkeel:
            said.append(
                f"'{directory}' began with fedkeel {before.fedkeel}, and this is {self.fedkeel}: "
                "its result may be that of neither."
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


def refuse_other_code(directory: Path, before: Origin, now: Origin) -> None:
    """As for data."""
    if what := before.changed_code(now.code):
        raise StoreError(
            f"The code of {what} is not what '{directory}' began with: put it back as it was (or Fedkeel, if that was "
            "updated), start a new run, or give --changed-code (changed_code=True in Python) to go on with rounds of "
            "different code."
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
def own_code(config: Config) -> dict[str, str]:
    """Of what the configuration names that is not Fedkeel's: losses, metrics, transforms, ..."""
    entries = [(REGISTRIES[group].kind, entry) for group, entry in imports.used(config)]
    return {f"the {kind} '{entry.name}'": code_digest(entry.build) for kind, entry in entries if kind != "model"}


def method_code(method: Composition) -> dict[str, str]:
    return {f"the method '{part.name}'": code_digest(type(part)) for part in method.parts}


def model_digest(model: nn.Module) -> str:
    """Of its layers with their options and of the code of those that are not torch's; not of its weights."""
    shapes = [(name, tuple(tensor.shape)) for name, tensor in model.state_dict().items()]
    kinds: dict[type, None] = {}
    settings, replaced = [], []
    for path, module in model.named_modules():
        own = is_followed(type(module).__module__)
        kinds |= {type(module): None} if own else {}
        for name, value in vars(module).items():
            function = getattr(value, "__func__", value)
            if isinstance(function, FunctionType):
                replaced.append(function)  # a forward that was put in place of the layer's own
            elif own and isinstance(value, PLAIN) and name != "training" and not name.startswith("_"):
                settings.append((path, name, value))  # what a forward reads of itself, and its repr need not say
    return code_digest(re.sub(r" at 0x[0-9a-f]+", "", repr(model)), shapes, settings, *kinds, *replaced)


def identify(thing: Any) -> dict[str, str]:
    """A name for a table, and a digest that differs where the thing does."""
    kind = type(thing).__name__
    if isinstance(thing, nn.Module):
        name = type(thing.network).__name__ if isinstance(thing, Wrapped) else kind
        weights = (tensor.detach().cpu().reshape(-1).view(torch.uint8) for tensor in thing.state_dict().values())
        return {"name": name, "digest": model_digest(thing), "weights": digest(torch.cat([*weights]).numpy().tobytes())}
    if isinstance(thing, Method):
        parts = getattr(thing, "parts", [thing])
        text = "+".join(with_options(part) for part in parts)
        return {"name": text, "digest": code_digest(text, *(type(part) for part in parts))}
    # A federation that is made anew for each seed is another each time, and still the same row of a table.
    return {"name": str(getattr(thing, "name", kind)), "digest": ""}


def with_options(method: Method) -> str:
    """`Momentum(beta=0.3)`: its class and what it was made with, as far as that is plain."""
    options = [
        f"{name}={value!r}"
        for name, value in vars(method).items()
        if isinstance(value, PLAIN) and name != "name" and not name.startswith("_")
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
