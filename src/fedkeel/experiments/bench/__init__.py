"""How fast Fedkeel is on this machine: the rows of docs/benchmarks.md, measured here. `fedkeel bench` is the command.

bench(choose(["cpu4"])).results[0].ratio
"""

from fedkeel.experiments.bench.measure import Report, Result, bench, reason_to_skip
from fedkeel.experiments.bench.rows import GROUPS, ROWS, Benchmark, choose, made_up
from fedkeel.experiments.bench.sides import Executed, UsualLoop

__all__ = ["GROUPS", "ROWS", "Benchmark", "Executed", "Report", "Result", "UsualLoop"]
__all__ += ["bench", "choose", "made_up", "reason_to_skip"]
