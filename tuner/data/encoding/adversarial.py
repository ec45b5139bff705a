"""Texts in which tokenizers that look alike part: spaces, breaks, rare characters, and control tokens amid them."""

from collections.abc import Iterator

from tuner.data.encoding.tokenizer import TextTokenizer

_PLAIN = (
    *("", " ", "  ", "a", " a", "a ", "  a  b  ", "\n", "\n\na\n", "a\n b", "\t", "\r\n", " \n ", "0", "12345 3.14"),
    *("Hello, world!", "don't we'll", "x = {'a': [1, 2]}\n\treturn", "a\u00a0b", "\u3000x", "\ufeffx", "\u200bx"),
    *("\u00e9t\u00e9", "cafe\u0301 A\u030a", "\ufb01 \u0130 \u1e9b\u0323", "\u4e2d\u6587 \u5b57\u3002"),
    "\u05e9 \u0645",
    *("\U0001f642\u200d\U0001f468", "\U0001f1f3\U0001f1f4 x", "\u2581", "\u2581x a\u2581b", "\u0120x", "<0x0A>", "</s"),
    *("[INST] hi [/INST]", " [INST] <<SYS>>\nx\n<</SYS>>\n\n", "<|user|>\nhi", "USER: hi ASSISTANT:", "### Human:"),
)
_AROUND = (
    *("{}", "{}a", "{} a", " {}", "a{}", "a {} b", "{0}{0}", "{0} {0}", "{0}\n{0}  x", "\n{}\n", "a\n{}\n\nb"),
    *("{}[INST] a [/INST]", "{}\nuser\n", "  {}  \u4e2d"),
)
_TOKENS = 32


def adversarial_texts(tokenizer: TextTokenizer) -> Iterator[str]:
    """Yield some hundreds of texts: plain ones, and its special tokens and a share of its added ones amid others."""
    yield from _PLAIN
    named = list(dict.fromkeys(tokenizer.special_tokens.values()))
    others = [token for token in tokenizer.added_tokens if token not in named]
    for token in [*named, *others[:: 1 + len(others) // _TOKENS]]:
        yield from (around.format(token) for around in _AROUND)
