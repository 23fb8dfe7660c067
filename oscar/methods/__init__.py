"""Methods: from statistics to the matrices of a layer."""
