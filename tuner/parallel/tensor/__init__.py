"""Tensor parallelism: the matrices of each layer split over neighbouring processes, which compute the same rows."""
