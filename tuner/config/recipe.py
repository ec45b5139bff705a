"""The recipe: every section, key, default and the sentence that help, schema and reference print.

One file, although a long one: it is read as the table of what a user may write, in the order of the reference page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, model_serializer, model_validator

from tuner.config import value_types
from tuner.config.chat_templates import TemplateNameOrPath
from tuner.config.eval_tasks import EVAL_TASKS, LABELS_ONCE, EvalTask
from tuner.config.ladder import SIZES, LadderSection
from tuner.config.methods import Method, SftMethod
from tuner.config.numbers import Bytes, CadenceSpan, Duration, Real, Skips, Span, StepRange, Steps, Whole, bare_number
from tuner.config.optimizers import GROUPS, ROWS, AdamwOptimizer, Optimizer
from tuner.config.portions import PortionsSection
from tuner.config.schedules import CosineSchedule, Schedule
from tuner.config.section import PLUGIN, Auto, Bool, ByKind, Durations, Effect, Items, Options, Section, Use, members
from tuner.config.value_types import NEVER, Names, OneOf, Several, Switch, T, Table, Text, Word, once, refuse, shown
from tuner.config.windows import WindowsSection

TIMES = ("s", "min", "h")
COUNTS = ("steps", "epochs", "tokens", "%")
Stage = Literal["start", "window", "epoch", "batch", "step", "evaluation", "save", "export", "end"]
STAGES: tuple[Stage, ...] = get_args(Stage)
"""When a hook may be called, in the order of a run."""
Globs = Annotated[tuple[str, ...], Several(item=Text(what="names or globs"), empty=True)]


class InitFrom(Section):
    """A place whose weights the model is given before the first step, and newer ones between steps where it says so."""

    path: Annotated[str, Text(what="a run, a checkpoint, an export, or the directory of a model or adapter")]
    """A run, one of its checkpoints, an export, or the directory of a Hugging Face model or adapter (required)."""
    load: Globs = ()
    """Its tensors to take: names or globs, * for a part of a name, ** for any parts; empty takes all."""
    exclude: Globs = ()
    """Its tensors to leave out, of those that `load` means: names or globs."""
    rename: Annotated[dict[str, str], value_types.Renames()] = {}
    """Names here by whole names there; {1} is what the first wildcard stood for. The first glob that fits counts."""
    strict: Bool = True
    """Refuse tensors that have no place here and, of a model taken whole, weights here that it does not have."""
    grow: Bool = False
    """Whether embeddings and output layers with fewer rows than here fill the first rows."""
    adapter: Word[Literal["auto", "merge", "keep"]] = "auto"
    """Of an adapter: merge it into the weights, or keep training it; auto keeps it where the recipe has an adapter."""
    every: Annotated[Durations | None, CadenceSpan(units=("steps", "windows", "epochs"))] = None
    """How often the newest checkpoint of a run, or step-N of a directory, takes the place of the one before."""


WEIGHT_SOURCES = Items(InitFrom, "a list of paths or of {path, load, exclude, rename, strict, grow, adapter, every}")


class ModelSection(Section):
    """The base model."""

    name_or_path: Annotated[str, Text(what="a hub name (owner/name) or a local directory")]
    """Hub name or local directory of the base model (required)."""
    revision: Annotated[str | None, Text(what="a commit or tag")] = None
    """Hub commit or tag; the commit used is recorded."""
    use: Annotated[str | None, Text(what="FILE.py:NAME or the name of an entry point", pattern=PLUGIN)] = None
    """A model class of your own for the config's model_type: FILE.py:NAME, or an entry point of tuner.models."""
    init: Word[Literal["pretrained", "random"]] = "pretrained"
    """Where the weights come from: pretrained files, or random numbers, which needs only the config (pre-training)."""
    config: Annotated[dict[str, Any], Table()] = {}
    """Overrides of the model's config.json, e.g. {num_hidden_layers: 6}."""
    dtype: Word[Literal["auto", "fp32", "bf16"]] = "auto"
    """Type of the weights: auto keeps trained ones in fp32 and frozen ones in bf16."""
    quantize: Word[Literal["none", "nf4", "int8"]] = "none"
    """Hold the linear layers of a frozen base in 4 or 8 bits: nf4 (as in QLoRA) or int8; needs an adapter."""
    kernels: Word[Literal["auto", "liger", "native", "torch"]] = "auto"
    """Fused kernels: auto takes liger on CUDA; on a CPU native ones, compiled on it, where there is a C compiler."""
    router_aux_loss_coef: Annotated[float | None, Real(ge=0)] = None
    """Weight of the loss that keeps experts evenly busy; null leaves it to the model's config, 0 adds none."""
    router_balance: Word[Literal["step", "micro_batch"]] = "step"
    """Over what that loss counts: a whole step, which takes one more forward of it, or each micro-batch by itself."""
    router_z_loss_coef: Annotated[float, Real(ge=0)] = 0.0
    """Weight of the loss that keeps routers' logits small: the mean square of their log-sum-exp (z-loss); 0: none."""
    freeze: Globs = ()
    """Parameters not trained in full fine-tuning: names or globs, e.g. [embed_tokens, model.layers.0]."""
    init_from: Annotated[tuple[InitFrom, ...], WEIGHT_SOURCES] = ()
    """Further weights that it begins with, later entries win: paths, or {path, load, exclude, rename, strict} each."""


