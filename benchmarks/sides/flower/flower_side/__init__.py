"""FedAvg in Flower, as its PyTorch quickstart writes it."""
