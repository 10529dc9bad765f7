"""A site that lies, another way in each round: `python -m tests.deploy.liar join ...` in place of `fedkeel`."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedkeel.cli import main
from fedkeel.core.messages import update_from_bytes, update_to_bytes
from fedkeel.deploy import deployment, grid
from fedkeel.deploy.site import Site

LIES = {
    1: "a hundred times the size",
    2: "random bytes",
    3: "half of it",
    4: "records that flower cannot read",
    5: "the update of round 0",
    6: "not a number",
}
usual_reply, usual_records = Site.reply, deployment.to_records
first: list[bytes] = []


class Unreadable(ConfigRecord):
    """A record whose bytes are none of Flower's, in an envelope that is."""

    def deflate(self) -> bytes:
        head, divider, body = super().deflate().partition(b"\x00")
        return head + divider + bytes(255 - byte for byte in body)


Unreadable.__qualname__ = ConfigRecord.__qualname__


def reply(self: Site, request: Any, message: bytes) -> Any:
    table, data = usual_reply(self, request, message)
    if request["do"] != "train" or "failure" in table:
        return table, data
    if not first:
        first.append(data)
    lie = LIES.get(request["step"][0], "")
    print(f"lying: {lie}", flush=True)
    if lie == LIES[1]:
        data = data * 100
    elif lie == LIES[2]:
        data = os.urandom(len(data))
    elif lie == LIES[3]:
        data = data[: len(data) // 2]
    elif lie == LIES[4]:
        table = {"unreadable": True}
    elif lie == LIES[5]:
        data = first[0]
    elif lie == LIES[6]:
        update = update_from_bytes(data)
        data = update_to_bytes(replace(update, weights={n: t * torch.nan for n, t in update.weights.items()}))
    return table, data


def to_records(table: Any, message: bytes) -> RecordDict:
    if "unreadable" not in table:
        return usual_records(table, message)
    array = Array(dtype="uint8", shape=(7,), stype=grid.SAFETENSORS, data=b"nothing")
    return RecordDict({grid.TABLE: Unreadable({"table": "{}"}), grid.BYTES: ArrayRecord({"message": array})})


if __name__ == "__main__":
    Site.reply = reply  # type: ignore[method-assign]
    deployment.to_records = to_records
    sys.exit(main(sys.argv[1:]))
