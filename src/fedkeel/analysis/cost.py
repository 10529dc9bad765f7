"""What a round costs: bytes between server and clients, and seconds.

Bytes are those of the model and of what the method sends beside it, of all clients of the round, as `metrics.jsonl` has
them; seconds are of the machine that it ran on, from `timing.jsonl`.
"""

import numpy as np

from fedkeel.analysis import Diagnostic, Objects, diagnostic
from fedkeel.analysis.figures import Figure, by_round, table
from fedkeel.errors import FedkeelError
from fedkeel.runs.run import Run
from fedkeel.runs.timing import read_timing

PHASES = ("train", "aggregate", "evaluate")


@diagnostic("cost")
class Cost(Diagnostic):
    """Bytes that clients send (up) and receive (down) in a round, all of them together, and the seconds it took."""

    title = "What a round costs"
    paper = "HBN, Section 4; GReg, Table 10"

    def of_run(self, run: Run, objects: Objects) -> list[Figure]:
        records = [record for record in run.records("round") if "bytes_up" in record and "bytes_down" in record]
        if not records:
            raise FedkeelError(f"'{run.directory}' has no finished round yet: let it train further.")
        traffic = {record["round"]: {"up": record["bytes_up"], "down": record["bytes_down"]} for record in records}
        # A round that was done again after an interruption counts as it was done last.
        times = {
            int(line["round"]): {phase: float(line[phase]) for phase in PHASES} for line in read_timing(run.directory)
        }
        seconds = dict(sorted(times.items()))
        spent = {f"bytes {way}": [numbers[way] for numbers in traffic.values()] for way in ("up", "down")}
        figures = [by_round("Traffic of a round", "bytes", traffic)]
        if seconds:
            spent |= {f"seconds: {phase}": [entry[phase] for entry in seconds.values()] for phase in PHASES}
            figures.append(by_round("Seconds of a round", "seconds", seconds))
        rows = [[name, float(np.mean(values)), float(np.sum(values))] for name, values in spent.items()]
        return [*figures, table("In all", ["", "mean of a round", "sum"], rows)]
