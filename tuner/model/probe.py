"""Probe at start: is what training computes the model, as transformers loads it, of each document alone?"""

import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig, PreTrainedModel

from tuner.errors import RecipeError, is_out_of_memory
from tuner.model import transformers_private
from tuner.model.attention import WINDOWS, Unsupported
from tuner.model.build import decoder_of, has_score, head_layer
from tuner.model.few_layers import FewLayers, layers_of
from tuner.model.root import CausalLM
from tuner.model.row_layout import Route
from tuner.model.transformers_private import attention_of, new_of_class, plain_config, registered

_FIRST, _SECOND = 7, 9  # document lengths: different, so that a swapped bound shows
_KEPT = 5  # tokens of the second document that stay when those after them change
_SHORT = 2  # tokens that see each other: enough to ask which weights are used
_NOTING = "tuner_noting"
LEAK_ALLOWED, DIFFERENCE_ALLOWED = 1e-6, 1e-4
"""What float32 leaves of nothing, relative to the spread of the logits; of a leak at least, see :func:`_allowed`."""


@dataclass(frozen=True)
class IsolationReport:
    """Largest differences relative to the spread of the logits."""

    leak: float
    """Of logits after a change in the document before theirs and in the tokens after them."""
    against_alone: float
    """From the logits of the plainly loaded model for the document alone."""
    allowed: float = LEAK_ALLOWED
    """Of the leak."""

    @property
    def is_clean(self) -> bool:
        """Whether both are what float32 leaves of nothing."""
        return self.leak <= self.allowed and self.against_alone <= DIFFERENCE_ALLOWED


class RouteRefused(RecipeError):
    """On this route a model does not compute what it is; on another it may."""

    def __init__(self, name: str, why: str, where: str = "", hint: str = "choose another model") -> None:
        super().__init__(f"{name} cannot be trained{where}: {why}", hint=hint)
        self.why = why


Read = Callable[[Collection[nn.Module]], None]
"""Has the layers of a model that run have their values; it is given those that do not."""


def are_there(left_out: Collection[nn.Module]) -> None:
    """All values are."""


def prove_route(root: CausalLM, vocab_size: int, packed: bool, longest: int, read: Read = are_there) -> str | None:
    """Have the root go by the first route, from its own on, on which it is the plainly loaded model of each document.

    Returns why it left its own; None where it kept it. Arguments and errors are those of :func:`require_isolation`.
    """
    ways: tuple[Route, ...] = ("flat", "batch", "calls") if packed else ("flat", "batch")
    why = None
    for route in ways[ways.index(root.layout.route) :]:
        root.layout.set_route(route)
        try:
            require_isolation(root, vocab_size, packed, longest, read=read)
        except RouteRefused as error:
            if route == ways[-1]:
                raise
            why = why or error.why
        else:
            break
    return why


@torch.no_grad()
def require_isolation(
    root: CausalLM, vocab_size: int, packed: bool = True, longest: int = _SECOND, every_layer: bool = False,
    read: Read = are_there,
) -> IsolationReport:
    """Run two packed documents on the CPU and hold the second to what the plainly loaded model makes of it alone.

    That model has its class's own attention and masks (:func:`plain_twin`), so a missing causal
    mask, a transform of the logits or an option of attention that our path does not know shows. A change of the first
    document and of the last tokens must leave the logits between them as they are. Where rows are never ``packed``
    there is one document. No document is longer than ``longest``.

    All is computed in float32, whatever the weights are: rounded to bfloat16 at every step, the logits of two right
    ways to compute a deep model on random tokens are a tenth of their spread apart.

    Decoder layers that are alike but for the values of their weights compute alike, so the first and the last of each
    kind (:mod:`~tuner.model.few_layers`) stand for all, in both models, unless ``every_layer`` is asked for. What these
    do not pass is refused only if the whole model does not pass either.

    Raises RouteRefused, with the reason, where on its route it is not the model, and RecipeError where the model is not
    causal or does not run.
    """
    if root.layout.padding_number is not None:
        from tuner.model.refusal import require_positions

        require_positions(root.model.config, root.layout.padding_number, longest)
    few = FewLayers(root.model)
    if not every_layer:
        # A refusal, or an error, is the whole model's to give: a layer that is skipped may be what the next one needs.
        with suppress(RecipeError):
            while not few.is_whole:
                # A new one each time: some classes change their layers in a forward (BigBird's, for short rows).
                left_out = few.left_out(root.model)
                read(left_out)
                plain = plain_twin(root.model, left_out=left_out)
                found = _isolation(root, plain, few, vocab_size, packed, longest)
                if not few.grow():
                    return found
    read(())
    return _isolation(root, plain_twin(root.model), None, vocab_size, packed, longest)


