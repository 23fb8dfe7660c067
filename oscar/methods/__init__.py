"""Methods: from the statistics of a layer to its transforms. To add one, write a file here and import it below."""

# The order is that of every list of methods: the default, the paper's, the controls.
# isort: off
from oscar.methods.shaped import oscar_shaped
from oscar.methods.oscar import oscar, oscar_surrogate
from oscar.methods.controls import hadamard, identity, raw
from oscar.methods.registry import METHODS, Method
# isort: on

__all__ = ["METHODS", "Method", "hadamard", "identity", "oscar", "oscar_shaped", "oscar_surrogate", "raw"]