class AddedToken(Section):
    """A text that becomes one token of the tokenizer."""

    token: Annotated[str, Text(what="the token's text", pattern=r"(?s)(?=.*\S).+")]
    """Text of the token, wherever it stands (required)."""
    special: Bool = False
    """A control token: it may end a turn, generation leaves it out of the text, and users' text cannot hold it."""


NEW_TOKENS = Items(AddedToken, "a list of texts or of {token, special}")


class TokenizerSection(Section):
    """The tokenizer and its chat template."""

    name_or_path: Annotated[str | None, Text(what="byte, a hub name or a local directory")] = None
    """Tokenizer to use; null takes the model's own, byte the built-in UTF-8 bytes."""
    chat_template: Annotated[str | None, TemplateNameOrPath()] = None
    """Built-in template by name, such as chatml or llama3, or path of a jinja file; null takes the tokenizer's own."""
    add_tokens: Annotated[tuple[AddedToken, ...], NEW_TOKENS, once(attrgetter("token"))] = ()
    """New tokens: texts, or {token, special} each. The embeddings grow by their rows, which are trained."""
    special_tokens_in_text: Word[Literal["refuse", "escape"]] = "refuse"
    """Control tokens in a record's text: refuse the record, or escape them as plain text; both are counted."""
    use: Annotated[str | None, Text(what="FILE.py:NAME or the name of an entry point", pattern=PLUGIN)] = None
    """FILE.py:NAME or an entry point of tuner.tokenizers: is called with that tokenizer, and returns the one to use."""
    args: Options = {}
    """Its keyword arguments."""


_ADAPTER_KIND = (
    "none trains the whole model; lora a low-rank adapter on a frozen one; dora also the norm of each weight row; "
    "peft an adapter by peft's own config."
)
AdapterKind = Annotated[Word[T], Field(description=_ADAPTER_KIND)]


class NoAdapter(Section):
    """Full fine-tuning."""

    kind: AdapterKind[Literal["none"]] = "none"


def _no_other_word_for_all(names: str | tuple[str, ...]) -> str | tuple[str, ...]:
    """Other tools write all or auto where all-linear is meant; as names of layers these mean nothing."""
    if isinstance(names, tuple) and len(names) == 1 and names[0].lower() in {"all", "auto", "all_linear", "default"}:
        raise refuse(f"got {names[0]!r}; write all-linear")
    return names


class LowRankAdapter(Section):
    """A low-rank adapter on a frozen model."""

    kind: str
    r: Annotated[int, Whole(ge=1, le=2**16)] = 16
    """Rank of the adapter."""
    alpha: Annotated[float, Real(gt=0)] = 32.0
    """Scale of the adapter: it is multiplied by alpha / r."""
    use_rslora: Bool = False
    """Multiply by alpha / sqrt(r) instead, which keeps the size of updates the same at high ranks (rsLoRA)."""
    dropout: Annotated[float, Real(ge=0, lt=1)] = 0.0
    """Dropout probability at the adapter's input."""
    target_modules: Annotated[
        Literal["all-linear"] | tuple[str, ...], Several(item=Text(what="names or globs")),
        AfterValidator(_no_other_word_for_all),
    ] = "all-linear"
    """Linear layers that get an adapter: all-linear (all but the output), or names or globs, e.g. [attn.*_proj]."""
    experts: Bool = False
    """Adapt the routed experts of each layer, too: both weights of each expert, A and B of its own for each."""
    modules_to_save: Globs = ()
    """Modules trained in full in addition to the adapter, in fp32: names or globs, e.g. [lm_head, embed_tokens]."""


class LoraAdapter(LowRankAdapter):
    """LoRA: a low-rank product is added to each weight."""

    kind: AdapterKind[Literal["lora"]] = "lora"


class DoraAdapter(LowRankAdapter):
    """DoRA: LoRA, with the norm of each row of the sum trained separately."""

    kind: AdapterKind[Literal["dora"]] = "dora"


PEFT_TYPES = ("IA3", "VERA", "OFT", "BOFT", "LOHA", "LOKR", "ADALORA", "LORA", "HRA", "MISS")
"""peft's kinds of adapters that change what linear layers compute by parameters of these layers' own, and that one
matrix can take the place of."""


def _of_peft(config: dict[str, Any]) -> dict[str, Any]:
    kind = config.get("peft_type")
    if kind not in PEFT_TYPES:
        names = ", ".join(PEFT_TYPES)
        got = "no peft_type" if kind is None else f"peft_type {shown(kind)}"
        raise refuse(f"got {got}; those that change linear layers alone are {names}")
    return config


class PeftAdapter(Section):
    """An adapter of peft's, by peft's own config."""

    kind: AdapterKind[Literal["peft"]] = "peft"
    config: Annotated[dict[str, Any], Table(), AfterValidator(_of_peft)]
    """peft's own config: peft_type and fields of its class, e.g. {peft_type: VERA, r: 64, target_modules: [q_proj]}."""

    @property
    def moves_base(self) -> bool:
        """Whether a part of the base's weights begins in the adapter (PiSSA, OLoRA), and what is left stays frozen."""
        return self.config.get("init_lora_weights") in ("pissa", "olora")

    @property
    def modules_to_save(self) -> Sequence[str]:
        """Modules trained in full in addition to the adapter."""
        return self.config.get("modules_to_save") or ()


