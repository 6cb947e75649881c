"""Compare evaluations on the same images."""
