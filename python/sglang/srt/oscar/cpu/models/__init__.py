"""Models that a CPU start imports at once; any other architecture makes SGLang import all of its model modules."""