Format = Literal["auto", "messages", "sharegpt", "alpaca", "prompt_completion", "text", "tokens"]
COLUMNS = (
    "messages", "conversations", "system", "tools",
    "instruction", "input", "output", "history",
    "prompt", "completion", "text",
    "input_ids", "labels", "loss_mask",
    "chosen", "rejected", "margin", "score_chosen", "score_rejected", "label",
)  # fmt: skip
"""Keys of a record that `columns` may find under another name."""


class DataSource(Section):
    """One source of records, and its share of them."""

    path: Annotated[str, Text(what="a file, a directory, a glob, - or owner/name:split")] = ""
    """File, also cut as rows.jsonl[:10%], directory, glob, - for stdin, or hub data set as owner/name:train[:5%]."""
    use: Annotated[str | None, Text(what="FILE.py:NAME or the name of an entry point", pattern=PLUGIN)] = None
    """In the place of path: FILE.py:NAME, or an entry point of tuner.data_sources, a function that yields records."""
    args: Options = {}
    """Its keyword arguments."""
    format: Word[Format] = "auto"
    """Form of the records; auto recognises it by the keys of each."""
    columns: Annotated[dict[str, str], Names(keys=COLUMNS)] = {}
    """Where our keys are in a record, e.g. {prompt: question, messages: chat.turns}; a dot goes into an object."""
    dtype: Word[Literal["auto", "uint8", "uint16", "uint32", "int32", "int64"]] = "auto"
    """Type of the token ids of a flat file, little-endian; auto: what the header of .npy or an .idx file says."""
    end_id: Annotated[int | Auto | None, Whole(ge=0, le=2**31)] = "auto"
    """Id that ends each document of an array; auto: by its index, else the tokenizer's; null: nothing parts it."""
    end_token: Bool = True
    """Put the end token after each plain text; false: nothing, for texts that hold it or are parts of longer ones."""
    weight: Annotated[float, Real(gt=0, le=1000)] = 1.0
    """Share of the source's documents that is used, drawn by the seed; above 1 repeats them."""
    count: Annotated[int | None, Whole(ge=1, le=2**53)] = None
    """Documents taken from the source, drawn by the seed; more than there are repeats them. Not with weight."""
    seed: Annotated[int | None, Whole(ge=0, le=2**63 - 1)] = None
    """Seed of that draw alone, which then stays, whatever the recipe's seed and the other sources are."""

    @property
    def name(self) -> str:
        """What it is, for people: its path, or the user's code."""
        return self.path or str(self.use)

    @model_serializer(mode="wrap")
    def _as_written(self, handler: Callable[[Any], Any]) -> dict[str, Any]:
        # Without the keys of the other form: what is written back has to load, and older runs have no `use`.
        others = {"path"} if self.use is not None else {"use", "args"}
        return {key: value for key, value in handler(self).items() if key not in others}

    @model_validator(mode="after")
    def _one_share(self) -> DataSource:
        if bool(self.path) is (self.use is not None):
            raise refuse("path and use exclude each other; remove one" if self.path else "path: missing; a file, a "
                         "directory, a glob, - or owner/name:split; or use: FILE.py:NAME")
        if self.count is not None and self.weight != 1:
            raise refuse("weight and count exclude each other; remove one")
        if not self.end_token and self.format not in {"auto", "text"}:
            raise refuse(f"end_token is of plain text, and format: {self.format} is none; remove it, or format")
        if self.seed is not None and self.count is None and self.weight == int(self.weight):
            raise refuse("seed draws a share of the documents, and neither count nor weight says which; remove it")
        return self


SPLIT = Span(units=("%", "documents"))


def is_split(text: object) -> bool:
    """Whether a value of data.eval means a share of the training documents (`2%`, `200 documents`), not a path."""
    try:
        SPLIT.read(text)
    except (ValueError, TypeError):
        return False
    return True


_KEYS = "{path, use, args, format, columns, dtype, end_id, end_token, weight, count, seed}"
SOURCES = Items(DataSource, f"a path, a list of paths or of {_KEYS}", one=True)
HELD_OUT = Items(DataSource, f"{SOURCES.allowed}, 2%, 200 documents or null", one=True)


def read_eval(value: Any) -> Any:
    """Turn data.eval into null, a split, or a list of mappings."""
    if value is None or isinstance(value, Duration):
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
        meant = bare_number(value, ("%",)) if value < 1 else f"{value} what? did you mean {value} documents?"
        raise refuse(str(meant))
    return SPLIT.read(value) if is_split(value) else HELD_OUT.read(value)


EvalSources = Annotated[
    Annotated[None, Tag("none")]
    | Annotated[Duration, SPLIT, Tag("split")]
    | Annotated[tuple[DataSource, ...], Tag("sources")],
    Discriminator(lambda value: "none" if value is None else "split" if isinstance(value, Duration) else "sources"),
    BeforeValidator(read_eval, json_schema_input_type=Any),
]


class RepetitionSection(Section):
    """Documents in which a short pattern of tokens is repeated over and over, which are not learned from."""

    min_period: Annotated[int, Whole(ge=1, le=2**12)] = 1
    """Tokens of the shortest pattern that is looked for."""
    max_period: Annotated[int, Whole(ge=1, le=2**12)] = 13
    """Tokens of the longest one."""
    max_count: Annotated[int | None, Whole(ge=2, le=2**24)] = None
    """Leave out documents in which a pattern stands more often than this in a row, such as 32; null: none."""

    @property
    def is_on(self) -> bool:
        """Whether such documents are looked for."""
        return self.max_count is not None


