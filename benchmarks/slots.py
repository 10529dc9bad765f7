"""How fast local training runs on one GPU: the usual loop against Fedkeel's executors, in the same process.

    python benchmarks/slots.py [row ...] [--executors serial cuda] [--compile]

The usual loop is one client after another, eager PyTorch, data already on the GPU, the same model, batches and
optimiser. Every figure is client-steps per second, measured after a warm-up round, with the GPU synchronised.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from fedkeel.config import Config
from fedkeel.data.federation import Client, Federation, no_indices
from fedkeel.data.transforms import parse_transforms
from fedkeel.engine.setup import prepare
from fedkeel.messages import Broadcast, Update


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    model: str
    pixels: int
    batch: int
    clients: int
    steps: int  # per client and round
    rounds: int
    precision: str = "tf32"
    method: str = "fedavg"
    compile: bool = False


ROWS = {
    "small10": Row("simple_cnn", 32, 4, 10, 125, 4),
    "small100": Row("simple_cnn", 32, 4, 100, 125, 2),
    "resnet32": Row("resnet18", 32, 64, 10, 16, 5),
    "resnet32-bf16": Row("resnet18", 32, 64, 10, 16, 5, precision="bf16"),
    "resnet32small": Row("resnet18(stem=small)", 32, 64, 10, 16, 3, precision="bf16"),
    "resnet224": Row("resnet18", 224, 16, 4, 36, 5, precision="bf16"),
    "epoch": Row("resnet18", 224, 16, 1, 36, 5),  # what a method costs: one client alone (GReg's Table 10)
    "epoch-bf16": Row("resnet18", 224, 16, 1, 36, 5, precision="bf16"),
}


def made_up(row: Row) -> Federation:
    """Random images: speed does not depend on what is in them."""
    per_client = row.batch * row.steps
    generator = torch.Generator().manual_seed(0)
    total = per_client * row.clients
    images = torch.randint(
        0, 256, (min(total, 20_000), 3, row.pixels, row.pixels), dtype=torch.uint8, generator=generator
    )
    labels = torch.randint(0, 10, (len(images),), generator=generator)
    places = torch.arange(total) % len(images)
    clients = tuple(
        Client(f"c{i:04d}", "made-up", places[i * per_client : (i + 1) * per_client], no_indices(), torch.arange(64))
        for i in range(row.clients)
    )
    augmentation = (
        "crop(padding=4)+flip+normalise(like=cifar10)" if row.pixels == 32 else "flip+normalise(like=imagenet)"
    )
    test = "normalise(like=cifar10)"
    names = tuple(str(i) for i in range(10))
    return Federation("made-up", images, labels, names, clients, parse_transforms(augmentation), parse_transforms(test))


def usual_loop(row: Row, federation: Federation) -> float:
    """Client-steps per second of what everybody writes."""
    device = torch.device("cuda")
    config = Config(model=row.model, batch_size=row.batch, momentum=0.9, executor="serial")
    model = prepare(config, federation=federation).worker.model.to(device)
    images, labels = federation.images.to(device), federation.labels.to(device)
    transform = federation.train_transform
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def one_client(client: Client) -> None:
        model.load_state_dict(start)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        order = client.train[torch.randperm(len(client.train))].to(device)
        for i in range(0, len(order), row.batch):
            chosen = order[i : i + row.batch]
            x = transform(images[chosen], torch.rand(len(chosen), transform.draws, device=device))
            loss = F.cross_entropy(model(x).logits, labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    model.train()
    one_client(federation.clients[0])
    torch.cuda.synchronize()
    clients = federation.clients[:10]
    began = time.perf_counter()
    for client in clients:
        one_client(client)
    torch.cuda.synchronize()
    return row.steps * len(clients) / (time.perf_counter() - began)


def executor_speed(row: Row, federation: Federation, executor_name: str) -> dict[str, float]:
    config = Config(
        model=row.model,
        method=row.method,
        batch_size=row.batch,
        momentum=0.9,
        learning_rate=1e-4,  # random labels: nothing can be learned, and nothing shall explode
        executor=executor_name,
        precision=row.precision,
        rounds=100,
        compile=row.compile,
    )
    setup = prepare(config, federation=federation)
    executor = setup.executor()
    layout, model = setup.worker.layout, setup.worker.model
    weights, statistics = layout.extract(model, layout.weights), layout.extract(model, layout.statistics)
    names = [client.name for client in federation.clients]

    def one_round(number: int) -> None:
        updates = list(executor.train(names, Broadcast(number, 100, weights, statistics)))
        assert all(isinstance(update, Update) for update in updates), updates
        torch.cuda.synchronize()

    began = time.perf_counter()
    one_round(0)
    one_round(1)
    warm = time.perf_counter()
    for number in range(2, 2 + row.rounds):
        one_round(number)
    seconds = (time.perf_counter() - warm) / row.rounds
    executor.close()
    return {"steps_per_second": row.clients * row.steps / seconds, "first_two_rounds": warm - began, "round": seconds}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("rows", nargs="*", default=list(ROWS))
    parser.add_argument("--executors", nargs="+", default=["cuda"])
    parser.add_argument("--methods", nargs="+", default=["fedavg"])
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    device = torch.cuda.get_device_name(0)
    print(json.dumps({"device": device, "torch": torch.__version__}), flush=True)
    for name in options.rows:
        row = ROWS[name]
        federation = made_up(row)
        usual = usual_loop(row, federation)
        print(json.dumps({"row": name, "usual_loop": round(usual)}), flush=True)
        for method in options.methods:
            for executor in options.executors:
                speed = executor_speed(replace(row, method=method, compile=options.compile), federation, executor)
                ratio = speed["steps_per_second"] / usual
                print(
                    json.dumps(
                        {"row": name, "method": method, "executor": executor, "ratio": round(ratio, 1)}
                        | {key: round(value, 3) for key, value in speed.items()}
                    ),
                    flush=True,
                )


if __name__ == "__main__":
    main()
