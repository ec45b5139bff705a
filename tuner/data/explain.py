"""What is trained, token by token: for people who want to see it before they train."""

from collections.abc import Iterator
from dataclasses import dataclass

from tuner.data.encoded import encode_rows, first_rows, row_error
from tuner.data.prepare import PrepareRequest
from tuner.data.problems import RowProblem
from tuner.data.sources import expand


@dataclass(frozen=True)
class TokenView:
    """One token of an explained row."""

    text: str
    id: int
    trained: bool
    rule: str
    """Which part of the row it belongs to, such as `assistant turn` or `template`."""


def explain(request: PrepareRequest, n: int) -> Iterator[list[TokenView]]:
    """Yield the tokens of the first `n` training rows, before any cutting. DataError for a row that cannot be used."""
    encoder = request.encoder()
    for row, file in first_rows(expand(request.data.train), n):
        document = encode_rows([row], encoder, file.format)[0]
        if isinstance(document, RowProblem):
            raise row_error(row, document)
        rules = [""] * len(document.input_ids)
        for span in document.spans:
            rules[span.start : span.stop] = [span.rule] * (span.stop - span.start)
        # The first token of a document is predicted from nothing: it is never a target.
        yield [
            TokenView(request.tokenizer.decode([int(token)]), int(token), bool(trained) and i > 0, rule)
            for i, (token, trained, rule) in enumerate(zip(document.input_ids, document.trained, rules, strict=True))
        ]
