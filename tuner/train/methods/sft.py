"""Supervised fine-tuning: next-token prediction on the tokens that ``train_on`` leaves to be learned."""

from tuner.config.recipe import SftMethod
from tuner.train.methods.pretrain import TokenMean


def build(section: SftMethod) -> TokenMean:
    """The mean over the trained tokens of the global batch."""
    return TokenMean()
