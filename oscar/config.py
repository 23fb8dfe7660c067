"""Every default of the product, once. Standard library only: argument parsing imports this before torch exists."""

DEFAULT_METHOD = "oscar-shaped"
DEFAULT_SINK_TOKENS = 64
"""First tokens of a sequence kept in BF16 (windows of 64/256 recover the paper's figures, without any it scores zero)."""
DEFAULT_RECENT_TOKENS = 256
"""Newest tokens of a sequence kept in BF16."""
DEFAULT_K_CLIP = 0.96
DEFAULT_V_CLIP = 0.92
"""Quantile of |x| inside one head row at which K and V are clipped (the paper's values)."""
DEFAULT_CALIBRATION_TOKENS = 16384
LONGEST_SEQUENCE = 32768
"""Longest calibration sequence in tokens where none is asked for: the model's context length, but no more than this, so that
one forward pass stays affordable."""
DEFAULT_SEED = 0
DEFAULT_CONFIGURATIONS = ("bf16", "int2", "hadamard", "oscar", *({DEFAULT_METHOD} - {"oscar"}))
"""What `oscar evaluate` compares: 16 bits, two controls, the paper's method, the default."""
DEFAULT_EVALUATION_CONTEXT = 2048
"""Tokens of a prompt of `oscar evaluate`, and of what precedes a continuation."""
DEFAULT_CONTINUATION = 256
"""Tokens decoded after it, teacher-forced."""
DEFAULT_DOCUMENTS = 16
DEFAULT_PROMPTS = 200
"""Of the retrieval task; each hard task has a fifth of them."""
RECALL_HARD = "recall-hard"
TASKS = ("retrieval", "perplexity", "divergence", RECALL_HARD)
"""Tasks of `oscar evaluate`."""
DEFAULT_PLAN_CONTEXTS = (4096, 32768, 131072)
"""Request lengths of `oscar plan`, in tokens."""
