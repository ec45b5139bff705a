"""An optimizer as a user would name it by file."""

from torch.optim import RMSprop

__all__ = ["RMSprop"]