def _isolation(
    root: CausalLM, plain: PreTrainedModel, few: FewLayers | None, vocab_size: int, packed: bool, longest: int
) -> IsolationReport:
    """What :func:`require_isolation` finds, of a few layers or of all."""
    ids = torch.randint(0, min(vocab_size, 32000), (_FIRST + _SECOND,), generator=torch.Generator().manual_seed(0))
    documents = (ids[:_FIRST], ids[_FIRST:])
    other = tuple((document + 1) % min(vocab_size, 32000) for document in documents)
    changed = (other[0], torch.cat([documents[1][:_KEPT], other[1][_KEPT:]]))
    name = type(root.model).__name__
    running = nullcontext() if few is None else few.running(plain)
    with _in_float32(root.model, (root, plain), few), running:
        with _refusing(partial(_unrunnable, name), "loaded by transformers alone it does not run on a row of ids"):
            expected = _plain_logits(plain, documents[1])
            if few is None:
                _require_causal(root.model, plain, expected, documents[1], changed[1])
            rounding = None if few else partial(_rounding, plain, documents[1], expected)
        how = "without a mask" if root.layout.route == "flat" else "on documents apart"
        what = f"its decoder, {how}, or its output layer on what that gives, does not run"
        with _refusing(partial(RouteRefused, name), what):
            adapters = _of_adapters(root.model)
            with nullcontext(set[str]()) if adapters is None else adapters.calls(root.model) as called:
                found = _compare(root, expected, documents[not packed :], changed[not packed :], rounding)
            if found.is_clean and packed and root.layout.route == "batch":  # the shorter one, which is filled up
                changed = (other[1], torch.cat([documents[0][:_KEPT], other[0][_KEPT:]]))
                documents, expected = documents[::-1], _plain_logits(plain, documents[0])
                found = _compare(root, expected, documents, changed, rounding)
            if found.is_clean:
                if adapters is not None:
                    runs, short = (None, documents[not packed :]) if few is None else (few.runs, [ids[:_SHORT]])
                    adapters.require_used(root.model, lambda: _last_logits(root, short), called, runs)
                require_same_reach(root, plain, longest)
                return found
            single = _compare(root, expected, documents[1:], changed[1:], rounding) if packed else found
            part = None if single.is_clean else _differing_part(root, plain, documents[-1], expected)
    raise _refusal(name, found, single, part)


def _of_adapters(model: nn.Module) -> Any:
    """The module for adapters, where the model has one; without it nothing of peft is loaded."""
    if not (hasattr(model, "peft_config") or any("lora_" in name for name, _ in model.named_parameters())):
        return None
    from tuner.model import adapter

    return adapter


def _refusal(name: str, packed: IsolationReport, single: IsolationReport, part: str | None) -> RouteRefused:
    """What is wrong with rows, packed ones and those of one document, and of these the ``part`` of the model."""
    if not single.is_clean:
        return RouteRefused(name, f"{part}: {_difference(single)}")
    moved = f"a change in one moves the other by {packed.leak:.1e}, allowed {packed.allowed:.0e}"
    why = f"its documents see each other ({moved})"
    if packed.leak <= packed.allowed:
        why = f"in the second place of a row {_difference(packed)}"
    return RouteRefused(name, why, " on packed rows")