class DataSection(Section):
    """Training and held-out records, and how they become batches."""

    train: Annotated[tuple[DataSource, ...], SOURCES]
    """Training records: a path, or a list of paths and {path, use, format, columns, weight, count} (required)."""
    eval: EvalSources = None
    """Held-out records: the same forms, or `2%` or `200 documents` split off the training documents."""
    max_length: Annotated[int | Auto, Whole(ge=2, le=2**24)] = "auto"
    """Tokens of a packed row; auto is the smaller of the model's longest position and 2048."""
    too_long: Word[Literal["auto", "truncate", "split", "drop"]] = "auto"
    """What happens to longer documents or pairs, which are counted; auto: split for pretrain, drop for others."""
    min_piece_length: Annotated[int | None, Whole(ge=2, le=2**24)] = None
    """Tokens below which the last piece of a split document is left out, which is counted; null: all are kept."""
    max_prompt_length: Annotated[int | None, Whole(ge=1, le=2**24)] = None
    """Tokens of a pair's prompt: of a longer one the last are kept, which is counted; null: all."""
    packing: Annotated[bool | Auto, Switch()] = "auto"
    """Several documents to a row, isolated: end to end (true), or as a batch or one by one where need be (auto)."""
    pack_sources: Word[Literal["together", "apart"]] = "together"
    """Whether a packed row may hold documents of several sources (together), or is of one source alone (apart)."""
    rows: Word[Literal["packed", "cut"]] = "packed"
    """Documents are packed whole as they fit best, or cut: end to end in order, wherever a row is full (pretrain)."""
    shuffle: Bool = True
    """Visit the rows in a new order each epoch, given by the seed."""
    on_bad_row: Word[Literal["error", "skip"]] = "error"
    """Stop at a record that cannot be used, or skip and count it."""
    workers: Annotated[int | Auto, Whole(ge=1, le=1024)] = "auto"
    """Processes that encode records; auto: one per free core. Their number does not change the result."""
    engine: Word[Literal["local", "ray"]] = "local"
    """Where records are encoded: in processes of this machine (local), or in tasks of a Ray cluster (ray)."""
    cache_dir: Annotated[str | None, Text(what="the path of a directory")] = None
    """Where prepared data is kept; null takes $TUNER_CACHE, else ~/.cache/tuner."""
    repetition: RepetitionSection = RepetitionSection()
    windows: WindowsSection = WindowsSection()

    @property
    def portions(self) -> PortionsSection | None:
        """What divides the training data into portions that come one after the other; None where all are there."""
        sections = (getattr(self, name) for name in type(self).model_fields)
        return next((each for each in sections if isinstance(each, PortionsSection) and each.is_on), None)

    @property
    def packs_rows(self) -> bool:
        """Whether a row may hold several documents."""
        return self.packing is not False


class BatchChange(Section):
    """A point of the run from which on steps have another number of rows."""

    after: Annotated[Duration, Span(units=("steps", "tokens", "epochs"))]
    """How much is trained before it, such as 1000 steps or 2B tokens."""
    size: Annotated[int, Whole(ge=1, le=2**20)]
    """Rows of a step from there on."""


BATCH_CHANGES = Items(BatchChange, "a list of {after, size}")


class LengthWarmupSection(Section):
    """Rows that are short at first and become longer over the first steps, for pre-training."""

    on_resume: ClassVar[Mapping[str, Effect]] = dict.fromkeys(("steps", "start", "multiple_of", "truncate"), "refuse")
    steps: Annotated[int | None, Whole(ge=1, le=2**53)] = None
    """Steps over which rows grow, linearly, to data.max_length; null: they are whole from the first step on."""
    start: Annotated[int, Whole(ge=2, le=2**24)] = 256
    """Tokens of a row in the first step."""
    multiple_of: Annotated[int, Whole(ge=1, le=2**20)] = 128
    """What the tokens of a row are rounded down to a multiple of, in the steps after it."""
    truncate: Bool = True
    """Leave out the rest of a row; false: documents are cut there, and every token is trained."""

    @property
    def is_on(self) -> bool:
        """Whether rows are short at first."""
        return self.steps is not None


