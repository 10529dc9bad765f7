"""Where the time of a round goes on one GPU, and how near it comes to what the card could do.

    python benchmarks/account.py [row ...] [--methods fedavg greg] [--set workers=8] [--json FILE]

For each of these GPU rows of `fedkeel bench`: the wall clock of a warm round without a profiler; then one warm round
under it: the sum of all kernel times, how much of the round some kernel was running (busy), how many ran at once on
average (the sum over the union of their intervals), the share of each class of kernels, and the kernels that took most.

Two floors stand beside it. *Arithmetic*: the FLOPs of the convolutions and matrix products of one step, counted as it
runs eagerly, over the card's peak. *Memory*: what every operation of that step reads and writes, each tensor once per
operation that touches it, over the card's bandwidth: an estimate, since caches and fused operations move less and a
kernel may read its input twice. What runs in a Triton kernel of Fedkeel's own is in neither.

A profiler slows the host and thins out the overlap, so compare shares, not the profiled wall clock.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

# The profiler must not detach and attach again between two rounds: captured graphs do not survive that everywhere.
os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")
os.environ.setdefault("TEARDOWN_CUPTI", "0")

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from fedkeel.cli.bench import read_options
from fedkeel.core.messages import Broadcast
from fedkeel.data.federation import Federation
from fedkeel.engine.setup import Setup, prepare
from fedkeel.errors import unknown
from fedkeel.experiments.bench import ROWS, Benchmark, Executed, made_up
from fedkeel.experiments.bench.sides import configured

# NVIDIA's figures for the H200 SXM, dense: TFLOP/s by `precision`, and TB/s of its memory.
PEAK_TFLOPS = {"float32": 67.0, "tf32": 494.0, "bf16": 989.0}
BANDWIDTH_TB = 4.8
TOP = 12


# -- from kernels to an account ------------------------------------------------------------------------------------
class Kernel(NamedTuple):
    """One kernel, copy or fill on the GPU, in microseconds of any clock."""

    name: str
    start: float
    duration: float
    stream: int


MATRIX, NORMALISATION, POOLING = "convolution, matrix product", "normalisation", "pooling"
COPY, OPTIMISER, REDUCTION = "gather, copy, layout", "optimiser", "reduction, loss"
ELEMENTWISE, OTHER = "elementwise, activation", "other"

# A kernel is of the first class here whose pattern is found in its name. Order matters: 'triton_poi_fused_convolution'
# adds a bias and is no convolution, a foreach copy is no optimiser, and the names of matrix products have anything.
CLASSES = [
    (MATRIX, r"cutlass|xmma|nvjet|sgemm|splitkreduce|triton_tem|winograd|implicit_conv"),
    (NORMALISATION, r"batch_?norm|bn_fw|bn_bw|welford|layer_?norm|group_?norm|rowwisemoments"),
    (
        NORMALISATION,
        r"hybrid_|standardise_|paired_|partial_(moments|products)",
    ),  # of Fedkeel's own Triton kernels
    (POOLING, r"pool"),
    (ELEMENTWISE, r"triton_poi"),
    (REDUCTION, r"triton_red|triton_per"),
    (COPY, r"memcpy|memset|tonhwc|tonchw|transpose|permute|converttensor|copy|cat_?array|fill_?functor|zero_?functor"),
    (COPY, r"index_?select|index_elementwise|index_kernel|index_put|gather|scatter|arange|flip"),
    (OPTIMISER, r"fused_?sgd|fused_?adam|lpnorm|multi_tensor_apply"),
    (REDUCTION, r"softmax|nll_loss|reduce|reduction"),
    (ELEMENTWISE, r"elementwise|threshold|relu|dropout|distribution"),
    (MATRIX, r"conv|gemm|gemv|fprop|dgrad|wgrad|im2col|cublas|cudnn|fft"),
]


@functools.cache
def kernel_class(name: str) -> str:
    """The class of a kernel by its name.

    >>> kernel_class("void cudnn::ops::nchwToNhwcKernel<float, float, float, false>")
    'gather, copy, layout'
    """
    return next((kind for kind, pattern in CLASSES if re.search(pattern, name, re.IGNORECASE)), OTHER)


def union(kernels: Iterable[Kernel]) -> float:
    """How long at least one of them was running, in microseconds."""
    total, until = 0.0, float("-inf")
    for kernel in sorted(kernels, key=lambda kernel: kernel.start):
        stop = kernel.start + kernel.duration
        total += max(0.0, stop - max(kernel.start, until))
        until = max(until, stop)
    return total


@dataclass(frozen=True)
class Group:
    """Kernels of one class or of one name."""

    name: str
    kind: str
    calls: int
    milliseconds: float
    share: float  # of all kernel time

    @property
    def microseconds(self) -> float:
        """Of one call on average."""
        return 1000 * self.milliseconds / self.calls


@dataclass(frozen=True)
class Account:
    """What the kernels of one round say. Times in milliseconds."""

    kernels: int
    kernels_per_step: float
    kernel_time: float  # sum
    busy: float  # union
    span: float  # from the start of the first to the end of the last
    wall: float  # of the profiled round
    median_microseconds: float
    streams: int
    classes: list[Group]
    top: list[Group]

    @property
    def busy_fraction(self) -> float:
        return self.busy / self.wall

    @property
    def concurrency(self) -> float:
        return self.kernel_time / self.busy if self.busy else 0.0


def account(kernels: Sequence[Kernel], *, steps: int, wall: float) -> Account:
    """The account of one round of `steps` client-steps that took `wall` milliseconds under the profiler."""
    total = sum(kernel.duration for kernel in kernels)

    def grouped(key: Callable[[Kernel], str]) -> list[Group]:
        groups: dict[str, list[Kernel]] = defaultdict(list)
        for kernel in kernels:
            groups[key(kernel)].append(kernel)
        sums = {name: sum(kernel.duration for kernel in members) for name, members in groups.items()}
        return [
            Group(
                name,
                kernel_class(groups[name][0].name),
                len(groups[name]),
                sums[name] / 1000,
                sums[name] / total if total else 0.0,
            )
            for name in sorted(sums, key=lambda name: -sums[name])
        ]

    starts = [kernel.start for kernel in kernels]
    stops = [kernel.start + kernel.duration for kernel in kernels]
    return Account(
        kernels=len(kernels),
        kernels_per_step=len(kernels) / steps,
        kernel_time=total / 1000,
        busy=union(kernels) / 1000,
        span=(max(stops) - min(starts)) / 1000 if kernels else 0.0,
        wall=wall,
        median_microseconds=statistics.median(kernel.duration for kernel in kernels) if kernels else 0.0,
        streams=len({kernel.stream for kernel in kernels}),
        classes=grouped(lambda kernel: kernel_class(kernel.name)),
        top=grouped(lambda kernel: kernel.name)[:TOP],
    )


def kernels_of(trace: dict[str, Any]) -> list[Kernel]:
    """The GPU's part of a trace as `export_chrome_trace` writes it."""
    return [
        Kernel(
            event["name"], float(event["ts"]), float(event.get("dur", 0.0)), int(event.get("args", {}).get("stream", 0))
        )
        for event in trace["traceEvents"]
        if event.get("ph") == "X" and event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]


