"""The options of a run as keywords, for editors and type checkers.

Written by .ci/keywords from the fields of `Config`, which are the only list of options: change them there.
"""

from __future__ import annotations

from typing import Literal, TypedDict

from torch import nn

from fedkeel.data.federation import Federation


class MachineOptions(TypedDict, total=False):
    """What may change when a run is resumed."""

    round_timeout: float
    metrics: str
    predictions: bool
    record: str
    record_every: int
    executor: str
    workers: int
    threads: int
    device: str
    ray_address: str
    ray_cores: int
    ray_actors: int
    checkpoint_every: int


class Options(MachineOptions, total=False):
    """What every run takes."""

    data: str
    partition: str
    unseen: str
    subsample: int
    weights: str
    rounds: int
    participation: float
    weighting: Literal["samples", "uniform"]
    min_clients: int
    stateless: bool
    robust: str
    dp: Literal["none", "central", "local"]
    dp_clip: float
    dp_noise: float
    dp_delta: float
    local_epochs: int
    batch_size: int
    drop_last: bool
    loss: str
    optimizer: str
    learning_rate: float
    momentum: float
    weight_decay: float
    schedule: str
    clip_norm: float
    evaluate_every: int
    evaluate_with: Literal["global", "batch", "both", "site", "all"]
    site_images: int
    site_prior: float
    site_always: bool
    evaluate_on: Literal["test", "validation"]
    evaluate_clients: int
    evaluation_batch: int
    result: Literal["last", "mean-last-10", "best-validation"]
    select_by: str
    patience: int
    min_delta: float
    precision: Literal["float32", "tf32", "bf16"]


class RunOptions(Options, total=False):
    """Of `fedkeel.simulate`."""

    seed: int


class CompareOptions(Options, total=False):
    """Of `fedkeel.compare`: of all its runs."""

    model: str | nn.Module
    federation: Federation