class TrainSection(Section):
    """Length, batch and numerics of training."""

    duration: Annotated[Duration, Span(units=("epochs", "steps", "tokens"))] = Duration.parse("1 epoch")
    """How long the whole run is."""
    stop_after: Annotated[Duration | None, Span(units=(*COUNTS, *TIMES), aliases=NEVER)] = None
    """Save and stop this launch after this long (exit code 75); the run can be resumed."""
    stop_file: Annotated[str | None, Text(what="the path of a file")] = None
    """A file that stops this launch as RUN/STOP does when it is there, and stays: one for many runs."""
    end_at: Annotated[int | None, Whole(ge=1, le=2**53)] = None
    """Step at which the run ends, finished, under the schedule of the whole duration; null ends it there."""
    min_steps: Annotated[int | None, Whole(ge=1, le=2**53)] = None
    """Steps that are taken at least: no early stop by eval.patience before; null sets no such bound."""
    global_batch_size: Annotated[int, Whole(ge=1, le=2**20)] = 16
    """Rows per optimizer step, on any number of processes; the default gives way to the nearest that they divide."""
    batch_schedule: Annotated[tuple[BatchChange, ...], BATCH_CHANGES] = ()
    """Other sizes of the global batch later in the run, in their order, such as [{after: 1000 steps, size: 64}]."""
    batch_scales_lr: Bool = False
    """Multiply the learning rate by the square root of how much larger than the first such a batch is."""
    length_warmup: LengthWarmupSection = LengthWarmupSection()
    micro_batch_size: Annotated[int | Auto, Whole(ge=1, le=2**20)] = "auto"
    """Rows per forward and process; auto: on CUDA as many as fit and pay, by prediction, else 1. Changes rounding."""
    precision: Word[Literal["auto", "fp32", "bf16", "fp16", "fp8"]] = "auto"
    """Type of the computation; auto: bf16 where the device is fast at it, else fp16 on CUDA (7.x), else fp32."""
    fp8_except: Globs = ()
    """Linear layers that stay in bf16 under fp8, besides those that cannot: names or globs, e.g. [layers.0, o_proj]."""
    tf32: Bool = False
    """Let CUDA round what float32 matrix products multiply to 10 bits, as TF32: several times as fast with fp32."""
    device: Word[Literal["auto", "cuda", "cpu"]] = "auto"
    """Where to train; auto takes CUDA when there is one."""
    gradient_checkpointing: Word[Literal["auto", "none", "selective", "full"]] = "auto"
    """Recompute decoder layers: full keeps only their inputs, selective also matrix products; auto: what is needed."""
    gradient_checkpointing_layers: Annotated[Duration, Span(units=("%", "layers"))] = Duration.parse("100%")
    """How many layers are recomputed, evenly spaced, such as 50% or 12 layers."""
    gradient_checkpointing_modules: Globs = ()
    """Modules of those layers that are recomputed in place of whole layers: names or globs, e.g. [mlp]; with full."""
    offload_activations: Annotated[bool | Auto, Switch()] = "auto"
    """Keep the inputs of recomputed layers in the host's memory until the backward pass; auto: where CUDA needs it."""
    tiled_mlp: Annotated[bool | Auto, Switch()] = "auto"
    """Compute each layer's MLP over tiles of positions, never for the whole row; auto: where CUDA needs it."""
    compile: Annotated[bool | Auto, Switch()] = "auto"
    """Compile the decoder layers in the first step, for rows of one size; auto: on CUDA, for documents end to end."""
    max_grad_norm: Annotated[float | None, Real(gt=0, aliases=NEVER)] = 1.0
    """Gradient norm above which gradients are scaled down; never clips nothing and still logs it."""
    nonfinite: Annotated[int, Skips()] = 0
    """On a loss or gradient that is not finite: stop (exit code 7), or skip up to N such updates with {skip: N}."""
    skip_spikes: Annotated[float | None, Real(gt=0, aliases=NEVER)] = None
    """Skip an update whose loss or gradient norm is so many standard deviations above the last steps' mean."""
    spike_window: Annotated[int, Whole(ge=2, le=4096)] = 128
    """The last steps, whose mean and deviation skip_spikes and spike_score go by; before as many, none is a spike."""
    skip_above: Annotated[float | None, Real(gt=0, aliases=NEVER)] = None
    """Skip an update whose gradient norm is above this."""
    steps_to_skip: Annotated[tuple[StepRange, ...], Several(item=Steps(), empty=True)] = ()
    """Steps left out with their batches, for bad data, such as [120, 300-310]; rows and schedule count them."""
    deterministic: Bool = False
    """Use only deterministic kernels: the same bits on the same machine each time, at some cost on CUDA."""
    overfit_first_batch: Bool = False
    """Train on the first global batch only: a setup that cannot overfit it has a bug."""
    mock_batch: Annotated[bool | Auto, Switch()] = "auto"
    """Run the largest possible micro-batch before the first step, to run out of memory early; auto: on CUDA."""


class EmaSection(Section):
    """An exponential moving average of the trained weights, kept in checkpoints next to them."""

    decay: Annotated[float | None, Real(gt=0, lt=1)] = None
    """Share of the average that stays at each update, such as 0.999; null keeps no average, but for half_life."""
    half_life: Annotated[Duration | None, Span(units=("steps",))] = None
    """The same by the steps after which weights count half, such as 500 steps, in place of decay."""
    evaluate: Bool = False
    """Evaluate the averaged weights, too, at each evaluation: ema/loss and ema/FIGURE in metrics.jsonl."""

    @property
    def is_on(self) -> bool:
        """Whether an average is kept."""
        return self.decay is not None or self.half_life is not None


class EvalSection(Section):
    """Evaluation on held-out rows, and of tasks."""

    every: Annotated[Durations | None, CadenceSpan(units=COUNTS)] = (Duration.parse("10%"),)
    """How often to evaluate; only where data.eval or eval.tasks is set."""
    marks: Annotated[Durations, Several(item=Span(units=COUNTS), empty=True)] = ()
    """Points of the run that are evaluated in addition, such as [1000 steps, 2B tokens]."""
    tasks: Annotated[tuple[EvalTask, ...], EVAL_TASKS, LABELS_ONCE] = ()
    """Tasks whose scores are measured too: JSONL files, lm_eval:NAME, FILE.py:NAME, or {task, name, every, ...}."""
    at_start: Bool = True
    """Evaluate before the first step."""
    at_end: Bool = True
    """Evaluate after the last step."""
    max_rows: Annotated[int | None, Whole(ge=1, le=2**53)] = None
    """Rows evaluated at most; null evaluates all."""
    samples: Annotated[int, Whole(ge=0, le=1000)] = 3
    """Held-out prompts answered at an evaluation, written to samples.jsonl; one of them is shown."""
    samples_at: Word[Literal["ends", "all"]] = "ends"
    """Evaluations that answer prompts: ends, the one before the first step and the one after the last, or all."""
    patience: Annotated[int | None, Whole(ge=1, le=10**6)] = None
    """Evaluations in a row, no better by eval/loss or what keep_best names, that end the run early; null: never."""
    min_delta: Annotated[float, Real(ge=0)] = 0.0
    """By how much an evaluation must be better than the best so far to count for patience, such as 0.01 nats."""


