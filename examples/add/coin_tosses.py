import torch

from fedkeel.data import DATASETS, Dataset, Split


@DATASETS.register("coin-tosses")
def read_coin_tosses(images: int = 60) -> Dataset:
    """Made up: grey noise, heads or tails."""
    numbers = torch.arange(images)
    return Dataset(
        name="coin-tosses",
        images=torch.randint(0, 256, (images, 1, 32, 32), dtype=torch.uint8),
        labels=numbers % 2,
        classes=("heads", "tails"),
        domains={"table": Split(train=numbers[20:], validation=numbers[:0], test=numbers[:20])},
        train_transform="flip+normalise",
        test_transform="normalise",
    )
