"""Parts of parameters for the kernels of compact AdamW, with awkward numbers in them."""

import torch

from tuner.train.moments import Moment, MomentPart, Step, code_map, encode

CPU = torch.device("cpu")
MAPS = code_map(True, CPU), code_map(False, CPU)
NUMBERS = [1.7, 1 - 1e-3, 0.9, 0.1, 0.95, 0.05, 1e-3 / 0.3, 0.4, 1e-8]
FP32, BF16 = torch.float32, torch.bfloat16
KINDS = [
    (FP32, FP32, True, None), (BF16, FP32, True, None), (BF16, BF16, True, -(2**62) - 12345), (BF16, BF16, False, 99),
]
PLAIN = Step(torch.tensor(NUMBERS), *MAPS, torch.tensor(0.0))


def made_part(way: tuple[torch.dtype, torch.dtype, bool, int | None], rows: int, width: int) -> MomentPart:
    gradients, weights, coded, key = way
    generator = torch.Generator().manual_seed(rows * width)
    g, w, m, v = torch.randn(4, rows, width, generator=generator)
    g, v = g * torch.rand(rows, width, generator=generator) ** 8, v**8
    g[:, :2], v[0], m[0, :300] = 0.0, 0.0, 0.0
    kept = [Moment(*encode(one, codes)) if coded else Moment(one, None) for one, codes in ((m, MAPS[0]), (v, MAPS[1]))]
    drawn = None if key is None else torch.tensor(key)
    return MomentPart(g.to(gradients), w.to(weights), *kept, first_row=7, key=drawn)


def tensors(part: MomentPart) -> list[torch.Tensor]:
    found = [part.weight, *(t for moment in (part.average, part.square) for t in (moment.numbers, moment.scales))]
    return [tensor for tensor in found if tensor is not None]


def rows_alone(part: MomentPart, rows: slice) -> MomentPart:
    def moment(whole: Moment) -> Moment:
        scales = None if whole.scales is None else whole.scales[rows].clone()
        return Moment(whole.numbers[rows].clone(), scales)

    weight, gradients = part.weight[rows].clone(), part.gradient[rows].clone()
    first = part.first_row + rows.start
    return MomentPart(gradients, weight, moment(part.average), moment(part.square), first, part.key)
