"""What an export did, and how closely it answers as the trained model does."""

from dataclasses import dataclass
from pathlib import Path

from tuner.export import verify
from tuner.export.answers import KEPT


@dataclass(frozen=True)
class ExportReport:
    """A published export. Differences are None where the same export was there already; bytes count all files.

    `max_difference` is the largest absolute difference of the logits at the ends of the probes.
    """

    path: Path
    step: int
    dtype: str
    adapter: str
    files: int
    weight_files: int
    bytes: int
    probes: int
    probes_recorded: bool
    max_difference: float | None
    seconds: float
    already_exported: bool
    id_probes: int = 0
    """Texts of which the exported tokenizer, loaded plainly, gave the ids of training."""
    max_relative_difference: float | None = None
    """The largest difference as a share of the largest logit."""
    base: str | None = None
    """What the adapter of a quantised base was merged into, original or quantized; None where neither."""
    kl_original: float | None = None
    """Of a quantised base: the KL from the trained model of what is merged into the original one, nats a token."""
    kl_quantized: float | None = None
    """The same of what is merged into the quantised one."""
    kl_tokens: int | None = None
    """Positions of the probes over which each KL is a mean."""
    kept: float | None = None
    """The share of what training changed that the written weights keep; None where nothing was rounded."""
    kl: float | None = None
    """The KL of their next-token distributions from the trained model's, nats a token."""
    gain: float | None = None
    """That of the base's from the trained model's: what training changed."""
    bf16_kept: float | None = None
    """The share that bf16 would have kept, where `auto` took fp32 for it."""
    auto_dtype: str | None = None
    """The type that `auto` takes, as far as this export shows it."""
    weights: str = "trained"
    """Which weights these are: the trained ones, or what average."""

    def choice(self) -> str:
        """Of a quantised base, how far what is merged into either one is from the trained model; else empty."""
        if self.kl_quantized is None:
            return ""
        figures = f"{self.kl_quantized:.2g} nats a token on the quantised base"
        if self.kl_original is not None:
            figures += f", {self.kl_original:.2g} on the original one"
        what = f"merged into the {self.base} base in {self.dtype}" if self.base else "the adapter is kept apart"
        return f"{what}; KL from the trained model over {self.kl_tokens:,} tokens: {figures}"

    def proof(self) -> str:
        """How closely the export matches the trained model, with the limits; empty where nothing was compared."""
        if self.max_difference is None or self.max_relative_difference is None:
            return ""
        model = "the trained model" if self.probes_recorded else "the checkpoint's model (the run recorded no probes)"
        model = model if self.weights == "trained" else f"the {self.weights}, rebuilt from the run"
        match = f"{self.probes} probes match {model}"
        exact = f"{verify.SAME_MODEL:.0e} of the largest logit"
        if self.base == "original":
            return f"{match} with the weights that were trained on in place of the original ones, to {exact}"
        if self.dtype == "fp32":
            return f"{match}: largest logit difference {self.max_relative_difference:.1e} (limit {exact})"
        moved = f"rounding moves them by at most {self.max_relative_difference:.1%} of it"
        return (
            f"{match}: every tensor is the trained one, rounded to {self.dtype} once; before rounding, logits agree to "
            f"{verify.SAME_MODEL:.0e} of the largest; {moved}"
        )

    def rounding(self) -> str:
        """What rounding keeps of what training changed; empty where nothing was rounded."""
        if self.bf16_kept is not None:
            return f"bf16 would keep {self.bf16_kept:.0%} of what training changed, so the weights are fp32"
        if self.dtype == "fp32" == self.auto_dtype:
            return "without the base model nobody knows what bf16 would keep, so the weights are fp32"
        if self.kept is None:
            return ""
        what = "the original base" if self.base == "original" else self.dtype
        figures = f"KL {self.kl:.2g} of {self.gain:.2g} nats a token, {self.kl_tokens:,} tokens"
        return f"{what} keeps {self.kept:.0%} of what training changed ({figures})"

    def remedy(self) -> str:
        """The options that keep what this export loses, where that is more than a fifth; else empty."""
        if self.kept is None or self.kept >= KEPT:
            return ""
        return f"{'--base quantized' if self.base == 'original' else '--dtype fp32'} --output {self.path}-kept"