def short(name: str, width: int = 88) -> str:
    """A kernel's name without what all of them have."""
    for noise in ("void ", "at::native::", "(anonymous namespace)::", "at_cuda_detail::", "cutlass::"):
        name = name.replace(noise, "")
    return name if len(name) <= width else name[: width - 3] + "..."


# -- what a step asks of the card ----------------------------------------------------------------------------------
class Bytes(TorchDispatchMode):
    """Sums what operations read and write: each tensor argument, and each result that is no view of one."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not moves_nothing(func):
            self.total += sum(map(extent, tree_leaves((args, kwargs or {}))))
            # What is written in place comes as an argument; anything else that comes out is new.
            written = [
                argument
                for place, argument in zip(func._schema.arguments, args, strict=False)
                if place.alias_info is not None and place.alias_info.is_write
            ]
            written += [
                (kwargs or {})[place.name]
                for place in func._schema.arguments[len(args) :]
                if place.name in (kwargs or {}) and place.alias_info is not None and place.alias_info.is_write
            ]
            self.total += sum(map(extent, tree_leaves(written)))
            if not any(place.alias_info is not None for place in func._schema.returns):
                self.total += sum(map(extent, tree_leaves(result)))
        return result


def moves_nothing(func: Any) -> bool:
    """Views, and memory that is only set aside."""
    name = func._schema.name.partition("::")[2]
    if name.startswith(("empty", "new_empty", "_unsafe_view", "lift", "_reshape_alias")) or name == "detach":
        return True
    returns = func._schema.returns
    return bool(returns) and all(place.alias_info is not None and not place.alias_info.is_write for place in returns)


def extent(value: Any) -> int:
    """Bytes of a tensor in memory; a dimension that is only repeated lies there once."""
    if not isinstance(value, Tensor):
        return 0
    count = value.element_size()
    for length, stride in zip(value.shape, value.stride(), strict=True):
        count *= length if stride else min(length, 1)
    return count


class Cost(NamedTuple):
    """Of one local step."""

    flops: int
    moved: int  # bytes


def step_cost(setup: Setup, size: int) -> Cost:
    """FLOPs and bytes of one eager step on a batch of `size`, in a round where every part of the method is on."""
    worker = setup.worker
    name = setup.federation.clients[0].name
    layout, model = worker.layout, worker.model
    weights, running = layout.extract(model, layout.weights), layout.extract(model, layout.statistics)
    client = worker.begin(name, Broadcast(1, 100, weights, running), {})
    plan = worker.plan(name, 1)
    whole = [batch for batch in worker.store.batches(plan, setup.federation.train_transform) if len(batch.y) == size]
    worker.step(client, whole[0])  # what is made on the first step is no part of the others
    with FlopCounterMode(display=False) as flops:
        worker.step(client, whole[0])
    with Bytes() as moved:
        worker.step(client, whole[0])
    return Cost(flops.get_total_flops(), moved.total)


# -- on the card ---------------------------------------------------------------------------------------------------
def warm(row: Benchmark, federation: Federation, executor: str, options: dict[str, Any]) -> Executed:
    """A row whose next round is like all others: in round 0 methods may do less, and the first after it captures."""
    side = Executed(row, federation, executor, **options)
    side.round()
    return side


def recorded(one_round: Callable[[], float]) -> tuple[list[Kernel], float]:
    """The kernels of one round that says how many seconds it took, and that in milliseconds, under the profiler."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        wall = 1000 * one_round()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return kernels_of(json.loads(path.read_text(errors="replace"))), wall


