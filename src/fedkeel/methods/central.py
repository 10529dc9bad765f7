"""Central: the data of all clients in one place, as many epochs as the federation has rounds times local
epochs. Not a federated method: the upper bound that the papers compare with."""

from fedkeel.methods import Method, Traits, register


@register("central")
class Central(Method):
    """Training on the pooled data of all clients: the upper bound, not a federation."""

    paper = "baseline of GReg, Table 2"
    traits = Traits(replaces={"clients"})
