"""One client: load the weights, one epoch of SGD over the local data, send them back."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
import work
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch.utils.data import DataLoader, TensorDataset

app = ClientApp()


@cache
def data_of(client: int) -> TensorDataset:
    images, labels = work.images_and_labels()
    mine = work.of_client(client)
    return TensorDataset(work.normalised(images[mine]), labels[mine])


@app.train()
def train(message: Message, context: Context) -> Message:
    model = work.SimpleCNN().train()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    data = data_of(int(context.node_config["partition-id"]))
    optimizer = torch.optim.SGD(model.parameters(), lr=work.LEARNING_RATE, momentum=work.MOMENTUM)
    for x, y in DataLoader(data, batch_size=int(context.run_config["batch-size"]), shuffle=True):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    metrics = MetricRecord({"loss": loss.item(), "num-examples": len(data)})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=message)
