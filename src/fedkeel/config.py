"""Everything that decides a run, in one flat table: what `config.toml` holds and what the flags set.

The fields below are the only list of options: the command line, the file format, the checks and the docs are
made from them.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from fedkeel import options
from fedkeel.errors import FedkeelError, nearest
from fedkeel.options import Count, Needs, NotNegative, Number, Positive, PositiveShare, Range, Share, check_fields

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PYTHON_OBJECT = "(given in Python)"  # in place of a name
RAY_OPTIONS = ("ray_address", "ray_cores", "ray_gpus", "ray_actors")
# What does not change the result, and so may change when a run is resumed.
MACHINE_OPTIONS = (
    *("executor", "workers", "threads", "device", "memory_limit", "checkpoint_every"),
    *RAY_OPTIONS,
    *("metrics", "predictions", "record", "record_every", "round_timeout"),
)
# What runs of earlier versions did not have: at its default it leaves their fingerprints as they were.
LATER_OPTIONS = (
    *("loss", "patience", "min_delta", "select_by", "evaluate_on"),
    *("site_images", "site_prior", "site_always"),
)

# The statistics that an evaluation tests under; what is told of first is of the first of them.
STATISTICS: dict[str, tuple[str, ...]] = {
    "global": ("global",),
    "batch": ("batch",),
    "both": ("global", "batch"),
    "site": ("site",),
    "all": ("global", "batch", "site"),
}
# What other tools call them, for those who type it here.
ELSEWHERE = {"lr": "learning_rate", "wd": "weight_decay", "bs": "batch_size", "epochs": "local_epochs"}


def first_of(statistics: Iterable[str]) -> str:
    """Of those that were tested under, the ones that results are told of.

    >>> first_of(["batch", "global"]), first_of(["site"])
    ('global', 'site')
    """
    found = set(statistics)
    return next((kind for kind in STATISTICS["all"] if kind in found), "global")


def from_one(round: int) -> int:
    """A round for a sentence, a table or an axis. Run directories, options and the Python API count from 0.

    >>> f"Round {from_one(0)} of 10"
    'Round 1 of 10'
    """
    return round + 1


def option(default: Any, help: str, heading: str = "", needs: Needs | None = None) -> Any:
    """A field with its help text; if it begins a section of `--help` and `config.toml`, its heading; and what it has no
    effect without, so that a run where that is not so is refused."""
    return field(default=default, metadata={"help": help, "heading": heading, "needs": needs})


@dataclass(frozen=True)
class Config:
    """The options of a run. Names with options (`fedprox(mu=0.1)`) are written as in `fedkeel.spec`.

    An option that does not exist, or a value that cannot be, raises `FedkeelError` at once.

    >>> config = Config(method="fedprox(mu=0.1)", rounds=10)
    >>> config.replace(rounds=20).rounds, config.learning_rate
    (20, 0.01)
    """

    method: str = option("fedavg", "method, or several joined by '+', with options: 'fedprox(mu=0.1)+gn'", "what")
    data: str = option("digits-shift", "data set, with options: 'folder(root=./images, size=64)'")
    partition: str = option(
        "domains",
        "how domains become clients: domains, 'dirichlet(alpha=0.3, clients=10)'",
        needs=options.outside("partition"),
    )
    unseen: str = option(
        "", "domains that are only evaluated, never trained on, separated by commas", needs=options.outside("unseen")
    )
    subsample: Number = option(
        0, "equal number of training samples per client; 0 keeps all", needs=options.outside("subsample")
    )
    model: str = option("simple_cnn", "network, with options: 'resnet18(stem=small)'")
    weights: str = option("", "file that the model starts from, e.g. of ImageNet: .safetensors, .pth or .pt")

    rounds: Count = option(30, "communication rounds", "rounds")
    participation: PositiveShare = option(
        1.0, "fraction of clients sampled each round, at least one", needs=options.SEVERAL
    )
    weighting: Literal["samples", "uniform"] = option(
        "samples", "weight of a client in the mean", needs=options.SEVERAL
    )
    min_clients: Count = option(1, "updates without which a round does not count")
    round_timeout: Positive = option(
        3600.0,
        "seconds that a site over a network has for its part of a round, and an actor of ray for its next reply",
        needs=options.REMOTE,
    )
    stateless: bool = option(False, "clients keep nothing between rounds; methods that need it are refused")

    robust: str = option(
        "",
        "rules against clients that lie: 'trimmed-mean(share=0.2)', 'norm-clip+median', see 'list robust'",
        "trust",
        needs=options.SEVERAL,
    )
    dp: Literal["none", "central", "local"] = option(
        "none", "differential privacy: of clients with a trusted server (central), or of samples (local)"
    )
    dp_clip: Positive = option(
        1.0, "norm that a client's change (central) or a gradient (local) is cut to", needs=options.PRIVATE
    )
    dp_noise: Positive = option(1.0, "noise on their sum, in units of 'dp_clip'", needs=options.PRIVATE)
    dp_delta: Annotated[float, Range(above=0, most=0.5)] = option(
        1e-5, "probability at which 'epsilon' is reported", needs=options.PRIVATE
    )

    local_epochs: Count = option(1, "passes over the local data in a round", "local training")
    batch_size: Count = option(32, "samples in a local step")
    drop_last: bool = option(
        False, "drop the last incomplete batch of an epoch (kept by default)", needs=options.BATCHES
    )
    loss: str = option(
        "cross-entropy",
        "what is trained on: 'cross-entropy(label_smoothing=0.1, class_weights=balanced)', 'focal(gamma=2)'",
    )
    optimizer: str = option(
        "sgd", "local optimiser, new in every round: sgd, adamw or any other of torch.optim, 'adam(betas=(0.9, 0.99))'"
    )
    learning_rate: Positive = option(0.01, "before the schedule")
    momentum: Share = option(
        0.9,
        "of sgd and rmsprop",
        needs=options.taken("momentum", "optimizers that have one, and this has none: give --optimizer sgd"),
    )
    weight_decay: NotNegative = option(
        0.0,
        "of optimisers that have one",
        needs=options.taken("weight_decay", "optimizers that have one, and this has none: give another"),
    )
    schedule: str = option(
        "constant",
        "the learning rate from round to round: exponential, cosine, 'step(every=30)', 'warmup(rounds=5, then=cosine)'",
    )
    decay: PositiveShare = option(
        0.998,
        "factor per round of the exponential schedule",
        needs=options.taken(
            "decay", "the schedule 'exponential', where its brackets have none: give --schedule exponential"
        ),
    )
    clip_norm: NotNegative = option(0.0, "clip the norm of all gradients together; 0 does not")

    evaluate_every: Count = option(
        1, "rounds between evaluations; those that the result is taken from are always evaluated", "evaluation"
    )
    evaluate_with: Literal["global", "batch", "both", "site", "all"] = option(
        "global", "statistics that batch norm uses in evaluation; site: each client's, calibrated on samples of its own"
    )
    site_images: Number = option(
        64,
        "training samples that a client is calibrated on, without labels; 0 is all of them",
        needs=options.CALIBRATED,
    )
    site_prior: NotNegative = option(
        16.0, "samples that the federation's statistics are worth in a calibration", needs=options.CALIBRATED
    )
    site_always: bool = option(
        False,
        "calibrate by 'site_prior' alone, also where the class mix explains the distance",
        needs=options.CALIBRATED,
    )
    evaluate_on: Literal["test", "validation"] = option(
        "test",
        "samples that accuracies are of; with 'validation' nothing of a test set is looked at, nor the unseen",
        needs=options.TESTED,
    )
    evaluate_clients: Number = option(
        1000, "most clients that a method with personal layers is tested on; 0 is all of them", needs=options.PERSONAL
    )
    evaluation_batch: Count = option(256, "samples in an evaluation step")
    result: Literal["last", "mean-last-10", "best-validation"] = option("last", "round whose accuracy is the result")
    select_by: str = option(
        "accuracy",
        "what the best round is best by in the validation: accuracy, loss or a metric, such as auc",
        needs=options.CHOSEN,
    )
    patience: Number = option(0, "stop after so many evaluations in a row without a better validation; 0 does not stop")
    min_delta: NotNegative = option(
        0.0, "by how much the validation must be better, for 'patience'", needs=options.PATIENT
    )
    metrics: str = option(
        "", "measures beside accuracy and loss, separated by commas: 'auc,top(k=3)', see 'list metrics'"
    )
    predictions: bool = option(
        False, "keep what the resulting model says of every test image, in predictions/", needs=options.IMAGES
    )
    record: str = option(
        "",
        "diagnostics to record while training, separated by commas: 'statistics-divergence,loss-gap'",
        needs=options.IMAGES,
    )
    record_every: Count = option(
        10, "rounds between records; the first and the last round are always recorded", needs=options.RECORDED
    )

    seed: Number = option(0, "of every random choice", "machine")
    executor: str = option("auto", "where clients run: auto, serial, processes, cuda or ray")
    workers: Number = option(
        0, "worker processes (0: one per core) or clients at once on a GPU (0: as it holds)", needs=options.CROWD
    )
    threads: Number = option(
        0, "threads of a local step on the CPU (0: one in each worker process, all cores under serial)"
    )
    device: str = option("auto", "auto, cpu, cuda or cuda:N")
    ray_address: str = option(
        "local",
        "cluster of the executor ray: local (started by itself), auto (that of this machine) or HOST:PORT",
        needs=options.ON_RAY,
    )
    ray_cores: Number = option(0, "cores of each actor of ray on a CPU (0: one)", needs=options.ON_RAY)
    ray_gpus: PositiveShare = option(
        1.0, "share of a GPU that each actor of ray takes: with 0.5 two share one", needs=options.ON_RAY
    )
    ray_actors: Number = option(0, "most actors of ray (0: as many as the cluster has room for)", needs=options.ON_RAY)
    precision: Literal["float32", "tf32", "bf16"] = option(
        "tf32", "arithmetic on a GPU: fewer bits are faster; bf16 pays for large networks", needs=options.HALF
    )
    compile: bool = option(
        False,
        "compile the network with torch.compile: faster steps on a GPU after a minute or so",
        needs=options.COMPILED,
    )
    memory_limit: Number = option(1024, "MiB of clients' memories that are not moved to disk", needs=options.HELD)
    checkpoint_every: Number = option(
        0, "rounds between checkpoints (0: every round, less often where writing them takes long)"
    )

    def __post_init__(self) -> None:
        check_fields(self)

    def replace(self, **changes: Any) -> Config:
        """The same with some options changed."""
        refuse_unknown(changes)
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Every option by its name."""
        return dataclasses.asdict(self)

    def decisive(self) -> dict[str, Any]:
        """The options that decide the result."""
        unused = {name for name in LATER_OPTIONS if getattr(self, name) == getattr(Config, name)}
        return {name: value for name, value in self.to_dict().items() if name not in {*MACHINE_OPTIONS, *unused}}

    @property
    def statistics(self) -> tuple[str, ...]:
        """Those that batch norm uses in evaluation, one after another: "global", "batch" and "site"."""
        return STATISTICS[self.evaluate_with]

    def evaluates(self, round: int) -> bool:
        """Whether an evaluation follows this round: every few, the last, and all that the result is a mean of."""
        counted = 10 if self.result == "mean-last-10" else 1
        return round >= self.rounds - counted or (round + 1) % self.evaluate_every == 0

    def to_toml(self) -> str:
        """The complete configuration, with every option's meaning beside it."""
        lines = ["# A Fedkeel run: 'fedkeel run --config THIS' repeats it.", ""]
        for entry in fields(self):
            if entry.metadata["heading"]:
                lines.append(f"# --- {entry.metadata['heading']} ---")
            lines.append(f"{entry.name} = {_toml(getattr(self, entry.name))}  # {entry.metadata['help']}")
        return "\n".join(lines) + "\n"


