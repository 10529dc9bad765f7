"""The usual loop: one client after another, plain eager PyTorch, all threads. Arguments: batch size, threads, norm."""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
import work


def main(batch_size: int, threads: int, norm: bool) -> None:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    images, labels = work.images_and_labels()
    model = work.SimpleCNN(norm).train()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def one_client(client: int) -> dict[str, torch.Tensor]:
        model.load_state_dict(weights)
        optimizer = torch.optim.SGD(model.parameters(), lr=work.LEARNING_RATE, momentum=work.MOMENTUM)
        mine, mine_labels = images[work.of_client(client)], labels[work.of_client(client)]
        for chosen in torch.randperm(work.SAMPLES).split(batch_size):
            optimizer.zero_grad()
            F.cross_entropy(model(work.normalised(mine[chosen])), mine_labels[chosen]).backward()
            optimizer.step()
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def one_round() -> None:
        results = [one_client(client) for client in range(work.CLIENTS)]
        for name, tensor in weights.items():
            tensor.copy_(sum(result[name] for result in results) / work.CLIENTS)

    work.rounds_on_demand(one_round)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "norm")
