"""From a model and text to an artifact."""
