"""What `--kv-quant oscar` works with: tables, one detector of model features, and the sentences made from them.

Serving, calibration, evaluation and conversion ask here, so that none of them takes a model that another refuses without
saying so. Importing this package imports neither torch, transformers nor SGLang.
"""

from oscar.support.detect import refused
from oscar.support.sentences import (
    architecture_refusal,
    hardware_refusal,
    markdown,
    model_name,
    model_refusal,
    not_served,
    option_refusal,
)
from oscar.support.server_options import REFUSED, Option, flag_of
from oscar.support.table import HARDWARE, MODEL_FEATURES, OFF, ON_CPU, Feature

__all__ = [
    "HARDWARE",
    "MODEL_FEATURES",
    "OFF",
    "ON_CPU",
    "REFUSED",
    "Feature",
    "Option",
    "architecture_refusal",
    "flag_of",
    "hardware_refusal",
    "markdown",
    "model_name",
    "model_refusal",
    "not_served",
    "option_refusal",
    "refused",
]