_BEST = (
    "eval/loss, a figure of the method such as eval/accuracy, either of one source, eval/loss/SOURCE, or of a task, "
    "eval/TASK/acc"
)


class CheckpointSection(Section):
    """Saving, so that a run can be resumed."""

    every: Annotated[Durations | None, CadenceSpan(units=(*COUNTS, *TIMES))] = (
        Duration.parse("500 steps"), Duration.parse("15 min")
    )
    """How often to save; the first duration that has passed counts."""
    at_start: Bool = False
    """Save before the first step, after its evaluation; that checkpoint is never pruned."""
    at_end: Bool = True
    """Save after the last step."""
    keep: Annotated[int, Whole(ge=1, le=10**6)] = 2
    """Newest checkpoints kept; marked ones and the best are extra."""
    keep_best: Annotated[str | None, Text(what=_BEST, pattern=r"eval/[A-Za-z0-9][\w.-]*(?:/.+)?")] = None
    """Loss or figure that decides which checkpoint is best: it is saved at its evaluation and never pruned."""
    marks: Annotated[Durations, Several(item=Span(units=COUNTS), empty=True)] = ()
    """Points of the run that are saved and never pruned, such as [1000 steps, 2B tokens]."""
    keep_every: Annotated[Durations | None, CadenceSpan(units=COUNTS)] = None
    """How often a checkpoint is saved that is never pruned, besides those of every, such as 1000 steps."""
    not_within: Annotated[int | None, Whole(ge=1, le=2**53)] = None
    """Steps before and after a checkpoint that is never pruned in which every saves none, such as 250."""
    async_save: Annotated[bool | Auto, Switch()] = "auto"
    """Copy to memory, then write while training continues: training waits only for the copy; auto: on a GPU."""


class ExportSection(Section):
    """Hugging Face directories that another process writes while the run trains."""

    every: Annotated[Durations | None, CadenceSpan(units=("steps", "epochs", "tokens", "%", *TIMES))] = None
    """How often to save and export a checkpoint to RUN/exports/step-N; RUN/exports/latest links to the newest."""
    at_end: Bool = False
    """Export the last checkpoint of a finished run."""
    keep: Annotated[int, Whole(ge=1, le=10**6)] = 2
    """Newest exports kept, of those in RUN/exports that were made with these settings."""
    dtype: Word[Literal["auto", "bf16", "fp32"]] = "auto"
    """Type of the written weights; auto: bf16, or fp32 where rounding costs over a fifth of what training changed."""
    keep_fp32: Globs = ()
    """Weights that are written in fp32, whatever dtype is: names or globs, e.g. [lm_head, router]."""
    shard_size: Annotated[int, Bytes()] = 5 * 10**9
    """Largest weights file, such as 5GB or 4GiB."""
    adapter: Word[Literal["merge", "keep"]] = "merge"
    """Merge an adapter into the weights, or keep it as peft's directory."""
    base: Word[Literal["auto", "original", "quantized"]] = "auto"
    """Merge an adapter of a quantised base into the base as published or as quantised; auto: the closer one, by KL."""


class ParallelSection(Section):
    """Several processes."""

    processes: Annotated[int | Auto, Whole(ge=1, le=1024)] = "auto"
    """Processes that tuner train starts on this machine; auto: one for each GPU. torchrun and srun start their own."""
    shard: Word[Literal["auto", "full", "hybrid", "none"]] = "auto"
    """Processes over which weights and their state are sharded; auto: none for adapters that fit, hybrid, else full."""
    replicas: Annotated[int | None, Whole(ge=1, le=2**20)] = None
    """Copies of the model with hybrid, each split over an equal part of all processes; null: one on each machine."""
    accumulate: Word[Literal["auto", "sharded", "whole"]] = "auto"
    """Gradients between micro-batches: sharded, reduced in each, or whole: more memory, less to send."""
    reduce_dtype: Word[Literal["fp32", "bf16"]] = "fp32"
    """Type in which gradients of sharded weights are sent and added up over processes: bf16 halves what is sent."""
    tensor: Annotated[int, Whole(ge=1, le=1024)] = 1
    """Processes that compute each layer together, each with a part of its matrices and of the vocabulary."""
    sequence: Annotated[int, Whole(ge=1, le=1024)] = 1
    """Processes that share each row, each with a part of its positions (Ulysses): for rows too long for one."""
    expert: Annotated[int, Whole(ge=1, le=1024)] = 1
    """Processes that have the routed experts of each layer between them; tokens are sent to their experts."""
    offload: Word[Literal["none", "host"]] = "none"
    """Where shards of weights, gradients and moments lie between layers: on the device, or in the host's memory."""
    reshard_after_forward: Bool = True
    """Free gathered weights after each forward: less memory, more communication."""
    numa_binding: Word[Literal["none", "node", "exclusive"]] = "none"
    """Cores of a local rank: any, those of its device's NUMA node (on CPUs an even split), or its own part of them."""
    timeout: Annotated[Duration, Span(units=TIMES)] = Duration.parse("30 min")
    """Longest time to wait for another process; lower it to fail faster when a rank hangs."""


