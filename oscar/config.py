"""Every default of the product, once. Standard library only: argument parsing imports this before torch exists."""

DEFAULT_METHOD = "oscar"
DEFAULT_SINK_TOKENS = 64
"""First tokens of a sequence kept in BF16 (METHOD: windows of 64/256 recover the paper's figures; 0/0 scores zero)."""
DEFAULT_RECENT_TOKENS = 256
"""Newest tokens of a sequence kept in BF16."""
DEFAULT_K_CLIP = 0.96
DEFAULT_V_CLIP = 0.92
"""Quantile of |x| inside one head row at which K and V are clipped (the paper's values)."""
DEFAULT_META_DTYPE = "float16"
DEFAULT_CALIBRATION_TOKENS = 16384
DEFAULT_MAX_LENGTH = 4096
"""Longest calibration sequence in tokens; the model's own context length caps it."""
DEFAULT_SEED = 0