# -- telling ---------------------------------------------------------------------------------------------------------
def lines(
    title: str, made: Account, cost: Cost, *, plain_wall: float, steps: int, peak: float, bandwidth: float
) -> list[str]:
    """The account of one row as text. `peak` in TFLOP/s, `bandwidth` in TB/s, `plain_wall` without the profiler."""
    arithmetic = 1000 * steps * cost.flops / (peak * 1e12)
    memory = 1000 * steps * cost.moved / (bandwidth * 1e12)
    text = [
        f"== {title}: {steps} client-steps a round",
        f"round, not profiled      {plain_wall:10.2f} ms   {1000 * steps / plain_wall:,.0f} steps/s, "
        f"{1000 * plain_wall / steps:.1f} us a step",
        f"round, profiled          {made.wall:10.2f} ms   {made.wall / plain_wall:.2f} times as long",
        f"kernels, sum             {made.kernel_time:10.2f} ms   {made.kernel_time / plain_wall:.2f} times the round; "
        f"{made.kernels:,} kernels, {made.kernels_per_step:.1f} a step, half of them under "
        f"{made.median_microseconds:.1f} us",
        f"some kernel running      {made.busy:10.2f} ms   busy {100 * made.busy_fraction:.0f} % of the profiled round "
        f"({100 * made.busy / made.span if made.span else 0:.0f} % from its first kernel to its last)",
        f"kernels at once          {made.concurrency:10.2f}      on {made.streams} streams",
        f"floor, arithmetic        {arithmetic:10.2f} ms   {100 * arithmetic / plain_wall:.1f} % of the round; "
        f"{cost.flops / 1e9:.3f} GFLOP a step at {peak:g} TFLOP/s",
        f"floor, memory            {memory:10.2f} ms   {100 * memory / plain_wall:.1f} % of the round; "
        f"{cost.moved / 1e6:.1f} MB a step at {bandwidth:g} TB/s",
        "",
        f"{'class':<30}{'share':>7}{'ms':>10}{'calls/step':>12}{'us/call':>9}",
    ]
    text += [
        f"{g.name:<30}{100 * g.share:6.1f}%{g.milliseconds:10.2f}{g.calls / steps:12.1f}{g.microseconds:9.1f}"
        for g in made.classes
    ]
    text += ["", f"{'share':>6}{'ms':>10}{'calls/step':>12}{'us/call':>9}  kernel"]
    text += [
        f"{100 * g.share:5.1f}%{g.milliseconds:10.2f}{g.calls / steps:12.1f}{g.microseconds:9.1f}  "
        f"[{g.kind.partition(',')[0]}] {short(g.name)}"
        for g in made.top
    ]
    return [*text, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", default=["small10", "resnet32", "epoch"], metavar="row")
    parser.add_argument("--methods", nargs="+", default=["fedavg"])
    parser.add_argument("--executor", default="cuda")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="other options of the run")
    parser.add_argument("--rounds", type=int, default=5, help="rounds timed without the profiler; their median counts")
    parser.add_argument("--peak", type=float, help="TFLOP/s (default: the H200's for the row's precision)")
    parser.add_argument("--bandwidth", type=float, default=BANDWIDTH_TB, help="TB/s (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="also write everything to this file")
    options = parser.parse_args()
    on_gpu = [name for name, row in ROWS.items() if row.group == "gpu"]
    for name in options.rows:
        if name not in on_gpu:
            sys.exit(unknown("GPU row", name, on_gpu))
    if not torch.cuda.is_available():
        sys.exit("An account is of a GPU, and torch sees none on this machine.")
    others = read_options(options.set)
    print(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}", flush=True)

    # All plain timings first: once the profiler is attached it stays, and may slow what comes after.
    cases: list[tuple[str, Benchmark, Federation, float, Cost]] = []
    for name in options.rows:
        federation = made_up(ROWS[name])
        for method in options.methods:
            row = replace(ROWS[name], method=method, precision=others.get("precision", ROWS[name].precision))
            side = warm(row, federation, options.executor, others)
            wall = 1000 * statistics.median(side.round() for _ in range(options.rounds))
            side.close()
            counted = prepare(configured(row, "serial"), federation=federation)
            cost = step_cost(counted, row.batch)
            del counted
            torch.cuda.empty_cache()
            cases.append((name, row, federation, wall, cost))
            print(f"{name} {method}: {wall:.2f} ms a round", flush=True)
    print(flush=True)

    recorded(lambda: float(torch.ones(1, device="cuda").sum()))  # attach before the graphs are captured
    documents = []
    for name, row, federation, wall, cost in cases:
        side = warm(row, federation, options.executor, others)
        recorded(side.round)  # the profiler has a first time of its own
        kernels, profiled = recorded(side.round)
        side.close()
        if not kernels:
            print(f"== {name}, {row.method}: the profiler recorded no kernels\n", flush=True)
            continue
        steps = row.clients * row.steps
        made = account(kernels, steps=steps, wall=profiled)
        peak = options.peak or PEAK_TFLOPS[row.precision]
        title = f"{name}, {row.method}, {row.precision}"
        told = lines(title, made, cost, plain_wall=wall, steps=steps, peak=peak, bandwidth=options.bandwidth)
        print("\n".join(told), flush=True)
        ratios = {"busy_fraction": made.busy_fraction, "concurrency": made.concurrency}
        documents.append(
            {"row": name, **asdict(row), "wall": wall, "cost": cost._asdict(), "account": asdict(made) | ratios}
        )
    if options.json:
        Path(options.json).write_text(json.dumps(documents, indent=1) + "\n")


if __name__ == "__main__":
    main()