class HealthSection(Section):
    """Checks of devices, collectives and copies of the model while a run trains; they change no bit of it."""

    every: Annotated[Durations | None, CadenceSpan(units=COUNTS)] = None
    """How often each device, the collectives and all copies of weights and moments are checked; exits with 4 or 6."""
    before_saves: Bool = False
    """Check the same before each save, so that no checkpoint of a damaged state is written."""
    times_every: Annotated[Durations | None, CadenceSpan(units=COUNTS)] = None
    """How often each process's own time in the decoder layers is measured and compared, in that step alone."""
    slow_rank: Annotated[float, Real(gt=1)] = 1.5
    """Warn of a rank that takes so many times as long per token as the median of the others, twice in a row."""


class ProfileSection(Section):
    """Steps of a run that are recorded, as it trains."""

    steps: Annotated[tuple[int, ...], Several(item=Whole(ge=1, le=2**53), empty=True)] = ()
    """Steps to record in RUN/profile on every process, such as [10, 11]; they take longer but compute the same."""
    memory: Annotated[bool | Literal["all"], Switch()] = True
    """Record the memory timeline by part, and what is largest at its peak; all: on CUDA of the whole launch, too."""
    entries: Annotated[int, Whole(ge=1, le=2**31)] = 100_000
    """Blocks taken and given back that the history of a whole launch holds at most: the newest."""
    time: Bool = True
    """Record a trace of operations and kernels, for Perfetto or chrome://tracing."""
    lines: Bool = False
    """Have the trace name the functions and lines of Python that called them; steps take several times as long."""
    cuda_sync: Bool = False
    """Have the trace show where CUDA's streams and the host wait for each other, for an analysis of critical paths."""


class ProberSection(Section):
    """Activations and gradients of chosen modules, written in chosen steps to compare two runs by."""

    steps: Annotated[tuple[StepRange, ...], Several(item=Steps(), empty=True)] = ()
    """Steps in which they are written to RUN/prober, such as [1, 100-102]; these take longer and compute the same."""
    modules: Annotated[tuple[str, ...], Several(item=Text(what="names or globs"), empty=True)] = ()
    """Modules that are looked into, and what is below them: names or globs, e.g. [embed_tokens, layers.0.*_proj]."""
    gradients: Bool = True
    """Write the gradients of their outputs and parameters, too, besides their outputs."""
    first_rows: Annotated[int | None, Whole(ge=1, le=2**53)] = None
    """Rows of each parameter's gradient that are written, the first ones; null writes it whole."""


Tracker = Literal["tensorboard", "wandb", "mlflow"]


STEP_FIGURES = (
    "epoch", "tokens", "lr", "grad_norm", "loss_scale", "router_aux", "router_balance", "router_z",
    "spike_score", "spike_score_last", "chinchilla", "local_loss", "step_s", "data_s", "tok_per_s", "trained_per_s",
    "mem_gib", "mem_reserved_gib", "data_wait", "mfu", "attention_share", "elapsed_s",
)  # fmt: skip
"""Numbers that a step's line of metrics.jsonl may have next to its loss and the figures of the method."""


class LoggingSection(Section):
    """What is printed."""

    level: Word[Literal["debug", "info", "warning", "error"]] = "info"
    """Minimum log level."""
    console_every: Annotated[Duration, Span(units=(*TIMES, "steps"))] = Duration.parse("2 s")
    """Time, or steps, between two refreshes of the console and of metrics.jsonl, which has every step."""
    console: Annotated[tuple[str, ...], Several(item=Text(what="names of metrics.jsonl"), empty=True)] = ()
    """Columns of the console between the losses and the time left, such as [lr, mfu, mem_gib]; empty: the usual."""
    metrics_of: Word[Literal["main", "all"]] = "main"
    """Processes that write metrics: rank 0, or each with own loss and speed; others to RUN/logs/rankN.metrics.jsonl."""
    internals: Annotated[Durations | None, CadenceSpan(units=COUNTS)] = None
    """How often figures of each decoder layer (RMS of weights, gradients, updates; largest logits) are written."""
    spike_score: Annotated[float | None, Real(gt=0, aliases=NEVER)] = None
    """Log the share of steps whose loss or gradient norm is so many standard deviations above the last steps' mean."""
    spike_score_last: Annotated[int, Whole(ge=1, le=10**6)] = 10_000
    """Steps of which the same share is logged as spike_score_last."""
    trackers: Annotated[tuple[Tracker, ...], Several(item=OneOf(), empty=True)] = ()
    """Trackers that also get every line of metrics.jsonl; each needs its library, such as wandb."""
    project: Annotated[str, Text(what="the name of a project")] = "tuner"
    """Project of wandb and experiment of mlflow that the run belongs to."""
    group: Annotated[str | None, Text(what="the name of a group")] = None
    """Group of wandb, and tag of mlflow, that the run is shown with; null: of a ladder's rung its name, else none."""
    tags: Annotated[tuple[str, ...], Several(item=Text(what="words"), empty=True)] = ()
    """Labels of the run in wandb and mlflow."""
    cancel_tags: Annotated[tuple[str, ...], Several(item=Text(what="words"), empty=True)] = ()
    """Tags that stop the run in order, as the file STOP does, when one is set on its page in wandb: [cancel]."""
    cancel_every: Annotated[Duration, Span(units=TIMES)] = Duration.parse("1 min")
    """Time between two looks at that page."""


