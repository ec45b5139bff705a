"""Distillation held to full logits in float64, with gradients by autograd from the formulas alone."""

import itertools
from typing import Any

import pytest
import torch

from tuner.config.methods import DistillMethod
from tuner.model import output_layer
from tuner.model.divergence import FIGURES, Distillation, Tail, TeacherLogits, TopTeacher, WholeTeacher, distil
from tuner.model.output_layer import LogitTransform, OutputLayer
from tuner.train.methods.method import build_method

N, V, D = 13, 23, 6
CAPPED = LogitTransform(scale=0.5, cap=3.0)


def layers(student: int, teacher: int, transform: LogitTransform = CAPPED) -> tuple[Any, ...]:
    """Hidden states and output layer of a student and a teacher of other widths, and targets; one of them capped."""
    draw = torch.Generator().manual_seed(0)

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    hidden, weight, bias = (tensor.requires_grad_() for tensor in (made(N, D), made(student, D), made(student)))
    own = OutputLayer(weight, bias, transform)
    taught = OutputLayer(made(teacher, D + 3), made(teacher), LogitTransform(1.5))
    targets = torch.randint(0, min(student, teacher), (N,), generator=draw)
    return hidden, own, made(N, D + 3), taught, targets


def logits(hidden: torch.Tensor, head: OutputLayer) -> torch.Tensor:
    assert head.bias is not None
    z = head.transform.scale * (hidden @ head.weight.T + head.bias)
    return z if head.transform.cap is None else head.transform.cap * torch.tanh(z / head.transform.cap)


def kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Of KL(p || q) of probabilities with zeros in p."""
    return torch.where(p > 0, p * ((p + (p == 0)).log() - q.log()), 0.0).sum(-1)


def formula(s: torch.Tensor, t: torch.Tensor, beta: float) -> torch.Tensor:
    """Agarwal et al. 2023, equation 1, of probabilities."""
    if beta in (0, 1):
        return kl(s, t) if beta else kl(t, s)
    m = beta * t + (1 - beta) * s
    return beta * kl(t, m) + (1 - beta) * kl(s, m)


def coarse(p: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Probabilities of some tokens, and the sum of the others'."""
    picked = p.gather(1, ids)
    others = torch.ones_like(p).scatter(1, ids, 0.0)
    return torch.cat([picked, (p * others).sum(-1, keepdim=True)], -1)


def numbers(figures: dict[str, torch.Tensor]) -> list[float]:
    assert tuple(figures) == FIGURES
    return [float(each.detach()) for each in figures.values()]


def agree(found: torch.Tensor, wanted: torch.Tensor, inputs: list[torch.Tensor]) -> None:
    assert found.item() == pytest.approx(wanted.item(), rel=1e-9)
    ours, theirs = torch.autograd.grad(found, inputs), torch.autograd.grad(wanted, inputs)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.allclose(one, other, rtol=1e-8, atol=1e-11), (one - other).abs().max()