def _differing_part(root: CausalLM, plain: PreTrainedModel, ids: torch.Tensor, expected: torch.Tensor) -> str:
    """The part of a model that our path does not compute: what follows its last hidden states, or what makes them."""
    if not has_score(root.model):
        hidden = decoder_of(plain)(input_ids=ids[None], use_cache=False).last_hidden_state[0]
        logits = head_layer(root.model)(hidden if root.before_output is None else root.before_output(hidden))
        root.logit_transform.apply_(logits)
        if logits.shape != expected.shape or not _relative(logits.float(), expected) <= DIFFERENCE_ALLOWED:
            return "its logits are more than its output layer makes of its last hidden states"
    return "its layers are not computed as its class computes them"


def _difference(found: IsolationReport) -> str:
    if not found.leak <= found.allowed:
        return f"a later token moves earlier logits by {found.leak:.1e}, allowed {found.allowed:.0e}"
    return (
        "the logits that would be trained differ from the model's own, as transformers loads it, by "
        f"{found.against_alone:.1e}, allowed {DIFFERENCE_ALLOWED:.0e}"
    )


def _unrunnable(name: str, why: str) -> RecipeError:
    return RecipeError(f"{name} cannot be trained: {why}", hint="choose another model")


@contextmanager
def _refusing(refused: Callable[[str], RecipeError], what: str) -> Iterator[None]:
    """Turn what a model's own code raises for inputs that it does not take into what is ``refused`` for a reason."""
    try:
        yield
    except Unsupported as error:
        raise refused(str(error)) from error
    except (TypeError, ValueError, KeyError, AttributeError, IndexError, AssertionError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        from tuner.model.refusal import in_words

        raise refused(f"{what}: {in_words(error)}") from error


@contextmanager
def _in_float32(model: PreTrainedModel, roots: Sequence[nn.Module], few: FewLayers | None = None) -> Iterator[None]:
    """Within, what shares a model's parameters computes in float32, or the ``few`` layers of it that run."""
    if all(one.dtype == torch.float32 or not one.is_floating_point() for one in model.parameters()):
        yield
        return
    from tuner.model.widened import Widened  # trainings in full have no other

    wide = Widened(model, narrow=few is not None)
    with ExitStack() as widened:
        for root in roots:
            of = root.model if isinstance(root, CausalLM) else root
            widened.enter_context(wide.computing(root, () if few is None else few.left_out(of)))
        yield


def _compare(
    root: CausalLM, expected: torch.Tensor, documents: Sequence[torch.Tensor], changed: Sequence[torch.Tensor],
    rounding: Callable[[], float] | None,
) -> IsolationReport:
    """Of the last of the documents, packed into one row: how far it moves with the others, and is from ``expected``.

    Of few layers (without ``rounding``) all are first in one row with the changed last one at its beginning, which
    takes half the time of a large model. That one has none before it, and the last has all others: what they see of
    each other tells them apart. Where they are, the two rows say whether it is more than their places.
    """
    if rounding is None and len(documents) > 1:
        first, *_, last = _logits_of(root, [changed[-1], *documents])
        found = IsolationReport(_moved(last, first), _relative(last, expected))
        if found.is_clean:
            return found
    logits = _last_logits(root, documents)
    leak = _moved(logits, _last_logits(root, changed))
    return IsolationReport(leak, _relative(logits, expected), _allowed(leak, rounding))


def _allowed(leak: float, rounding: Callable[[], float] | None) -> float:
    """How far logits may move that nothing moves: always so much, or twice what ``rounding`` does, where that is more.

    A mixture of 16 layers with random weights comes to 8e-6. Few layers need none of it.
    """
    if leak <= LEAK_ALLOWED or rounding is None:
        return LEAK_ALLOWED
    return min(max(LEAK_ALLOWED, 2 * rounding()), DIFFERENCE_ALLOWED)


def _rounding(plain: PreTrainedModel, ids: torch.Tensor, expected: torch.Tensor) -> float:
    """How far logits move by rounding in a model as deep as this."""
    from tuner.model.widened import rounded_apart  # hardly any needs it

    return _moved(expected, rounded_apart(layers_of(plain), lambda: _plain_logits(plain, ids)))


def _last_logits(root: CausalLM, documents: Sequence[torch.Tensor]) -> torch.Tensor:
    """Logits ``[n, V]`` of the last document of a row; of a reward model the hidden states ``[n, D]`` it scores."""
    return _logits_of(root, documents, len(documents) - 1)[-1]


def _logits_of(root: CausalLM, documents: Sequence[torch.Tensor], begin: int = 0) -> tuple[torch.Tensor, ...]:
    """The same of each document of a row from the one at ``begin`` on."""
    lengths = tuple(map(len, documents))
    position_ids = torch.cat([torch.arange(length) for length in lengths])
    positions = torch.arange(sum(lengths[:begin]), sum(lengths))
    ids = torch.cat(list(documents))
    if has_score(root.model):  # one number has no spread: what it is made of is compared
        from tuner.model.score import scored

        given = scored(root.model, lambda: root.logits(ids, position_ids, lengths, positions))[0]
    else:
        given = root.logits(ids, position_ids, lengths, positions)
    return tuple(given.float().split(lengths[begin:]))


def _plain_logits(plain: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    if has_score(plain):
        from tuner.model.score import hidden_of_class

        return hidden_of_class(plain, ids)
    logits: torch.Tensor = plain(input_ids=ids[None], use_cache=False).logits[0].float()
    return logits


def _require_causal(
    model: PreTrainedModel, plain: PreTrainedModel, expected: torch.Tensor, ids: torch.Tensor, changed: torch.Tensor
) -> None:
    """Refuse a model whose class, as it is loaded, has tokens see later ones. RecipeError.

    Of few layers that need not be asked: they are compared with the class, and may not see later tokens either.
    """
    own = _moved(expected, _plain_logits(plain, changed))
    if own <= _allowed(own, partial(_rounding, plain, ids, expected)):
        return
    from tuner.model.refusal import not_causal  # what a model that is trained goes without

    why, hint = not_causal(model.config, own, partial(_is_causal, model, ids, changed))
    raise RecipeError(f"{type(model).__name__} cannot be trained: {why}", hint=hint)


def _is_causal(model: PreTrainedModel, ids: torch.Tensor, changed: torch.Tensor, config: PretrainedConfig) -> bool:
    """Whether a model is causal with another config: its logits before a change stay as they are."""
    try:
        plain = plain_twin(model, config)
        with _in_float32(plain, (plain,)):
            return _moved(_plain_logits(plain, ids), _plain_logits(plain, changed)) <= LEAK_ALLOWED
    except Exception:  # noqa: BLE001 - whatever a class raises for that config, it is no remedy
        return False


def _moved(logits: torch.Tensor, after: torch.Tensor) -> float:
    """How far the logits moved at the tokens before those that changed."""
    return _relative(after[:_KEPT], logits[:_KEPT])


def _relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / (b - b.mean(-1, keepdim=True)).norm().clamp_min(1e-12))


@torch.no_grad()
def plain_twin(
    model: PreTrainedModel, config: PretrainedConfig | None = None, left_out: Collection[nn.Module] = ()
) -> PreTrainedModel:
    """A new model of the same class and config, with its class's own attention and masks, in evaluation mode.

    With a ``config`` of that class that one. The layers ``left_out`` stay without storage: they are not to run.

    Parameters and buffers are those of ``model``, not copies. Modules that training put there (adapters, rows of new
    tokens) are copied around the same tensors. Kernels that were swapped in are not: they are held to the originals.
    """
    with torch.device("meta"):
        twin = new_of_class(type(model), config or plain_config(model.config), dtype=model.dtype)
    shared: dict[int, Any] = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
    _share(twin, model, {**shared, id(model.config): twin.config}, left_out)
    twin.config.use_cache = False
    twin.eval()
    return twin


def _share(into: nn.Module, of: nn.Module, memo: dict[int, Any], left_out: Collection[nn.Module]) -> None:
    if of in left_out:
        return
    into._parameters.update(of._parameters)
    into._buffers.update(of._buffers)
    # Tensors that are neither are made in the constructor from the config alone, where nothing has storage.
    vars(into).update({key: value for key, value in vars(of).items() if isinstance(value, torch.Tensor)})
    for name, child in of.named_children():
        if type(into._modules.get(name)) is type(child):
            _share(into.get_submodule(name), child, memo, left_out)
        else:
            into._modules[name] = copy.deepcopy(child, memo)


@torch.no_grad()
def require_same_reach(root: CausalLM, plain: PreTrainedModel, longest: int) -> None:
    """Check how many tokens back each layer looks: by transformers' masks, and by the options of our attention.

    A model may say a sliding window, or chunks, in its masks alone. Our attention never sees those, and short documents
    do not show it. One token goes through both, and what the last one of ``longest`` would see is compared. Does
    nothing where no window or chunk of the config is shorter. Raises RouteRefused naming both numbers.
    """
    values = root.model.config.get_text_config().to_dict().items()
    named = {key: n for key, n in values if key in WINDOWS or "window" in key or "chunk" in key}
    bounds = [n for n in named.values() if type(n) is int and n > 1]
    if not root.layout.takes_documents or all(bound >= longest for bound in bounds):
        return
    ids, masks = torch.zeros(1, dtype=torch.int64), _Masks(longest)
    AttentionMaskInterface.register(_NOTING, masks.make)
    wanted = _noted(plain, masks.reach, lambda: plain(input_ids=ids[None], use_cache=False))
    asked = _noted(
        root.model,
        # Of chunks, the tokens of the last one of the longest document.
        lambda _, asked: min(asked.get("sliding_window") or longest, (longest - 1) % (asked["chunk"] or longest) + 1),
        lambda: root.logits(ids, ids, (1,), ids),
    )
    for layer, (seen, ours) in enumerate(zip(wanted, asked, strict=False)):
        if seen is not None and seen != ours:
            raise RouteRefused(
                type(root.model).__name__,
                f"its layer {layer} sees {seen:,} of them by a mask of its own, and all {ours:,} in packed attention",
                f" on documents of {longest:,} tokens",
                hint=f"set data.max_length to at most {min(bounds):,}, or choose another model",
            )


class _Masks:
    """transformers' masks, and how far back each one reaches of the last token of the longest document."""

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._made: list[tuple[torch.Tensor, int | None]] = []

    def make(self, **options: Any) -> torch.Tensor:
        """A mask as transformers makes it."""
        mask: torch.Tensor | None = transformers_private.sdpa_mask(**{**options, "allow_is_causal_skip": False})
        assert mask is not None  # what it may be where it may be skipped
        try:
            last, keys = torch.tensor(self._longest - 1), torch.arange(self._longest)
            seen = torch.as_tensor(options["mask_function"](0, 0, last, keys))
            self._made.append((mask, int(seen.expand(self._longest).sum())))
        except (IndexError, RuntimeError, TypeError):  # of a kind that knows this row alone
            self._made.append((mask, None))
        return mask

    def reach(self, given: object, options: dict[str, Any]) -> int | None:
        """What a mask shows, where it is one of these."""
        return next((seen for mask, seen in self._made if mask is given), None)


def _noted(
    model: PreTrainedModel, reach: Callable[[object, dict[str, Any]], int | None], run: Callable[[], object]
) -> list[int | None]:
    """What ``reach`` makes of each layer's mask and options, while ``run`` has the model attend to one token."""
    noted: list[int | None] = []

    def attend(
        module: nn.Module, query: Any, key: Any, value: Any, attention_mask: Any = None, **options: Any
    ) -> tuple[torch.Tensor, None]:
        kept = {"chunk": getattr(module, "tuner_chunk", 0), "sliding_window": getattr(module, "tuner_window", None)}
        noted.append(reach(attention_mask, {**kept, **options}))
        # A token that sees itself alone gets its own value ``[1, heads, 1, d]``.
        return value.repeat_interleave(query.shape[1] // value.shape[1], 1).transpose(1, 2), None

    chosen = attention_of(model.config)
    AttentionInterface.register(_NOTING, attend)
    model.set_attn_implementation(_NOTING)
    try:
        run()
    finally:
        model.set_attn_implementation(chosen)
        for interface in (AttentionInterface, AttentionMaskInterface):
            registered(interface).pop(_NOTING, None)
    return noted
