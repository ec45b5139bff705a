"""A recipe handed to a cluster: what SLURM, Kubernetes or Ray is to start, as text, and the program that takes it."""
