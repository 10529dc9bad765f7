"""Layers and gradient clipping of the papers, and the surgery that puts layers into a model."""

from fedkeel.core.state import batch_norms
from fedkeel.nn.calibration import Calibration, Calibrator, expect_statistics, normalised_layers
from fedkeel.nn.clipping import HistoryClip, agc_
from fedkeel.nn.hybrid_batch_norm import HybridBatchNorm, HybridBatchNorm2d, to_hybrid
from fedkeel.nn.scaled_ws_conv import ScaledWSConv2d, ScaledWSLinear, fold, to_scaled_ws
from fedkeel.nn.surgery import (
    batch_statistics,
    frozen_statistics,
    remove_normalisation,
    replace_modules,
    to_group_norm,
    using_statistics,
)

__all__ = [
    "Calibration",
    "Calibrator",
    "HistoryClip",
    "HybridBatchNorm",
    "HybridBatchNorm2d",
    "ScaledWSConv2d",
    "ScaledWSLinear",
    "agc_",
    "batch_norms",
    "batch_statistics",
    "expect_statistics",
    "fold",
    "frozen_statistics",
    "normalised_layers",
    "remove_normalisation",
    "replace_modules",
    "to_group_norm",
    "to_hybrid",
    "to_scaled_ws",
    "using_statistics",
]
