"""A day on one GPU: what no CPU can show of the CUDA path, in parts that run one by one and end in one table."""
