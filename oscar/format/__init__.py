"""The ground floor: the 2-bit format, the windows' rule, sizes and the artifact. Imports nothing else of `oscar`."""
