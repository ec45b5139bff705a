"""Training with what commands attach to it: exports beside it, and a look at its steps."""
