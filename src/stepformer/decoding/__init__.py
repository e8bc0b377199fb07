"""Text from a model: sampling, beams, recorded steps."""
