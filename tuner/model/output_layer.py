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
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from transformers import PretrainedConfig

from tuner.errors import RecipeError
from tuner.runtime.device import gpu_memory, target
from tuner.runtime.parts import local

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


class Vocabulary(Protocol):
    """The output layer where several processes have the rows of its weight between them, and logits of these alone.

    Which ones, and what the processes say to each other, is :mod:`tuner.parallel.vocabulary`'s.
    """

    def layer(self, head: Any, transform: LogitTransform, scale: torch.Tensor | None) -> "OutputLayer":
        """This process's rows of the model's output layer."""

    def positions(self, weight: torch.Tensor) -> int:
        """Positions of a chunk, the same on every process."""

    def softmax(self, logits: torch.Tensor, targets: torch.Tensor) -> Any:
        """Over all logits: what gives the ``losses`` ``[n]`` of a chunk, and is to be kept for their gradient."""

    def into_gradient(
        self, logits: torch.Tensor, targets: torch.Tensor, softmax: Any, weights: torch.Tensor | None
    ) -> None:
        """Turn this process's logits into the gradient of the losses, each times its weight ``[n]``, in place."""

    def add_up(self, of_hidden: torch.Tensor) -> None:
        """Add the gradient of the hidden states up over the processes, in place."""

    def lies(self, parameter: torch.Tensor | None) -> Any:
        """How a weight or bias lies over the processes: of one that does not nothing is kept."""

    def placed(self, gradient: torch.Tensor, lies: Any) -> torch.Tensor:
        """Its gradient as it lies."""

    def judged(self, head: "OutputLayer", hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """float32 ``[N, 2]``: the loss in nats, and 1 where the target is the likeliest token; without gradients."""

    def likeliest(self, head: "OutputLayer", hidden: torch.Tensor) -> torch.Tensor:
        """int64 ``[N]``: the likeliest token at each position."""


@dataclass(frozen=True)
class OutputLayer:
    """Weight ``[V, D]``, bias ``[V]`` or None, what the model does to their products, and the kernel of the loss.

    Under FSDP2 the weight is whole inside the root's forward alone: a loss is computed there. The products run in
    autocast's type where autocast is on; normaliser and losses are float32 (float64 for float64 inputs). A gradient
    that is made in the forward pass is rounded to the type of the products before that of the loss is known: with
    ``scale``, a scalar, it is made so many times as large, and divided by that when it is. Where weight and bias are in
    ``parts``, the kernel is theirs.
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
        scale = self.scale
        if scale is not None:
            weights = scale.expand(len(targets)) if weights is None else weights * scale

        def chunk(span: slice, logits: torch.Tensor, wants_gradient: bool) -> torch.Tensor:
            loss = self.kernel(logits, targets[span], wants_gradient, None if weights is None else weights[span])
            return loss if scale is None else loss / scale

        return self.summed(hidden, chunk)

    def summed(self, hidden: torch.Tensor, chunk: "ChunkLoss") -> torch.Tensor:
        """The sum of a loss of chunks of positions, whose gradient is made while the logits are there."""
        loss: torch.Tensor = _SummedLoss.apply(*self._given(hidden), self._how, chunk)  # type: ignore[no-untyped-call]
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
        losses: torch.Tensor = _PositionLosses.apply(*self._given(hidden), self._how, targets)  # type: ignore[no-untyped-call]
        return losses

    @property
    def _how(self) -> "_How":
        return _How(self.transform, self.kernel, self.scale, self.parts)

    def _given(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Hidden, weight and bias. Without gradients a function would still see those that want one, and make it."""
        if torch.is_grad_enabled():
            return hidden, self.weight, self.bias
        return hidden.detach(), self.weight.detach(), None if self.bias is None else self.bias.detach()

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


ChunkLoss = Callable[[slice, torch.Tensor, bool], torch.Tensor]
"""Of the positions of a chunk and their logits the summed loss; the logits become its gradient where that is wanted."""
Result = TypeVar("Result")
Objective = Callable[[torch.Tensor, OutputLayer, torch.Tensor], Result]
"""From the last hidden states ``[N, D]`` at N positions, the output layer, and targets int64 ``[N]``, to anything."""


def summed_cross_entropy(hidden: torch.Tensor, head: OutputLayer, targets: torch.Tensor) -> torch.Tensor:
    """The objective of next-token prediction."""
    return head.cross_entropy(hidden, targets)


def no_objective(hidden: torch.Tensor, head: OutputLayer, targets: torch.Tensor) -> tuple[()]:
    """That of a forward for what its layers do."""
    return ()


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
        self.hidden = torch.zeros_like(hidden, dtype=hidden_dtype) if wanted[0] else None
        """That of the hidden states in the type that it is added up in, where it is wanted."""
        make = torch.empty_like if len(hidden) else torch.zeros_like
        self._weight = make(weight, dtype=self._summed_in(weight)) if wanted[1] else None
        self._bias = torch.zeros_like(bias, dtype=self._summed_in(bias)) if wanted[2] and bias is not None else None
        self._first = True

    def add(self, span: slice, rows: torch.Tensor, logits: torch.Tensor) -> None:
        """Add the share of a chunk: its positions, their hidden states, and the gradient of their products."""
        weight, on_gpu = self._head.weight, self._head.on_gpu
        if self._bias is not None:
            self._bias += logits.sum(0, dtype=self._exact_dtype)
        if self.hidden is not None and on_gpu:
            self.hidden[span] = logits @ weight
        for block in _blocks(weight):
            share = logits[:, block]
            if self.hidden is not None and not on_gpu:
                self.hidden[span] += share @ weight[block].to(rows.dtype)
            if self._weight is not None:
                product = share.T @ rows
                self._weight[block].copy_(product) if self._first else self._weight[block].add_(product)
        self._first = False

    @property
    def made(self) -> list[torch.Tensor | None]:
        """What all chunks gave, that of the hidden states in their type."""
        hidden = None if self.hidden is None else self.hidden.to(self._head.hidden.dtype)
        return [hidden, self._weight, self._bias]

    def _summed_in(self, parameter: torch.Tensor) -> torch.dtype:
        """The type in which the gradient of weight or bias is added up: at least float32, however it is gathered."""
        return torch.promote_types(parameter.dtype, self._exact_dtype)


class _How(NamedTuple):
    """An output layer without its weight and bias: what a loss keeps of it until the backward pass."""

    transform: LogitTransform
    kernel: Kernel
    scale: torch.Tensor | None
    parts: Vocabulary | None

    def head(self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Head:
        return Head.of(hidden, local(weight), None if bias is None else local(bias), product_dtype(hidden))

    def chunks(
        self, head: Head, stop: int | None = None
    ) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor, torch.Tensor | None]]:
        """Positions, hidden states and logits of each chunk, and what :meth:`LogitTransform.backward_` wants."""
        for span, rows, logits in head.chunks(stop, None if self.parts is None else self.parts.positions(head.weight)):
            yield span, rows, logits, self.transform.apply_(logits)
            del logits  # before the next chunk has its own

    def judged(self, logits: torch.Tensor, targets: torch.Tensor, losses: torch.Tensor) -> Any:
        """Fill in the losses ``[n]`` of a chunk; returns what its gradient wants to know of them."""
        if self.parts is not None:
            softmax = self.parts.softmax(logits, targets)
            losses.copy_(softmax.losses)
            return softmax
        for block in spans(len(logits), max(1, block_logits(logits) // logits.shape[1])):
            exact = logits[block].to(losses.dtype)
            losses[block] = torch.logsumexp(exact, -1) - exact.gather(1, targets[block, None])[:, 0]
        return None

    def into_gradient(
        self, logits: torch.Tensor, targets: torch.Tensor, known: Any, weights: torch.Tensor | None
    ) -> None:
        if self.parts is None:
            self.kernel(logits, targets, True, weights)
        else:
            self.parts.into_gradient(logits, targets, known, weights)

    def made(self, gradients: "Gradients") -> list[torch.Tensor | None]:
        """Those by hidden, weight and bias, the first of them of all processes."""
        if self.parts is not None and gradients.hidden is not None:
            self.parts.add_up(gradients.hidden)
        return gradients.made

    def lie(self, *parameters: torch.Tensor | None) -> list[Any]:
        return [None if self.parts is None else self.parts.lies(one) for one in parameters]

    def returned(
        self, gradients: Sequence[torch.Tensor | None], dtypes: Sequence[torch.dtype | None], lie: Sequence[Any]
    ) -> list[torch.Tensor | None]:
        """Gradients by hidden, weight and bias in these types, the last two lying as their parameters do."""
        hidden, *own = [None if g is None else g.to(dtype) for g, dtype in zip(gradients, dtypes, strict=True)]
        if self.parts is not None:
            own = [None if g is None else self.parts.placed(g, how) for g, how in zip(own, lie, strict=True)]
        return [hidden, *own]


class _SummedLoss(torch.autograd.Function):
    """A scalar loss of which the forward pass makes the gradients: ``scale`` times as large where that is a tensor."""

    @staticmethod
    def forward(  # noqa: PLR0917 - an operation's arguments are tensors and numbers
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, how: _How, chunk: ChunkLoss
    ) -> torch.Tensor:
        head, wanted = how.head(hidden, weight, bias), ctx.needs_input_grad[:3]
        gradients = Gradients(head, wanted)
        loss = torch.zeros((), dtype=torch.promote_types(head.dtype, torch.float32), device=hidden.device)
        for span, rows, logits, tanh in how.chunks(head):
            loss += chunk(span, logits, any(wanted))
            if any(wanted):
                how.transform.backward_(logits, tanh)
                gradients.add(span, rows, logits)
            del logits, tanh  # before the next chunk has its own
        ctx.save_for_backward(*how.made(gradients))
        ctx.how, ctx.dtypes, ctx.lie = how, gradient_types(hidden, weight, bias), how.lie(weight, bias)
        return loss

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The saved gradients times that of the scalar ``upstream``."""
        # In place: a second backward through the same loss is refused by autograd.
        factor = upstream if ctx.how.scale is None else upstream / ctx.how.scale
        scaled = [None if g is None else g.mul_(factor) for g in ctx.saved_tensors]
        return (*ctx.how.returned(scaled, ctx.dtypes, ctx.lie), None, None)


class _PositionLosses(torch.autograd.Function):
    """The share that a position's loss has in the whole is known in the backward pass alone.

    Where the hidden states alone want a gradient, it is made while the logits are there, and only multiplied by that
    share later. Where the weight wants one too, the last chunk's logits are kept: at the peak of memory, which is the
    beginning of the backward pass, a chunk's are there in any case. Those of earlier chunks are made a second time.
    Where several processes have the vocabulary, what the softmax is made of is kept in any case, so that going backward
    asks the others for nothing but their share of the hidden states' gradient.
    """

    @staticmethod
    def forward(  # noqa: PLR0917 - an operation's arguments are tensors and numbers
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, how: _How, targets: Any
    ) -> torch.Tensor:
        head, (of_hidden, *of_head) = how.head(hidden, weight, bias), ctx.needs_input_grad[:3]
        losses = torch.empty(len(targets), dtype=torch.promote_types(head.dtype, torch.float32), device=hidden.device)
        ctx.how, ctx.last, ctx.known, ctx.hidden_alone = how, None, {}, of_hidden and not any(of_head)
        gradients = Gradients(head, (ctx.hidden_alone, False, False))
        for span, rows, logits, tanh in how.chunks(head):
            known = how.judged(logits, targets[span], losses[span])
            if ctx.hidden_alone:
                weights = None if how.scale is None else how.scale.expand(len(logits))
                how.into_gradient(logits, targets[span], known, weights)
                how.transform.backward_(logits, tanh)
                gradients.add(span, rows, logits)
            elif any(of_head):
                ctx.known[span.start] = known
                if span.stop == len(hidden):
                    ctx.last = span, rows, logits, tanh
            del logits, tanh  # before the next chunk has its own
        ctx.save_for_backward(*how.made(gradients)[:1] if ctx.hidden_alone else (hidden, weight, bias, targets))
        return losses

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        how: _How = ctx.how
        if ctx.hidden_alone:
            (made,) = ctx.saved_tensors
            share = upstream if how.scale is None else upstream / how.scale
            return ((made * share[:, None]).to(made.dtype), None, None, None, None)
        hidden, weight, bias, targets = ctx.saved_tensors
        head, stop = how.head(hidden, weight, bias), None
        gradients = Gradients(head, ctx.needs_input_grad[:3])

        def add(span: slice, rows: torch.Tensor, logits: torch.Tensor, tanh: torch.Tensor | None) -> None:
            how.into_gradient(logits, targets[span], ctx.known[span.start], upstream[span])
            how.transform.backward_(logits, tanh)
            gradients.add(span, rows, logits)

        if ctx.last is not None:
            stop = ctx.last[0].start
            add(*ctx.last)
            ctx.last = None
        for span, rows, logits, tanh in how.chunks(head, stop):
            add(span, rows, logits, tanh)
            del logits, tanh
        found = how.returned(how.made(gradients), gradient_types(hidden, weight, bias), how.lie(weight, bias))
        return (*found, None, None)


def product_dtype(hidden: torch.Tensor) -> torch.dtype:
    """The type of the products: autocast's where it is on."""
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


def gradient_types(*tensors: torch.Tensor | None) -> list[torch.dtype | None]:
    """The types of their gradients: their own, or what a parameter that is gathered in another one says."""
    said = [getattr(one, "grad_dtype", None) if one is not None and one.is_leaf else None for one in tensors]
    return [None if one is None else own or one.dtype for one, own in zip(tensors, said, strict=True)]


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