def option_names() -> list[str]:
    return [entry.name for entry in fields(Config)]


def refuse_unknown(given: Mapping[str, Any]) -> None:
    names = option_names()
    for name in given:
        if name not in names:
            if name in ("out", "output", "output_dir"):
                raise FedkeelError(
                    f"There is no option '{name}': a place is given with --out, in Python as directory=PATH."
                )
            near = nearest(ELSEWHERE.get(name, str(name)), names, otherwise="see 'fedkeel run --help'.")
            raise FedkeelError(f"There is no option '{name}': {near}")


def from_dict(given: Mapping[str, Any]) -> Config:
    """A configuration from a table, e.g. of a TOML file; unknown names are refused."""
    refuse_unknown(given)
    return Config(**given)


def read(path: str | Path) -> dict[str, Any]:
    """The options that a TOML file sets. Dashes in names are taken as underscores."""
    table, _ = read_table(path, "configuration")
    refuse_unknown(table)
    return table


def read_table(path: str | Path, what: str) -> tuple[dict[str, Any], dict[str, int]]:
    """What a flat TOML file sets, and in which line each name stands."""
    try:
        text = Path(path).read_bytes().decode()
        table = tomllib.loads(text)
    except OSError as error:
        raise FedkeelError(f"The {what} '{path}' cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:  # also what is not text, a number of pages, brackets without end
        raise FedkeelError(f"The {what} '{path}' is not valid TOML: {error}.") from error
    begins = [line.partition("=")[0].strip().replace("-", "_") for line in text.split("\n")]
    for name in table:
        if "-" in name and name.replace("-", "_") in table:
            raise FedkeelError(f"The {what} '{path}' gives '{name}' twice, also with '_': keep one.")
    table = {name.replace("-", "_"): value for name, value in table.items()}
    return table, {name: begins.index(name) + 1 for name in table if name in begins}


def _toml(value: Any) -> str:
    # JSON's strings, numbers and booleans are TOML's too, but for floats without a point such as 1e-05.
    # Of the control characters, JSON leaves one as it is that TOML wants escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
