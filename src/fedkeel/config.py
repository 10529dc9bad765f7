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

from fedkeel.errors import FedkeelError, nearest
from fedkeel.options import Count, Needs, NotNegative, Number, Positive, PositiveShare, Range, Share, check_fields

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PYTHON_OBJECT = "(given in Python)"  # in place of a name
RAY_OPTIONS = ("ray_address", "ray_cores", "ray_actors")
# What does not change the result, and so may change when a run is resumed.
MACHINE_OPTIONS = (
    *("executor", "workers", "threads", "device", "checkpoint_every"),
    *RAY_OPTIONS,
    *("metrics", "predictions", "record", "record_every", "round_timeout"),
)

# The statistics that an evaluation tests under; what is told of first is of the first of them.
STATISTICS: dict[str, tuple[str, ...]] = {
    "global": ("global",),
    "batch": ("batch",),
    "both": ("global", "batch"),
    "site": ("site",),
    "all": ("global", "batch", "site"),
}


def first_of(statistics: Iterable[str]) -> str:
    """Of those that were tested under, the ones that results are told of.

    >>> first_of(["batch", "global"]), first_of(["site"])
    ('global', 'site')
    """
    return min(statistics, key=STATISTICS["all"].index, default="global")


def from_one(round: int) -> int:
    """A round for a sentence, a table or an axis. Run directories, options and the Python API count from 0.

    >>> f"Round {from_one(0)} of 10"
    'Round 1 of 10'
    """
    return round + 1


# -- where options do nothing: `fedkeel.engine.idle` says what a run comes to ----------------------------------------
PRIVATE = Needs(lambda run: run.dp != "none", "without --dp central or --dp local")
BATCHES = Needs(lambda run: run.dp != "local", "with --dp local, which takes samples one by one")
CALIBRATED = Needs(lambda run: run.evaluate_with in ("site", "all"), "without --evaluate-with site")
BEST = Needs(lambda run: run.result == "best-validation" or run.patience, "without --result best-validation")
PATIENT = Needs(lambda run: run.patience, "without --patience")
RECORDED = Needs(lambda run: run.record, "without --record")
WEIGHED = Needs(lambda run: run.weighed, "where 'central', the method or 'robust' decides what clients count for")
SEVERAL = Needs(lambda run: not run.pooled, "with 'central', which makes one client of all")
BY_NUMBER = Needs(
    lambda run: not run.pooled and run.participation == 1 and run.dp != "central",
    "beside --participation, with --dp central, which goes by that, or with 'central', which makes one client of all",
)
BY_STEPS = Needs(lambda run: run.local_epochs == 1, "beside --local-epochs")
PERSONAL = Needs(lambda run: run.personal or CALIBRATED.holds(run), "where all clients have the same model")
IMAGES = Needs(lambda run: not run.network, "over a network, where images stay at the sites")
TESTED = Needs(lambda run: not run.network, "over a network, where sites are tested on what they hold out")
ON_RAY = Needs(lambda run: run.executor == "ray", "without --executor ray")
REMOTE = Needs(lambda run: run.network or run.executor == "ray", "without --executor ray or a network")
CROWD = Needs(
    lambda run: run.executor in ("processes", "cuda", "ray") or run.workers == 1,
    "without --executor processes, cuda or ray, and in runs beside others, of --jobs",
)
ON_GPU = Needs(lambda run: run.device != "cpu" or run.precision == "float32", "on the CPU, which computes in float32")


def taken(name: str) -> Needs:
    """Of what the local optimizer may take; 0 is what one without it has."""
    return Needs(lambda run: name in run.taken or not getattr(run, name), "with this --optimizer, which has none")


def alone(name: str) -> Needs:
    """Of what the brackets of the data set may say as well."""
    return Needs(lambda run: name not in run.inside, "beside the brackets of 'data', which say it too")


