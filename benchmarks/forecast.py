"""What the model of `rounds.py` says of machines that nobody has here: 8 and 64 GPUs, and a thousand devices a round.

    python benchmarks/forecast.py

Nothing of this is measured but the constants: those of a core, fitted by `rounds.py`, and the speeds of one H200, from
docs/benchmarks.md. What else goes in are the assumptions below, which are printed beside what comes out.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rounds import CNN, FITTED, PARAMETERS, Constants, Round, makespan

from fedkeel.engine.executors.ray.crew import SLOTS

GIGABIT = 1e9 / 8  # bytes a second
DAY = 86_400


@dataclass(frozen=True)
class Card:
    """A client's work on one GPU: client-steps a second with many clients side by side, and of one of them alone."""

    name: str
    many: float
    alone: float
    steps: int  # of a client, on average
    parameters: int


# `many` is of docs/benchmarks.md; so is `alone` of the last row; of the others it is `many` of ten clients, by ten.
CARDS = (
    Card("`simple_cnn`, batch 4", 29_200, 16_741 / 10, 125, PARAMETERS[CNN]),
    Card("ResNet-18, 32 px, batch 64, bf16", 1_887, 1_887 / 10, 40, 11_181_642),
    Card("ResNet-18, 224 px, batch 16, bf16", 615, 399, 160, 11_181_642),
)


@dataclass(frozen=True)
class Cluster:
    """Assumptions: machines of eight GPUs, a link of 25 Gbit/s between them that is used to the full, sizes of clients
    spread like exp(0.5 z)."""

    gpus: int
    clients: int = 1000
    on_node: int = 8
    link: float = 25 * GIGABIT
    spread: float = 0.5

    @property
    def nodes(self) -> int:
        return math.ceil(self.gpus / self.on_node)


def sizes(count: int, spread: float, seed: int) -> np.ndarray:
    """With the mean 1."""
    return np.random.default_rng(seed).lognormal(-spread * spread / 2, spread, count)


def on_gpus(card: Card, cluster: Cluster, constants: Constants, speeds: Sequence[float] = ()) -> dict[str, float]:
    """Seconds of a round, by what they go into."""
    work = card.steps * sizes(cluster.clients, cluster.spread, seed=0) / card.many
    speeds = speeds or [1.0] * cluster.gpus
    compute = makespan(work.tolist(), speeds, SLOTS, card.alone / card.many)
    model, nodes = 4 * card.parameters, cluster.nodes
    driver = constants.driver * cluster.clients
    down, up = (nodes - 1) * model / cluster.link, 2 * (nodes - 1) * model / cluster.link
    merge = constants.merge * card.parameters * (min(cluster.gpus, cluster.on_node) + nodes * (nodes > 1))
    once = constants.round
    return {
        "compute": compute,
        "evenly": float(work.sum()) / sum(speeds),
        "driver": driver,
        "down": down,
        "up": up,
        "merge": merge,
        "once": once,
        "round": max(compute, driver) + down + up + merge + once,
    }


def in_a_tree(card: Card, cluster: Cluster, constants: Constants) -> float:
    """Seconds of adding up over machines, their link included, if pairs of them did: levels instead of a queue."""
    levels = math.ceil(math.log2(cluster.nodes)) if cluster.nodes > 1 else 0
    return levels * (2 * 4 * card.parameters / cluster.link + 2 * constants.merge * card.parameters)


def bottleneck(parts: dict[str, float]) -> str:
    names = {
        "compute": "GPUs",
        "driver": "the driver",
        "down": "broadcast",
        "up": "sums on the link",
        "merge": "adding up",
        "once": "the round itself",
    }
    return names[max(names, key=lambda part: parts[part])]


# -- devices -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Devices:
    """Assumptions: medians, and how far they spread (as exp(spread z)). Speeds are in cores of the machine measured."""

    clients: int = 1000
    images: float = 100
    images_spread: float = 0.8
    speed: float = 0.5
    speed_spread: float = 0.6
    down: float = 0.02 * GIGABIT
    up: float = 0.005 * GIGABIT
    link_spread: float = 0.8
    silent: float = 0.1  # of those asked never answer
    server_link: float = 10 * GIGABIT
    server_cores: int = 1  # the round loop is one process


