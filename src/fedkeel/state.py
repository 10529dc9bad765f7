"""What a tensor of a model is, and arithmetic over named tensors: `fedkeel.core.state` under its short name."""

from fedkeel.core.state import *  # noqa: F403
