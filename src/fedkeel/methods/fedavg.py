"""FedAvg: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data",
AISTATS 2017. Batch-norm statistics are averaged like the weights, which is the baseline of all five papers: its
objective is GReg, Eq. 4; HBN, Eq. 2; FedWon, Eq. 2; FedCoda, Eq. 1, and its rounds are those of GReg, Algorithm 1.
"""

from fedkeel.methods import Method, Traits, register


@register("fedavg")
class FedAvg(Method):
    """The sample-weighted mean of what the clients trained: the method that does nothing else."""

    paper = "McMahan et al. 2017"
    traits = Traits(private={"local"})