def answers(devices: Devices, image: float, model: int, asked: int, seed: int) -> np.ndarray:
    """Seconds after which each device has answered, in order; those that never do are not among them."""
    draw = np.random.default_rng(seed)

    def spread(median: float, by: float) -> np.ndarray:
        return median * np.exp(by * draw.standard_normal(asked))

    train = spread(devices.images, devices.images_spread) * image / spread(devices.speed, devices.speed_spread)
    way = model / spread(devices.down, devices.link_spread) + model / spread(devices.up, devices.link_spread)
    return np.sort((train + way)[draw.random(asked) >= devices.silent])


def waits(devices: Devices, image: float, model: int, draws: int = 50) -> dict[str, float]:
    """Seconds that the server waits, by what it waits for: medians over rounds."""
    rounds = [answers(devices, image, model, devices.clients, seed) for seed in range(draws)]
    more = [answers(devices, image, model, round(1.3 * devices.clients), seed) for seed in range(draws)]
    return {
        "half": statistics.median(float(np.median(times)) for times in rounds),
        "all": statistics.median(float(times[-1]) for times in rounds),
        "nine tenths": statistics.median(float(times[int(0.9 * len(times))]) for times in rounds),
        "first of 1.3": statistics.median(float(times[devices.clients - 1]) for times in more),
        "late at 60 s": statistics.median(float((times > 60).mean()) for times in rounds),
    }


def at_server(devices: Devices, parameters: int, constants: Constants) -> dict[str, float]:
    """What a round costs the server: seconds of its link each way, of its one process, and the bytes it holds."""
    model = 4 * parameters
    of_client = constants.of_driver(Round(CNN, (), 1, sums=False)) - constants.update * PARAMETERS[CNN]
    return {
        "link": devices.clients * model / devices.server_link,
        "process": devices.clients * (of_client + constants.update * parameters),
        "held": devices.clients * model,
        "tree": 32 * 2 * model / devices.server_link,
    }


# -- telling -----------------------------------------------------------------------------------------------------------
def tell_gpus(constants: Constants) -> None:
    print("| work | GPUs | GPUs' time, s | if evenly full | driver | broadcast | sums | adding up | round | most |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|---|")
    for card in CARDS:
        for gpus in (1, 8, 64):
            p = on_gpus(card, Cluster(gpus), constants)
            parts = [p[part] for part in ("compute", "evenly", "driver", "down", "up", "merge", "round")]
            told = " | ".join(f"{part:.2f}" if part >= 0.005 else "0" for part in parts)
            print(f"| {card.name} | {gpus} | {told} | {bottleneck(p)} |")
    for card in CARDS[1:]:
        cluster = Cluster(64)
        p, tree = on_gpus(card, cluster, constants), in_a_tree(card, cluster, constants)
        star = p["up"] + constants.merge * card.parameters * cluster.nodes
        print(f"Tree of 8 machines, {card.name}: {tree:.2f} s instead of {star:.2f} to add up over machines")
    card, mixed = CARDS[2], [1.0] * 4 + [0.5] * 4
    p = on_gpus(card, Cluster(8), constants, mixed)
    even = card.steps * Cluster(8).clients / 8 / (card.many / 2)
    print(f"Four of 8 GPUs of half the speed, {card.name}: {p['compute']:.1f} s; an even share for each: {even:.1f} s")
    print(f"Clients a second that the driver can take: {1 / constants.driver:.0f}")


def tell_devices(constants: Constants) -> None:
    devices, budget = Devices(), DAY / 1000
    print(f"\n1,000 clients a round, 1,000 rounds a day: {budget:.0f} s for each")
    print(
        "| model | half | nine tenths | all who answer | first 1,000 of 1,300 | late at 60 s | link | process | held |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    for name, parameters in (("`simple_cnn`", PARAMETERS[CNN]), ("11.2 M parameters", CARDS[1].parameters)):
        w = waits(devices, constants.image_cnn, 4 * parameters)
        s = at_server(devices, parameters, constants)
        shown = [f"{w[key]:.0f} s" for key in ("half", "nine tenths", "all", "first of 1.3")]
        shown += [
            f"{w['late at 60 s']:.0%}",
            f"{s['link']:.1f} s",
            f"{s['process']:.1f} s",
            f"{s['held'] / 1e9:.1f} GB",
        ]
        print(f"| {name} | {' | '.join(shown)} |")
        held = 8 * parameters / 1e9
        print(f"  In a tree of 32 aggregators: {s['tree']:.2f} s of the root's link, {held:.2f} GB held by each")


def main() -> None:
    constants = Constants(**json.loads(FITTED.read_text()))
    print(f"Assumed: {Cluster(8)}\nAssumed: {Devices()}\n")
    tell_gpus(constants)
    tell_devices(constants)


if __name__ == "__main__":
    main()