def option(default: Any, help: str, needs: Needs | None = None, *, heading: str = "") -> Any:
    """A field with its help text, what it has no effect without, so that a run where that is not so is refused, and the
    heading of the section of `--help` and `config.toml` that it begins."""
    return field(default=default, metadata={"help": help, "heading": heading, "needs": needs})


@dataclass(frozen=True)
class Config:
    """The options of a run. Names with options (`fedprox(mu=0.1)`) are written as in `fedkeel.spec`.

    An option that does not exist, or a value that cannot be, raises `FedkeelError` at once.

    >>> config = Config(method="fedprox(mu=0.1)", rounds=10)
    >>> config.replace(rounds=20).rounds, config.learning_rate
    (20, 0.01)
    """

    method: str = option("fedavg", "method, or several joined by '+': 'fedprox(mu=0.1)+gn'", heading="what")
    data: str = option("digits-shift", "data set, with options: 'folder(root=./images, size=64)'")
    partition: str = option(
        "domains", "how domains become clients: domains, 'dirichlet(alpha=0.3, clients=10)'", alone("partition")
    )
    unseen: str = option("", "domains that are only evaluated, never trained on, separated by commas", alone("unseen"))
    subsample: Number = option(0, "equal number of training samples per client; 0 keeps all", alone("subsample"))
    model: str = option("simple_cnn", "network, with options: 'resnet18(stem=small)'")
    weights: str = option("", "a file (.safetensors, .pth, .pt) to start from; of timm:NAME 'pretrained', or a tag")

    rounds: Count = option(30, "communication rounds", heading="rounds")
    participation: PositiveShare = option(1.0, "fraction of clients sampled each round, at least one", SEVERAL)
    clients_per_round: Number = option(0, "clients sampled each round; 0 goes by 'participation'", BY_NUMBER)
    weighting: Literal["samples", "uniform"] = option("samples", "weight of a client in the mean", WEIGHED)
    min_clients: Count = option(1, "updates without which a round does not count")
    round_timeout: Positive = option(
        3600.0, "seconds that a site or an actor of ray has for its part of a round", REMOTE
    )
    stateless: bool = option(False, "clients keep nothing between rounds; methods that need it are refused")

    robust: str = option(
        "", "rules against clients that lie: 'norm-clip+median', see 'list robust'", SEVERAL, heading="trust"
    )
    dp: Literal["none", "central", "local"] = option(
        "none", "differential privacy: of clients with a trusted server (central), or of samples (local)"
    )
    dp_clip: Positive = option(1.0, "norm that a client's change (central) or a gradient (local) is cut to", PRIVATE)
    dp_noise: Positive = option(1.0, "noise on their sum, in units of 'dp_clip'", PRIVATE)
    dp_delta: Annotated[float, Range(above=0, most=0.5)] = option(
        1e-5, "probability at which 'epsilon' is reported", PRIVATE
    )

    local_epochs: Count = option(1, "passes over the local data in a round", heading="local training")
    local_steps: Number = option(0, "local steps in a round, of as many passes as it takes; 0: whole passes", BY_STEPS)
    batch_size: Count = option(32, "samples in a local step")
    drop_last: bool = option(False, "drop the last incomplete batch of an epoch (kept by default)", BATCHES)
    loss: str = option("cross-entropy", "what is trained on: 'cross-entropy(class_weights=balanced)'")
    optimizer: str = option("sgd", "local optimizer, new in every round: any of torch.optim, 'adam(betas=(0.9, 0.99))'")
    learning_rate: Positive = option(0.01, "before the schedule")
    momentum: Share = option(0.9, "of sgd and rmsprop", taken("momentum"))
    weight_decay: NotNegative = option(0.0, "of optimizers that have one", taken("weight_decay"))
    schedule: str = option(
        "constant",
        "the learning rate from round to round: cosine, 'exponential(decay=0.99)', 'warmup(rounds=5, then=cosine)'",
    )
    clip_norm: NotNegative = option(0.0, "clip the norm of all gradients together; 0 does not")

    evaluate_every: Count = option(
        1, "rounds between evaluations, beside those that the result needs", heading="evaluation"
    )
    evaluate_with: Literal["global", "batch", "both", "site", "all"] = option(
        "global", "statistics that batch norm uses in evaluation; site: each client's, calibrated on samples of its own"
    )
    site_images: Number = option(64, "training samples that a client is calibrated on; 0 is all of them", CALIBRATED)
    site_prior: NotNegative = option(16.0, "samples that the federation's statistics are worth there", CALIBRATED)
    site_always: bool = option(False, "calibrate also where the class mix explains the distance", CALIBRATED)
    evaluate_on: Literal["test", "validation"] = option(
        "test", "samples that accuracies are of; with 'validation' nothing of a test set is looked at", TESTED
    )
    evaluate_clients: Number = option(
        1000, "most clients that a method with personal layers is tested on; 0 is all of them", PERSONAL
    )
    evaluation_batch: Count = option(256, "samples in an evaluation step")
    result: Literal["last", "mean-last-10", "best-validation"] = option("last", "round whose accuracy is the result")
    select_by: str = option("accuracy", "what the best round is best by: accuracy, loss or a metric", BEST)
    patience: Number = option(0, "stop after so many evaluations without a better validation; 0 does not stop")
    min_delta: NotNegative = option(0.0, "by how much the validation must be better, for 'patience'", PATIENT)
    metrics: str = option("", "beside accuracy and loss, separated by commas: 'auc,top(k=3)', see 'list metrics'")
    predictions: bool = option(False, "keep what the resulting model says of every test image, in predictions/", IMAGES)
    record: str = option("", "diagnostics to record while training: 'statistics-divergence,loss-gap'", IMAGES)
    record_every: Count = option(10, "rounds between records; the first and the last are always recorded", RECORDED)

    seed: Number = option(0, "of every random choice", heading="machine")
    executor: str = option("auto", "where clients run: auto, serial, processes, cuda or ray")
    workers: Number = option(0, "worker processes (0: one per core), or clients at once on a GPU (0: what fits)", CROWD)
    threads: Number = option(0, "of a local step on the CPU (0: one in each worker process, all cores under serial)")
    device: str = option("auto", "auto, cpu, cuda or cuda:N")
    ray_address: str = option("local", "cluster of ray: local (a new one), auto (of this machine) or HOST:PORT", ON_RAY)
    ray_cores: Number = option(0, "cores of each actor of ray on a CPU (0: one)", ON_RAY)
    ray_actors: Number = option(0, "most actors of ray (0: as many as the cluster has room for)", ON_RAY)
    precision: Literal["float32", "tf32", "bf16"] = option("tf32", "arithmetic on a GPU: fewer bits are faster", ON_GPU)
    checkpoint_every: Count = option(1, "rounds between checkpoints; the last round has one in any case")

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
        """The options that decide the result. Those that came later count where they are set: runs that were made
        before them stay what they are."""
        found = {name: value for name, value in self.to_dict().items() if name not in MACHINE_OPTIONS}
        return {
            name: value for name, value in found.items() if value or name not in ("clients_per_round", "local_steps")
        }

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
            # JSON's values are TOML's too, but for one control character that JSON leaves as it is.
            value = json.dumps(getattr(self, entry.name), ensure_ascii=False).replace("\x7f", "\\u007f")
            lines.append(f"{entry.name} = {value}  # {entry.metadata['help']}")
        return "\n".join(lines) + "\n"


def option_names() -> list[str]:
    return [entry.name for entry in fields(Config)]


def refuse_unknown(given: Mapping[str, Any]) -> None:
    for name in given:
        if name not in option_names():
            near = nearest(str(name), option_names(), otherwise="see 'fedkeel run --help'.")
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
    table = {name.replace("-", "_"): value for name, value in table.items()}
    return table, {name: begins.index(name) + 1 for name in table if name in begins}