@pytest.fixture(params=[None, 3], ids=["whole", "chunked"], autouse=True)
def _chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With so few logits in a chunk, and in a block of it, that both have a rest."""
    if request.param is not None:
        monkeypatch.setitem(output_layer.CHUNK_LOGITS, "cpu", 5 * V)
        monkeypatch.setitem(output_layer.BLOCK_LOGITS, "cpu", request.param * V)


HOW = [Distillation(*each) for each in itertools.product((0.0, 0.3, 0.5, 1.0), (1.0, 2.5), (0.0, 0.4))]


@pytest.mark.parametrize(("student", "teacher"), [(V, V), (V + 4, V), (V, V + 4)])
def test_loss_and_gradients_are_those_of_full_logits(student: int, teacher: int) -> None:
    hidden, own, taught_hidden, taught, targets = layers(student, teacher)
    inputs = [hidden, own.weight, own.bias]
    for how in HOW:
        found, figures = distil(hidden, own, targets, WholeTeacher(taught_hidden, taught), how)
        z, shared = logits(hidden, own), min(student, teacher)
        t_logits = logits(taught_hidden, taught)[:, :shared]
        s, t = ((each / how.temperature).softmax(-1) for each in (z[:, :shared], t_logits))
        divergence = formula(s, t, how.beta).sum()
        ce = torch.nn.functional.cross_entropy(z, targets, reduction="sum")
        agree(found, (1 - how.ce_weight) * how.temperature**2 * divergence + how.ce_weight * ce, inputs)
        teacher_ce = torch.nn.functional.cross_entropy(t_logits, targets, reduction="sum")
        wanted = [divergence, ce, teacher_ce, (z.argmax(-1) == t_logits.argmax(-1)).sum()]
        assert numbers(figures) == pytest.approx([float(each.detach()) for each in wanted] + [0], rel=1e-9)


def top_of(t_logits: torch.Tensor, targets: torch.Tensor, how: Distillation, k: int, tail: Tail) -> TopTeacher:
    t = (t_logits / how.temperature).softmax(-1)
    p, ids = t.topk(k)
    rest = (1 - p.sum(-1)).log() if k < V else torch.full_like(p[:, 0], -torch.inf)
    own = -torch.nn.functional.cross_entropy(t_logits, targets, reduction="none")
    return TopTeacher(ids.to(torch.uint16), p.log(), rest, own, V, tail)


@pytest.mark.parametrize("tail", ["rest", "renormalise"])
@pytest.mark.parametrize("student", [V, V + 4])
def test_a_teachers_top_tokens_are_compared_by_name_of_the_tail(tail: Tail, student: int) -> None:
    hidden, own, taught_hidden, taught, targets = layers(student, V)
    t_logits = logits(taught_hidden, taught)
    for how in HOW:
        if how.beta == 1 and tail == "renormalise":
            continue
        teacher = top_of(t_logits, targets, how, 4, tail)
        found, figures = distil(hidden, own, targets, teacher, how)
        z, ids = logits(hidden, own), teacher.ids.long()
        s, t = (coarse((each[:, :V] / how.temperature).softmax(-1), ids) for each in (z, t_logits))
        assert float(figures["tail"]) == pytest.approx(float(t[:, -1].detach().sum()), rel=1e-9)
        if tail == "renormalise":
            t = t[:, :-1] / t[:, :-1].sum(-1, keepdim=True)
            t = torch.cat([t, torch.zeros(N, 1, dtype=t.dtype)], -1)
        ce = torch.nn.functional.cross_entropy(z, targets, reduction="sum")
        divergence = how.temperature**2 * formula(s, t, how.beta).sum()
        agree(found, (1 - how.ce_weight) * divergence + how.ce_weight * ce, [hidden, own.weight, own.bias])


def test_all_tokens_of_a_teacher_are_the_whole_teacher() -> None:
    hidden, own, taught_hidden, taught, targets = layers(V, V)
    for how, tail in itertools.product(HOW, ("rest", "renormalise")):
        top = top_of(logits(taught_hidden, taught), targets, how, V, tail)  # type: ignore[arg-type]
        found, figures = distil(hidden, own, targets, top, how)
        whole, others = distil(hidden, own, targets, WholeTeacher(taught_hidden, taught), how)
        agree(found, whole, [hidden, own.weight, own.bias])
        assert numbers(figures) == pytest.approx(numbers(others), abs=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_student_that_is_its_teacher_is_exactly_no_distance_away(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(1)
    hidden = torch.randn(N, D, generator=draw).to(dtype).requires_grad_()
    head = OutputLayer((3 * torch.randn(V, D, generator=draw)).to(dtype).requires_grad_(), None, CAPPED)
    for beta, temperature in itertools.product((0.0, 0.3, 1.0), (1.0, 2.0)):
        teacher = WholeTeacher(hidden.detach(), OutputLayer(head.weight.detach(), None, CAPPED))
        targets = torch.randint(0, V, (N,), generator=draw)
        loss, figures = distil(hidden, head, targets, teacher, Distillation(beta, temperature))
        gradients = torch.autograd.grad(loss, [hidden, head.weight])
        assert loss.item() == 0 and float(figures["agreement"]) == N
        assert all(not gradient.any() for gradient in gradients)


def test_float32_is_within_rounding_of_float64() -> None:
    hidden, own, taught_hidden, taught, targets = layers(V, V)
    for how in HOW:
        whole = WholeTeacher(taught_hidden, taught)
        exact, _ = distil(hidden, own, targets, whole, how)
        wanted = torch.autograd.grad(exact, [hidden, own.weight])
        weight, bias, rows = (each.detach().float().requires_grad_() for each in (own.weight, own.bias, hidden))
        head = OutputLayer(taught.weight.float(), taught.bias.float(), taught.transform)
        small = WholeTeacher(taught_hidden.float(), head)
        loss, _ = distil(rows, OutputLayer(weight, bias, CAPPED), targets, small, how)
        assert loss.item() == pytest.approx(exact.item(), rel=1e-6)
        for one, other in zip(torch.autograd.grad(loss, [rows, weight]), wanted, strict=True):
            assert (one - other).norm() <= 1e-6 * other.norm()


def test_improbable_tokens_overflow_nowhere() -> None:
    draw = torch.Generator().manual_seed(2)
    hidden = torch.randn(N, D, generator=draw).requires_grad_()
    head = OutputLayer(60 * torch.randn(V, D, generator=draw))
    teacher: TeacherLogits = WholeTeacher(torch.randn(N, D, generator=draw), head)
    for beta in (0.0, 0.3, 1.0):
        loss, _ = distil(hidden, head, torch.zeros(N, dtype=torch.int64), teacher, Distillation(beta))
        (gradient,) = torch.autograd.grad(loss, [hidden])
        assert loss.isfinite() and gradient.isfinite().all() and loss > 1


def test_no_positions_give_zeros_with_a_gradient_and_no_gradient_is_asked_of_an_evaluation() -> None:
    hidden, own, taught_hidden, taught, targets = layers(V, V)
    empty = WholeTeacher(taught_hidden[:0], taught)
    loss, figures = distil(hidden[:0], own, targets[:0], empty, Distillation())
    loss.backward()
    assert loss.item() == 0 and not own.weight.grad.any() and not any(numbers(figures))
    with torch.no_grad():
        again, _ = distil(hidden, own, targets, WholeTeacher(taught_hidden, taught), Distillation(0.5))
    assert not again.requires_grad and again > 0


def test_the_method_counts_tokens() -> None:
    method = build_method(DistillMethod(teacher="a/b"))
    assert method.teacher is None and method.by_terms
