"""What may be said of a network by whoever names it: its architecture, in plain words and numbers, and nothing else.

A configuration may be a stranger's, or come over a network. What it says of a model must not name a file or an
address, nor ask for more than a machine holds; so options are those of a list of allowed ones.
"""

import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from fedkeel.errors import FedkeelError

WORD = re.compile(r"[A-Za-z0-9_+-]{0,40}")
MOST_VALUES = 16  # of a list
LARGEST_NUMBER = 1e6

LAYERS, CHANNELS, SIDE, RATIO = 100, 16384, 4096, 256
_LARGEST: Mapping[float, str] = {
    # How large a number each may be. A network of many layers takes long to make, even if it takes no memory.
    LAYERS: "depth depths layers reg_tokens",
    CHANNELS: "embed_dim embed_dims dims dim channels widths stem_width stem_size stem_chs base_width num_features "
    "growth_rate head_hidden_size",
    SIDE: "img_size patch_size window_size kernel_size kernel_sizes down_kernel_size",
    RATIO: "num_heads head_dim key_dim cardinality mlp_ratio mlp_ratios expand_ratio sr_ratios output_stride",
    1: "drop_rate drop_path_rate drop_block_rate attn_drop_rate proj_drop_rate pos_drop_rate patch_drop_rate",
    LARGEST_NUMBER: "act_layer norm_layer aa_layer global_pool stem_type pos_embed pad_type init_values ls_init_value "
    "head_init_scale layer_scale_init_value bn_eps bn_momentum bn_tf norm_eps qkv_bias qk_norm class_token "
    "no_embed_class pre_norm final_norm fc_norm head_norm_first conv_bias conv_mlp avg_down replace_stem_pool "
    "zero_init_last block_reduce_first dynamic_img_size dynamic_img_pad strict_img_size",
}
TIMM: Mapping[str, float] = {name: largest for largest, names in _LARGEST.items() for name in names.split()}


def refuse_strange(of: str, options: Mapping[str, Any], allowed: Mapping[str, float] | None = None) -> None:
    """Refuse an option that is not in `allowed` (the largest number that each may be), and a value that is not plain.

    Without `allowed`, the names are checked elsewhere.
    """
    for name, value in options.items():
        if allowed is not None and name not in allowed:
            raise FedkeelError(f"The option '{name}' of '{of}' does not describe an architecture: {_instead(name)}")
        problem = strange(value, LARGEST_NUMBER if allowed is None else allowed[name])
        if problem:
            raise FedkeelError(f"The option '{name}' of '{of}' {problem}.")


def strange(value: object, largest: float = LARGEST_NUMBER) -> str:
    """What keeps a value from being a plain one (a number, a word, yes or no, or a short list of these), or nothing."""
    if value is None or isinstance(value, bool):
        return ""
    if isinstance(value, int | float):
        if abs(value) <= largest:  # a NaN is not
            return ""
        shown = f"{value}" if abs(value) < 2**63 else "beyond all measure"  # Python refuses to write some numbers
        return f"is {shown}: give a number of at most {largest:g}"
    if isinstance(value, str):
        return "" if WORD.fullmatch(value) else f"is {value[:80]!r}: give a word of at most 40 letters, digits and _+-"
    if isinstance(value, list | tuple):
        if len(value) > MOST_VALUES:
            return f"is a list of {len(value)} values: give at most {MOST_VALUES}"
        return next(filter(None, (strange(entry, largest) for entry in value)), "")
    return f"is a {type(value).__name__}: give a number, a word, true or false, or a list of these"


def _instead(name: str) -> str:
    if name in ("checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir"):
        return "a file that the model starts from is given with '--weights'."
    close = get_close_matches(name, TIMM, n=1, cutoff=0.6)
    return f"did you mean '{close[0]}'?" if close else "leave it out."
