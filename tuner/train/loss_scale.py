"""The factor of the loss under fp16, found by the run itself: the dynamic loss scaling of mixed precision training.

fp16 has no number between 0 and 6e-8, and many gradients lie there: the loss is multiplied by a scale before the
backward pass, and the gradients are divided by it before anything reads them (Micikevicius et al. 2018,
https://arxiv.org/abs/1710.03740). A scale that is too large makes gradients infinite: that update is left out and the
scale halved. The rule and its numbers are those of ``torch.amp.GradScaler``, but for the floor. Everything is decided
on the device: nobody waits for it.
"""

from collections.abc import Mapping

import torch

from tuner.train.methods.method import Counts
from tuner.train.step_parts import NoLossScale, Overflow

INITIAL, FACTOR, INTERVAL = 2.0**16, 2.0, 2000
"""The first scale; by what it is multiplied or divided; after how many updates in a row it grows."""
LOSS_SCALE = "loss_scale/state"
"""The name in checkpoints of the scale, with the updates since it last changed."""
FLOOR = 1.0
"""The least scale. Gradients that overflow with it are too large for fp16 as they are: the run has diverged."""


class LossScale(NoLossScale):
    """The scale and how many updates it has lasted, one tensor on the device that checkpoints keep.

    A step whose loss is not finite says nothing of the scale, which comes after the loss: that is the guard's.
    """

    def __init__(self, device: torch.device) -> None:
        self.state = torch.zeros(2, dtype=torch.float32, device=device)
        """float32 ``[2]``: the scale, and the updates since it last changed."""
        self.state[0] = INITIAL
        self._of_step = self.scale.clone()
        """The scale that the gradients of the step have: judging it changes the next one's."""
        self._of_term = self._of_step

    @property
    def scale(self) -> torch.Tensor:
        """The scale, a float32 scalar: a view."""
        return self.state[0]

    def begin(self, counts: Counts) -> None:
        """Divide the scale by the largest of the counts."""
        self._of_term = self.scale / (max(counts.values(), default=1) or 1)

    def of_term(self) -> torch.Tensor:
        """What reaches the sum of a term of the loss in the backward pass of the step, a float32 scalar."""
        return self._of_term

    def upstream(self, loss: torch.Tensor) -> torch.Tensor:
        """The scale, in the type of the loss."""
        return self.scale.to(loss.dtype)

    def of_gradients(self) -> torch.Tensor:
        """The scale."""
        return self.scale

    def norm(self, squares: torch.Tensor) -> torch.Tensor:
        """Without the scale, which is that of this step from now on."""
        self._of_step = self.scale.clone()
        return squares.sqrt() / self._of_step

    def divisor(self, clipping: torch.Tensor | None) -> torch.Tensor:
        """What clipping asks for, times the scale."""
        return self._of_step if clipping is None else clipping * self._of_step

    def figures(self) -> Mapping[str, torch.Tensor]:
        """The scale of the step."""
        return {"loss_scale": self._of_step}

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The scale, with the updates since it last changed."""
        return {LOSS_SCALE: self.state}

    def judge(self, loss: torch.Tensor, norm: torch.Tensor) -> Overflow:
        """Scalars that are equal on every rank."""
        overflow = loss.isfinite() & ~norm.isfinite()
        at_floor = overflow & (self.scale <= FLOOR)
        scale, lasted = self.state.unbind()
        lasted = lasted + norm.isfinite()
        grown = scale * FACTOR
        grows = (lasted >= INTERVAL) & grown.isfinite()
        after = torch.where(overflow, (scale / FACTOR).clamp_min(FLOOR), torch.where(grows, grown, scale))
        self.state.copy_(torch.stack([after, lasted.masked_fill(overflow | (lasted >= INTERVAL), 0.0)]))
        return Overflow(overflow, at_floor)