Ending = Literal["finished", "stopped", "failed", "diverged"]
ENDINGS: tuple[Ending, ...] = get_args(Ending)
"""How a launch may end."""
WEBHOOK_VARIABLE = "TUNER_WEBHOOK_URL"
"""The variable of the environment that a webhook's address is read from: it is a secret with most services."""


class NotifySection(Section):
    """A webhook that hears of the end of a launch; what becomes of the message never changes the run."""

    webhook: Annotated[str | None, value_types.WebAddress(variable=WEBHOOK_VARIABLE)] = None
    """URL that gets a JSON document in a POST; null takes $TUNER_WEBHOOK_URL, and without that sends nothing."""
    events: Annotated[tuple[Ending, ...], Several(item=OneOf())] = ENDINGS
    """Endings that are sent: finished, stopped (can be resumed), failed, diverged."""
    timeout: Annotated[Duration, Span(units=("s", "min"))] = Duration.parse("10 s")
    """Longest time that the end of a launch waits for the webhook."""


class HookSection(Section):
    """User code that is notified of a run's progress."""

    use: Use
    """FILE.py:NAME, or the name of an entry point of the group tuner.hooks: a class or a function."""
    stages: Annotated[tuple[Stage, ...], Several(item=OneOf())] = tuple(one for one in STAGES if one != "batch")
    """What it is notified of; without a list all but batch."""
    every: Annotated[Durations | None, CadenceSpan(units=(*COUNTS, *TIMES))] = (Duration.parse("1 step"),)
    """How often it is notified of a step, or of its batch."""
    ranks: Word[Literal["main", "all"]] = "main"
    """Processes that call it: rank 0, or each, with what it knows of its own rows."""
    options: Options = {}
    """Keyword arguments of the class or function."""


HOOKS = Items(HookSection, "a list of {use, stages, every, ranks, options}")
ITEMS: dict[str, Items] = {
    "model.init_from": WEIGHT_SOURCES, "tokenizer.add_tokens": NEW_TOKENS, "data.train": SOURCES, "data.eval": HELD_OUT,
    "train.batch_schedule": BATCH_CHANGES, "optimizer.groups": GROUPS, "optimizer.rows": ROWS, "eval.tasks": EVAL_TASKS,
    "hooks": HOOKS, "ladder.sizes": SIZES,
}
"""Keys whose value is a list of sections."""
Adapter = Annotated[NoAdapter | LoraAdapter | DoraAdapter | PeftAdapter, ByKind()]

NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"


class Recipe(Section):
    """One typed recipe drives every command."""

    version: Word[Literal[1]] = 1
    """Version of the recipe's format."""
    name: Annotated[
        str | None, Text(what="letters, digits, '.', '_' and '-', starting with a letter or digit", pattern=NAME),
    ] = None
    """Name of the run; null takes the recipe's file stem."""
    output_dir: Annotated[str, Text(what="the path of a directory")] = "runs/{name}"
    """The run directory, stable so that a requeued job finds itself; the default starts from the working directory."""
    seed: Annotated[int, Whole(ge=0, le=2**63 - 1)] = 42
    """Seed of weights, order and dropout."""
    model: ModelSection
    tokenizer: TokenizerSection = TokenizerSection()
    adapter: Adapter = NoAdapter()
    method: Method = SftMethod()
    data: DataSection
    train: TrainSection = TrainSection()
    optimizer: Optimizer = AdamwOptimizer()
    schedule: Schedule = CosineSchedule()
    ema: EmaSection = EmaSection()
    eval: EvalSection = EvalSection()
    checkpoint: CheckpointSection = CheckpointSection()
    export: ExportSection = ExportSection()
    parallel: ParallelSection = ParallelSection()
    health: HealthSection = HealthSection()
    profile: ProfileSection = ProfileSection()
    prober: ProberSection = ProberSection()
    logging: LoggingSection = LoggingSection()
    notify: NotifySection = NotifySection()
    ladder: LadderSection = LadderSection()
    hooks: Annotated[tuple[HookSection, ...], HOOKS] = ()
    """User code that is notified of the run's progress: {use, stages, every, options} each, called in this order."""

    @property
    def has_open_end(self) -> bool:
        """Whether the length of the run is known only once the last portion of its data is."""
        return self.data.portions is not None and self.train.duration.unit == "epochs"


def _sections(owner: type[Section], above: str = "") -> Iterator[tuple[str, type[Section]]]:
    for name, info in owner.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, Section):
            yield f"{above}{name}", info.annotation
            yield from _sections(info.annotation, f"{above}{name}.")


SECTIONS: dict[str, type[Section]] = dict(_sections(Recipe))
"""Sections of one kind, those within another included, by dotted key."""
UNIONS: dict[str, dict[str, type[Section]]] = {
    name: members(info.annotation)
    for name, info in Recipe.model_fields.items()
    if any(isinstance(item, ByKind) for item in info.metadata)
}
"""Sections with a choice, each with its members by kind; the first one is the default."""
