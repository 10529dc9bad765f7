"""The papers' losses: `fedkeel.formulas.losses` under its short name."""

from fedkeel.formulas.losses import *  # noqa: F403
