"""The output layer as a loss gets it: the last hidden states to losses, without the logits of the whole batch.

Each chunk of positions makes its logits in the type of the products, turns them into their gradient in place, and
forgets them before the next chunk starts (the method of Liger Kernel, https://arxiv.org/abs/2410.10989, in plain torch
operations). Normaliser, loss and the step from logits to gradient are float32, a few rows at a time.

On a CPU the weight is converted, and its gradient added up, a block of the vocabulary at a time: both stay in the
cache, and neither has a second copy of its size. On a GPU the weight is converted once for all chunks, which are few
and large, the rows of the logits begin at multiples of 128 bytes whatever the vocabulary, as its matrix units want
them. The weight's gradient is added up in float32 whatever its type. (Longer than other files, since everything here
shares one chunk of logits, of which there is never a second one.)
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from transformers import PretrainedConfig

from tuner.errors import RecipeError
from tuner.runtime.device import gpu_memory, target

Kernel = Callable[[torch.Tensor, torch.Tensor, bool, torch.Tensor | None], torch.Tensor]
"""From logits ``[N, V]``, targets ``[N]``, whether the logits become their gradient in place, and weights float32
``[N]`` of the positions, or None for ones, to the summed loss."""
CHUNK_LOGITS = {"cpu": 1 << 27, "cuda": 1 << 29}
"""Logits of one chunk, at most: what bounds memory. Large, since every chunk adds to the gradient of the weight."""
BLOCK_LOGITS = {"cpu": 1 << 21, "cuda": 1 << 28}
"""Logits in float32 at one time: what fits a processor's cache, or fills a GPU."""
CHUNK_MEMORY, BLOCK_MEMORY = 64, 256
"""Bytes of a GPU's memory for each logit of a chunk, and for each in float32: in bf16 a chunk takes a 32nd of it."""
BLOCK_VOCABULARY = {"cpu": 1 << 12, "cuda": 1 << 14}
"""Rows of the weight in one product: on a processor its converted rows, and their gradient, stay in the cache; on a GPU
of the product alone that is added to the weight's gradient."""
ALIGNED = 64
"""Columns to which the logits' rows are filled up on a GPU."""
_MULTIPLIED = ("hyperclovax",)
"""Types of model that multiply by what others of the same key divide by."""
_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""Keys of the softcap: Gemma 2 and its kin, RecurrentGemma, xLSTM."""


@dataclass(frozen=True)
class LogitTransform:
    """Logits are ``cap · tanh(scale · z / cap)`` of the output layer's products ``z``, without a cap ``scale · z``.

    Granite and Inkling divide them, Cohere multiplies them, and Gemma 2 softcaps them (https://arxiv.org/abs/2408.00118).
    """

    scale: float = 1.0
    cap: float | None = None

    @staticmethod
    def of(config: PretrainedConfig) -> "LogitTransform":
        """As the config says. The probe at start holds the outcome to the model's own logits."""
        text = config.get_text_config()
        scale = float(getattr(text, "logit_scale", None) or 1.0)
        factor = float(getattr(text, "logits_scaling", None) or 1.0)
        scale *= factor if text.model_type.startswith(_MULTIPLIED) else 1 / factor
        scale /= float(getattr(text, "logits_mup_width_multiplier", None) or 1.0)
        cap = next((found for name in _CAPS if (found := getattr(text, name, None)) is not None), None)
        return LogitTransform(scale, None if cap is None else float(cap))

    def apply_(self, products: torch.Tensor) -> torch.Tensor | None:
        """Turn products into logits, in place; the tanh that :meth:`backward_` needs, None without a cap."""
        if self.scale != 1:
            products.mul_(self.scale)
        if self.cap is None:
            return None
        tanh = products.div_(self.cap).tanh_().clone()
        products.mul_(self.cap)
        return tanh

    def backward_(self, gradient: torch.Tensor, tanh: torch.Tensor | None) -> None:
        """Turn the gradient of the logits into that of the products, in place."""
        if tanh is not None:
            torch.ops.aten.tanh_backward.grad_input(gradient, tanh, grad_input=gradient)
        if self.scale != 1:
            gradient.mul_(self.scale)


PLAIN = LogitTransform()
"""Logits are the products."""


def softmax_into_gradient(
    logits: torch.Tensor, targets: torch.Tensor, wants_gradient: bool, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Summed loss, a float32 scalar; ``logits`` become its gradient where that is wanted. A few rows at a time."""
    exact_dtype = torch.promote_types(logits.dtype, torch.float32)
    total = torch.zeros((), dtype=exact_dtype, device=logits.device)
    for block in spans(len(logits), max(1, block_logits(logits) // logits.shape[1])):
        exact = logits[block].to(exact_dtype)
        wanted = targets[block, None]
        share = torch.softmax(exact, -1)
        # The largest share is 1 over the normaliser, from the largest logit: one pass less than logsumexp needs.
        log_normaliser = exact.amax(-1, keepdim=True) - share.amax(-1, keepdim=True).log()
        losses = log_normaliser - exact.gather(1, wanted)
        total += (losses if weights is None else losses * weights[block, None]).sum()
        if wants_gradient:
            share.scatter_add_(1, wanted, share.new_full(wanted.shape, -1.0))
            logits[block] = share if weights is None else share.mul_(weights[block, None])
    return total


def transformed(kernel: Kernel, transform: LogitTransform) -> Kernel:
    """The kernel for a model that does not take the products as they are."""

    def run(
        products: torch.Tensor, targets: torch.Tensor, wants_gradient: bool, weights: torch.Tensor | None
    ) -> torch.Tensor:
        tanh = transform.apply_(products)
        loss = kernel(products, targets, wants_gradient, weights)
        if wants_gradient:
            transform.backward_(products, tanh)
        return loss

    return kernel if transform == PLAIN else run


class Vocabulary(Protocol):
    """The output layer where several processes have the rows of its weight between them, and logits of these alone.

    Which ones, and what the processes say to each other, is :mod:`tuner.parallel.vocabulary`'s.
    """

    def layer(self, head: Any, transform: LogitTransform, scale: torch.Tensor | None) -> "OutputLayer":
        """This process's rows of the model's output layer."""
        ...

    def cross_entropy(
        self, head: "OutputLayer", hidden: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None
    ) -> torch.Tensor:
        """As :meth:`OutputLayer.cross_entropy`."""
        ...

    def losses(self, head: "OutputLayer", hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """As :meth:`OutputLayer.losses`."""
        ...

    def judged(self, head: "OutputLayer", hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """float32 ``[N, 2]``: the loss in nats, and 1 where the target is the likeliest token; without gradients."""
        ...

    def likeliest(self, head: "OutputLayer", hidden: torch.Tensor) -> torch.Tensor:
        """int64 ``[N]``: the likeliest token at each position."""
        ...


@dataclass(frozen=True)
class OutputLayer:
    """Weight ``[V, D]``, bias ``[V]`` or None, what the model does to their products, and the kernel of the loss.

    Under FSDP2 the weight is whole inside the root's forward alone: a loss is computed there. The products run in
    autocast's type where autocast is on; normaliser and losses are float32 (float64 for float64 inputs). A gradient
    that is made in the forward pass is rounded to the type of the products before that of the loss is known: with
    ``scale``, a scalar, it is made so many times as large, and divided by that when it is. Where weight and bias are in
    ``parts``, these compute every loss, and the kernel does nothing.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    transform: LogitTransform = PLAIN
    kernel: Kernel = softmax_into_gradient
    scale: torch.Tensor | None = None
    parts: Vocabulary | None = None

    def cross_entropy(
        self, hidden: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Sum of the cross-entropies in nats at N positions, each times its weight: a scalar; zero for no positions.

        Shapes: hidden ``[N, D]``, targets int64 ``[N]``, none of them ignored, weights float32 ``[N]``, which get no
        gradient, or None for ones. The cheapest loss: its gradient is made while the logits are there.
        """
        if self.parts is not None:
            return self.parts.cross_entropy(self, hidden, targets, weights)
        weight, bias, kernel = self.weight, self.bias, transformed(self.kernel, self.transform)
        if not torch.is_grad_enabled():  # the function would still see parameters that want a gradient, and make it
            hidden, weight, bias = hidden.detach(), weight.detach(), None if bias is None else bias.detach()
        if self.scale is not None:
            weights = self.scale.expand(len(targets)) if weights is None else weights * self.scale
        loss: torch.Tensor = _CrossEntropy.apply(hidden, weight, bias, targets, weights, kernel, self.scale)  # type: ignore[no-untyped-call]
        return loss

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of a reward model, whose weight is ``[1, D]``: the score at each position, ``[N]``, at least float32."""
        exact = torch.promote_types(hidden.dtype, torch.float32)
        with torch.autocast(hidden.device.type, enabled=False):
            return (hidden.to(exact) @ self.weight.to(exact).T)[:, 0]

    def losses(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The cross-entropy at each position, ``[N]``, for any function of them, such as a mean over documents.

        The same bits with gradients and without. Of more than a chunk of positions a backward pass that reaches the
        weight makes the logits of all but the last chunk a second time.
        """
        if self.parts is not None:
            return self.parts.losses(self, hidden, targets)
        weight, bias = self.weight, self.bias
        if not torch.is_grad_enabled():
            hidden, weight, bias = hidden.detach(), weight.detach(), None if bias is None else bias.detach()
        losses: torch.Tensor = _PositionLosses.apply(  # type: ignore[no-untyped-call]
            hidden, weight, bias, targets, self.transform, self.kernel, self.scale
        )
        return losses

    # For losses that take the weight itself: where rows are cut, a process has some of the N hidden states alone.

    def share(self, of_positions: torch.Tensor) -> torch.Tensor:
        """Of what is there for all N positions ``[N, ...]``, that of the hidden states here ``[n, ...]``: all of it."""
        return of_positions

    def join(self, of_share: torch.Tensor) -> torch.Tensor:
        """Of what is computed of the hidden states here ``[n, ...]``, that of all N positions ``[N, ...]``."""
        return of_share

    def total(self, of_share: torch.Tensor) -> torch.Tensor:
        """Of sums over the hidden states here, those over all N positions."""
        return of_share

    @property
    def of_one(self) -> "OutputLayer":
        """The layer for hidden states that are all here."""
        return self


Result = TypeVar("Result")
Objective = Callable[[torch.Tensor, OutputLayer, torch.Tensor], Result]
"""From the last hidden states ``[N, D]`` at N positions, the output layer, and targets int64 ``[N]``, to anything."""


def summed_cross_entropy(hidden: torch.Tensor, head: OutputLayer, targets: torch.Tensor) -> torch.Tensor:
    """The objective of next-token prediction."""
    return head.cross_entropy(hidden, targets)


def as_one_matrix(head: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states ``[N, D]`` and the weight ``[V, D]`` of an output layer; of an adapted one ``D + r`` wide each.

    With an adapter the layer gives ``W·h + s·B·(A·h)``, which is ``[W, B]`` times ``(h, s·A·h)``: as exact as the
    layer's own call, with any dropout. The price is a copy of ``W``, and a gradient as large, of which that of ``B`` is
    kept.
    """
    if not hasattr(head, "lora_A") or head.disable_adapters or head.merged:
        return hidden, head.weight
    (adapter,) = head.active_adapters
    inner = head.lora_A[adapter](head.lora_dropout[adapter](hidden.to(head.lora_A[adapter].weight.dtype)))
    rows = torch.cat([hidden, (inner * head.scaling[adapter]).to(hidden.dtype)], dim=-1)
    # The adapter is float32; next to a weight of 16 bits it is rounded as the products round it.
    return rows, torch.cat([head.weight, head.lora_B[adapter].weight.to(head.weight.dtype)], dim=-1)


@dataclass(frozen=True)
class Head:
    """An output layer and its input: hidden ``[N, D]``, weight ``[V, D]``, bias ``[V]``, the type of the products.

    On a GPU the weight is in that type already, once for all chunks.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    dtype: torch.dtype
    on_gpu: bool

    @staticmethod
    def of(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> "Head":
        """The layer with its input. Raises RecipeError where their widths differ."""
        if hidden.shape[-1] != weight.shape[-1]:
            raise RecipeError(
                f"model: its output layer takes {weight.shape[-1]:,} numbers and its decoder gives "
                f"{hidden.shape[-1]:,}: something between them is not called",
                hint="choose another model",
            )
        on_gpu = target(weight) == "cuda"
        return Head(hidden, weight.to(dtype) if on_gpu else weight, bias, dtype, on_gpu)

    def chunks(
        self, stop: int | None = None, size: int | None = None
    ) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """The positions of each chunk, their hidden states in the type of the products, and their products.

        With ``stop``, the beginning of a chunk, those before it. ``size`` is that of a chunk where several processes
        have agreed on one.
        """
        if size is None:
            size = positions_of_chunk(len(self.weight), self.weight, gpu_memory(self.weight))
        for span in spans(len(self.hidden) if stop is None else stop, size):
            rows = self.hidden[span].to(self.dtype)
            yield span, rows, self.products(rows)

    def sweep(
        self, targets: torch.Tensor, weights: torch.Tensor | None, kernel: Kernel, wanted: Sequence[bool]
    ) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        """The summed loss, and its gradients by hidden, weight and bias, None where not ``wanted``; chunk by chunk."""
        gradients = Gradients(self, wanted)
        exact_dtype = torch.promote_types(self.dtype, torch.float32)
        loss = torch.zeros((), dtype=exact_dtype, device=self.hidden.device)
        for span, rows, logits in self.chunks():
            loss += kernel(logits, targets[span], any(wanted), None if weights is None else weights[span])
            gradients.add(span, rows, logits)
            del logits  # before the next chunk has its own
        return loss, gradients.made

    def products(self, rows: torch.Tensor) -> torch.Tensor:
        """The output layer of rows ``[N, D]``, in their type: ``[N, V]``."""
        padded = rows.new_empty(len(rows), _row_length(len(self.weight), self.on_gpu))
        products, rest = padded[:, : len(self.weight)], padded[:, len(self.weight) :]
        rest.zero_()  # a product may read them, for nothing: NaN times zero is NaN
        if self.on_gpu:
            torch.mm(rows, self.weight.T, out=products)
        else:
            for block in _blocks(self.weight):
                torch.mm(rows, self.weight[block].to(rows.dtype).T, out=products[:, block])
        if self.bias is not None:
            products += self.bias
        return products


class Gradients:
    """Gradients by hidden, weight and bias, None where not ``wanted``, as chunks of positions add to them.

    Those of weight and bias are float32, or a wider type of the products or their own.
    """

    def __init__(self, head: Head, wanted: Sequence[bool]) -> None:
        self._head, self._exact_dtype = head, torch.promote_types(head.dtype, torch.float32)
        hidden, weight, bias = head.hidden, head.weight, head.bias
        hidden_dtype = hidden.dtype if head.on_gpu else self._exact_dtype
        self._hidden = torch.zeros_like(hidden, dtype=hidden_dtype) if wanted[0] else None
        make = torch.empty_like if len(hidden) else torch.zeros_like
        self._weight = make(weight, dtype=self._summed_in(weight)) if wanted[1] else None
        self._bias = None
        if wanted[2] and bias is not None:
            self._bias = torch.zeros_like(bias, dtype=self._summed_in(bias))
        self._first = True

    def add(self, span: slice, rows: torch.Tensor, logits: torch.Tensor) -> None:
        """Add the share of a chunk: its positions, their hidden states, and the gradient of their products."""
        weight, on_gpu = self._head.weight, self._head.on_gpu
        if self._bias is not None:
            self._bias += logits.sum(0, dtype=self._exact_dtype)
        if self._hidden is not None and on_gpu:
            self._hidden[span] = logits @ weight
        for block in _blocks(weight):
            share = logits[:, block]
            if self._hidden is not None and not on_gpu:
                self._hidden[span] += share @ weight[block].to(rows.dtype)
            if self._weight is not None:
                product = share.T @ rows
                self._weight[block].copy_(product) if self._first else self._weight[block].add_(product)
        self._first = False

    @property
    def hidden(self) -> torch.Tensor | None:
        """That of the hidden states in the type that it is added up in, where it is wanted."""
        return self._hidden

    @property
    def made(self) -> list[torch.Tensor | None]:
        """What all chunks gave, that of the hidden states in their type."""
        hidden = None if self._hidden is None else self._hidden.to(self._head.hidden.dtype)
        return [hidden, self._weight, self._bias]

    def _summed_in(self, parameter: torch.Tensor) -> torch.dtype:
        """The type in which the gradient of weight or bias is added up: at least float32, however it is gathered."""
        return torch.promote_types(parameter.dtype, self._exact_dtype)


class MadeInForward(torch.autograd.Function):
    """A scalar loss of which the forward pass has made and saved the gradients, and put their types into `dtypes`.

    They are made ``scale`` times as large where that is a tensor.
    """

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The saved gradients times that of the scalar ``upstream``."""
        # In place: a second backward through the same loss is refused by autograd.
        factor = upstream if ctx.scale is None else upstream / ctx.scale
        scaled = [None if g is None else g.mul_(factor) for g in ctx.saved_tensors]
        return (*in_types(scaled, ctx.dtypes), None, None, None, None)


class _CrossEntropy(MadeInForward):
    @staticmethod
    def forward(  # noqa: PLR0913, PLR0917 - an operation's arguments are tensors and numbers
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        weights: torch.Tensor | None,
        kernel: Kernel,
        scale: torch.Tensor | None,
    ) -> torch.Tensor:
        head = Head.of(hidden, weight, bias, product_dtype(hidden))
        loss, gradients = head.sweep(targets, weights, kernel, ctx.needs_input_grad[:3])
        ctx.save_for_backward(*gradients)
        ctx.dtypes, ctx.scale = gradient_types(hidden, weight, bias), scale
        return loss if scale is None else loss / scale


class _PositionLosses(torch.autograd.Function):
    """The share that a position's loss has in the whole is known in the backward pass alone.

    Where the hidden states alone want a gradient, it is made while the logits are there, and only multiplied by that
    share later. Where the weight wants one too, the last chunk's logits are kept: at the peak of memory, which is the
    beginning of the backward pass, a chunk's are there in any case. Those of earlier chunks are made a second time.
    """

    @staticmethod
    def forward(  # noqa: PLR0913, PLR0917 - an operation's arguments are tensors and numbers
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        transform: LogitTransform,
        kernel: Kernel,
        scale: torch.Tensor | None,
    ) -> torch.Tensor:
        dtype, (of_hidden, *of_head) = product_dtype(hidden), ctx.needs_input_grad[:3]
        losses = torch.empty(len(targets), dtype=torch.promote_types(dtype, torch.float32), device=hidden.device)
        head, ctx.last, ctx.hidden_alone = Head.of(hidden, weight, bias, dtype), None, of_hidden and not any(of_head)
        gradients = Gradients(head, (ctx.hidden_alone, False, False))
        for span, rows, logits in head.chunks():
            wanted, found = targets[span], losses[span]
            tanh = transform.apply_(logits)
            for block in spans(len(logits), max(1, block_logits(logits) // len(weight))):
                exact = logits[block].to(losses.dtype)
                found[block] = torch.logsumexp(exact, -1) - exact.gather(1, wanted[block, None])[:, 0]
            if ctx.hidden_alone:
                kernel(logits, wanted, True, None if scale is None else scale.expand(len(wanted)))
                transform.backward_(logits, tanh)
                gradients.add(span, rows, logits)
            elif any(of_head) and span.stop == len(hidden):
                ctx.last = span, rows, logits, tanh
            del logits, tanh  # before the next chunk has its own
        ctx.dtype, ctx.kernel, ctx.transform, ctx.scale = dtype, kernel, transform, scale
        ctx.save_for_backward(*gradients.made[:1] if ctx.hidden_alone else (hidden, weight, bias, targets))
        return losses

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.hidden_alone:
            (made,) = ctx.saved_tensors
            share = upstream if ctx.scale is None else upstream / ctx.scale
            return ((made * share[:, None]).to(made.dtype), None, None, None, None, None, None)
        hidden, weight, bias, targets = ctx.saved_tensors
        head = Head.of(hidden, weight, bias, ctx.dtype)
        gradients, last = Gradients(head, ctx.needs_input_grad[:3]), None
        if ctx.last is not None:
            (last, rows, logits, tanh), ctx.last = ctx.last, None
            ctx.kernel(logits, targets[last], True, upstream[last])
            ctx.transform.backward_(logits, tanh)
            gradients.add(last, rows, logits)
            del logits, tanh
        kernel = transformed(ctx.kernel, ctx.transform)
        for span, rows, logits in head.chunks(None if last is None else last.start):
            kernel(logits, targets[span], True, upstream[span])
            gradients.add(span, rows, logits)
            del logits
        return (*in_types(gradients.made, gradient_types(hidden, weight, bias)), None, None, None, None)


def product_dtype(hidden: torch.Tensor) -> torch.dtype:
    """The type of the products: autocast's where it is on."""
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


def gradient_types(*tensors: torch.Tensor | None) -> list[torch.dtype | None]:
    """The types of their gradients: their own, or what a parameter that is gathered in another one says."""
    return [None if tensor is None else _gradient_type(tensor) for tensor in tensors]


def _gradient_type(tensor: torch.Tensor) -> torch.dtype:
    said: torch.dtype | None = getattr(tensor, "grad_dtype", None) if tensor.is_leaf else None
    return said or tensor.dtype


def in_types(
    gradients: Sequence[torch.Tensor | None], dtypes: Sequence[torch.dtype | None]
) -> list[torch.Tensor | None]:
    """Each gradient in the type that is wanted."""
    return [None if g is None else g.to(dtype) for g, dtype in zip(gradients, dtypes, strict=True)]


def positions_of_chunk(columns: int, weight: torch.Tensor, memory: int | None) -> int:
    """Positions of a chunk with so many logits each, on the device of a weight; ``memory`` is a GPU's, in bytes."""
    kind = target(weight)
    most = CHUNK_LOGITS[kind] if memory is None else min(CHUNK_LOGITS[kind], memory // CHUNK_MEMORY)
    return max(1, most // _row_length(columns, kind == "cuda"))


def _row_length(columns: int, on_gpu: bool) -> int:
    """Elements from one row of the logits to the next."""
    return -(-columns // ALIGNED) * ALIGNED if on_gpu else columns


def block_logits(logits: torch.Tensor) -> int:
    """Logits in float32 at one time on the device of a tensor."""
    there, most = gpu_memory(logits), BLOCK_LOGITS[target(logits)]
    return most if there is None else min(most, there // BLOCK_MEMORY)


def spans(count: int, size: int) -> Iterator[slice]:
    """Slices of so many, ``size`` at a time."""
    return (slice(start, min(count, start + size)) for start in range(0, count, size))


def _blocks(weight: torch.Tensor) -> Iterator[slice]:
    return spans(len(weight), BLOCK_VOCABULARY[target(weight)])
