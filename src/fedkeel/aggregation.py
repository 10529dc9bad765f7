"""The papers' rules for means, moments and prototypes: `fedkeel.formulas.aggregation` under its short name."""

from fedkeel.formulas.aggregation import *  # noqa: F403
