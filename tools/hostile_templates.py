"""Chat templates made to take all memory, or to go on for ever, by kinds: written before the limits that stop them.

    python tools/hostile_templates.py            the names of all, by kind
    python tools/hostile_templates.py NAME       the source of one

`tools/template_limits_campaign.py` has a command meet each of them; tests/tools/test_template_limits.py renders them.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import NamedTuple


class HostileTemplate(NamedTuple):
    """A source, and what it attacks."""

    kind: str
    name: str
    source: str


_DOUBLED = "n.x ~ n.x"
_GROW = "{%% set n = namespace(x=%s) %%}{%% for i in range(%d) %%}{%% set n.x = %s %%}{%% endfor %%}"
_BIG = _GROW % ("'ab cd'", 22, "n.x ~ n.x")
"""Twenty million characters in `n.x`, where nothing stops them."""
_LIST = _GROW % ("[1]", 24, "n.x + n.x")
_MANY = _GROW % ("[messages[0].content]", 20, "n.x + n.x")
_TEN = _GROW % ("['a' * 2000000]", 9, "n.x + n.x")
"""Two million characters, five hundred times the same text in a list."""
_NEST = _GROW % ("[1]", 60, "[n.x, n.x]")
_PAIRS = _GROW % ("(1,)", 60, "(n.x, n.x)")
_TWINS = _PAIRS + "{% set a = n.x %}" + _PAIRS + "{% set b = n.x %}"


def _loop(body: str, times: int = 99999) -> str:
    return f"{{% for i in range({times}) %}}{body}{{% endfor %}}"


_KINDS: dict[str, dict[str, str]] = {
    "text by ~": {
        "tilde": _GROW % ("'aaaaaaaaaa'", 60, "n.x ~ n.x") + "{{ n.x | length }}",
        "tilde of eight": _GROW % ("'a'", 12, "n.x ~ n.x ~ n.x ~ n.x ~ n.x ~ n.x ~ n.x ~ n.x"),
        "tilde of a number": _GROW % ("1", 60, "n.x ~ n.x ~ i"),
    },
    "text by +": {
        "plus": _GROW % ("'a'", 60, "n.x + n.x"),
        "plus, kept": _GROW % ("['a' * 1000000]", 100000, "n.x + [n.x[-1] + 'b']"),
    },
    "text by *": {
        "product": "{{ 'a' * 4000000000 }}",
        "product of a product": "{% set a = 'a' * 60000000 %}{% set b = a * 60 %}{{ (b ~ '') | length }}",
        "product of a list": "{% set a = [[0] * 1000] * 60000 %}{{ (a * 1000) | length }}",
        "power": "{{ (10 ** 1000) ** 1000 }}",
        "power of a power": _GROW % ("10", 40, "n.x ** 9"),
        "square of a square": _GROW % ("7", 60, "n.x * n.x") + "{{ n.x % 10 }}",
        "a huge number as text": "{% set n = 10 ** 999 %}{{ (n * n * n * n * n * n * n * n * n) | string | length }}",
    },
    "replace": {
        "replace": _GROW % ("'aa'", 9, "n.x.replace('a', 'aaaaaaaaaa')"),
        "replace filter": _GROW % ("'aa'", 10, "n.x | replace('a', 'aaaaaaaaaa')"),
        "replace of nothing": "{% set b = 'b' * 60000 %}{{ b.replace('', b) | length }}",
    },
    "join": {
        "join": _GROW % ("'ab'", 40, "n.x.join(['a'] * 100)"),
        "join filter": _GROW % ("'ab'", 40, "([n.x] * 100) | join(n.x)"),
        "join of one text": _TEN + "{{ n.x | join | length }}",
    },
    "format": {
        "format width": "{{ '{:>20000000000}'.format(1) }}",
        "format width of an argument": "{{ '{:>{}}'.format(1, 20000000000) }}",
        "format by place": _GROW % ("'ab'", 30, "'{0}{0}{0}{0}'.format(n.x)"),
        "percent width": "{{ '%020000000000d' % 1 }}",
        "percent star": "{{ '%*d' % (2000000000, 1) }}",
        "percent by name": _GROW % ("'ab'", 30, "'%(a)s%(a)s%(a)s%(a)s' % {'a': n.x}"),
        "format filter": "{{ '%2000000000s' | format('a') }}",
        "format precision": "{{ '%.2000000000f' % 1.5 }}",
    },
    "slice and batch": {
        "slice": "{{ [1] | slice(10 ** 11) | list }}",
        "slice, uncounted": "{% for part in [1] | slice(10 ** 11) if part is none %}{% endfor %}",
        "batch": "{{ [1] | batch(10 ** 10, 'a') | list }}",
    },
    "range": {
        "ranges in lists": _GROW % ("[]", 99999, "n.x + [range(100000) | list]"),
        "range of all": "{{ range(10 ** 11) | list }}",
    },
    "loops": {
        "nested loops": _loop(_loop(_loop("a"))),
        "nested loops without text": _loop(_loop(_loop(""))),
        "a loop that leaves all out": _loop("{% for j in range(99999) if j < 0 %}{% endfor %}"),
        "loop controls": _loop("{% for j in range(99999) %}{% if j %}{% continue %}{% endif %}{% endfor %}"),
        "a long body": _loop("{{ i }}" * 4000),
        "recursive loop": "{% for a in [messages] recursive %}{{ loop([messages, messages]) }}{% endfor %}",
        "recursive loop, doubling": (
            "{% for a in [[1, 2]] recursive %}{% if loop.depth < 60 %}{{ loop([[1], [2]]) }}{% endif %}{% endfor %}"
        ),
        "sums of products in a loop": _loop("{% set a = (2 ** 999) ** 9 % 7 %}" * 20),
    },
    "macros": {
        "macro that doubles": "".join(
            f"{{% macro m{i}() %}}{{{{ m{i - 1}() }}}}{{{{ m{i - 1}() }}}}{{% endmacro %}}" for i in range(1, 41)
        ).replace("m0()", "'ab'")
        + "{{ m40() }}",
        "macro for ever": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "macro that grows": "{% macro f(x) %}{{ f(x ~ x) }}{% endmacro %}{{ f('ab') }}",
        "caller that doubles": (
            "{% macro f(n) %}{% if n %}{% call f(n - 1) %}{% endcall %}{% call f(n - 1) %}{% endcall %}{% endif %}"
            "{% endmacro %}{{ f(50) }}"
        ),
        "macro without a loop": (
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
        ),
    },
    "blocks": {
        "set block": "{% set a %}ab{% endset %}" + "{% set a %}{{ a }}{{ a }}{% endset %}" * 40 + "{{ a | length }}",
        "self": (
            "{% set n = namespace(d=0) %}{% block a %}{% set m = messages %}{% if m[0].d is not defined %}"
            "{{ self.a() }}{{ self.a() }}{% endif %}{% endblock %}"
        ),
        "filter block": "{% filter center(20000000000) %}a{% endfilter %}",
        "generation block": "{% set a = 'ab' %}"
        + "{% set a %}{% generation %}{{ a }}{{ a }}{% endgeneration %}{% endset %}" * 40
        + "{{ a }}",
    },
    "padding": {
        "center": "{{ 'a' | center(20000000000) }}",
        "center method": "{{ 'a'.center(20000000000) }}",
        "ljust": "{{ 'a'.ljust(20000000000) }}",
        "zfill": "{{ '1'.zfill(20000000000) }}",
        "expandtabs": "{{ '\\t'.expandtabs(2000000000) }}",
        "indent": "{{ ('a\\n' * 60000) | indent(60000) | length }}",
        "indent by a text": "{{ ('a\\n' * 60000) | indent('b' * 60000) | length }}",
        "wordwrap": "{{ ('a ' * 60000) | wordwrap(1, True, 'b' * 60000) | length }}",
    },
    "nests": {
        "tojson": _NEST + "{{ n.x | tojson }}",
        "tojson, indented": "{{ ([[[[[1]]]]] * 60000) | tojson(indent=60000) | length }}",
        "text of a nest": _NEST + "{{ n.x }}",
        "string filter": _NEST + "{{ n.x | string | length }}",
        "pprint": _NEST + "{{ n.x | pprint }}",
        "equal nests": _TWINS + "{{ a == b }}",
        "a nest as a key": _PAIRS + "{{ {n.x: 1} | length }}",
        "a deep key": _GROW % ("(1,)", 99999, "(n.x,)") + "{{ {n.x: 1} | length }}",
        "a deep list as text": _GROW % ("[1]", 99999, "[n.x]") + "{{ n.x }}",
        "nest in a namespace": _GROW % ("namespace(a=1)", 60, "namespace(a=n.x, b=n.x)") + "{{ n.x }}",
        "nest by join": _NEST + "{{ n.x ~ '' }}",
    },
    "lists": {
        "list + list": _GROW % ("[1]", 60, "n.x + n.x"),
        "sum of lists": _MANY + "{{ ([[0] * 1000] * 60000) | sum(start=[]) | length }}",
        "list of a text": _BIG + "{{ (n.x ~ '\u4e00') | list | length }}",
        "split": _BIG + "{{ n.x.split() | length }}{{ n.x.split('a') | length }}",
        "splitlines": _GROW % ("'ab\\n'", 23, "n.x ~ n.x") + "{{ n.x.splitlines() | length }}",
        "map of a big text": _TEN + "{{ n.x | map('upper') | list | length }}",
        "chain of map and select": _LIST
        + "{{ n.x | map('string') | select('in', n.x | map('string') | list) | list | length }}",
        "loop over a generator": _LIST + "{% for x in n.x | map('string') %}{{ loop.length }}{% break %}{% endfor %}",
    },
    "order": {
        "sort": _LIST + "{{ n.x | sort | length }}",
        "sort of big texts": _TEN + "{{ n.x | sort | length }}",
        "groupby": _TEN + "{{ [{'a': n.x[0]}] * 500 | int }}{{ ([{'a': n.x[0]}] * 500) | groupby('a') | length }}",
        "unique": _TEN + "{{ n.x | unique | list | length }}",
        "min": _TEN + "{{ n.x | min | length }}",
    },
    "dicts": {
        "dict growth": _GROW % ("{}", 999999, "dict(n.x, **{'a' ~ i: n.x})"),
        "fromkeys": _GROW % ("[]", 400, "n.x + [dict.fromkeys(range(100000), 1)]"),
        "xmlattr": _BIG + "{{ dict(a=n.x ~ '<', b=n.x, c=n.x) | xmlattr | length }}",
    },
    "slow searches": {
        "search from the right": "{% set a = 'a' * 8000000 %}{{ a.rfind('b' ~ 'a' * 4000000) }}",
        "strip of many": "{% set a = 'a' * 8000000 %}{{ a.strip('b' * 4000000 ~ 'a') | length }}",
        "trim of many": "{% set a = 'a' * 8000000 %}{{ a | trim('b' * 4000000 ~ 'a') | length }}",
        "in a list of long texts": (
            "{% set a, b = 'a' * 8000000, 'a' * 8000000 %}{% set l = [a ~ 'c'] * 1000000 %}"
            + _loop("{{ (b ~ 'd') in l }}", 99)
        ),
        "in a long text": "{% set a = 'a' * 8000000 %}" + _loop("{{ 'b' in a }}"),
        "count": "{% set a = 'a' * 8000000 %}" + _loop("{{ a.count('b') }}"),
    },
    "slow filters": {
        "striptags": "{{ ('<' * 8000000) | striptags | length }}",
        "striptags of comments": "{{ ('<!-' * 4000000 ~ '<!--' * 1000000) | striptags | length }}",
        "urlize": "{{ ('(www.a.b' * 1000000) | urlize | length }}",
        "urlize of brackets": "{{ ('(' * 4000000 ~ 'www.a.b' ~ ')' * 4000000) | urlize | length }}",
        "title": "{{ ('a ' * 8000000) | title | length }}",
        "wordcount": _loop("{{ ('a ' * 8000000) | wordcount }}"),
        "urlencode": "{{ ('\u4e00' * 8000000) | urlencode | length }}",
        "truncate": _loop("{{ ('a ' * 8000000) | truncate(8000000) | length }}"),
        "round": "{{ 1 | round(10 ** 11, 'ceil') }}",
        "filesizeformat": _loop("{{ ('9' * 4000000) | int(0, 16) | filesizeformat }}"),
        "lipsum": "{{ lipsum(10 ** 9) | length }}",
    },
    "case": {
        "case": _GROW % ("'\u0390' * 20", 60, "(n.x | upper) ~ (n.x | title)"),
        "encode": _GROW % ("[]", 400, "n.x + [('\U0001f642' * 4000000).encode('utf-32')]"),
        "to_bytes": "{{ (1).to_bytes(20000000000, 'big') | length }}",
        "translate": "{{ ('a' * 60000).translate({97: 'b' * 60000}) | length }}",
    },
    "time": {
        "strftime_now": "{{ strftime_now('%Y-%m-%d' * 8000000) | length }}",
    },
    "depth": {
        "parentheses": "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
        "ifs": "{% if messages %}" * 1500 + "a" + "{% endif %}" * 1500,
        "loops in loops": "{% for i in messages %}" * 30 + "a" + "{% endfor %}" * 30,
        "lists in lists": "{{ " + "[" * 5000 + "]" * 5000 + " }}",
        "nots": "{{ " + "not " * 9000 + "1 }}",
        "a chain of attributes": "{{ messages" + "[0]" * 9000 + " }}",
        "a chain of filters": "{{ 1" + " | abs" * 9000 + " }}",
        "a chain of sums": "{{ 1" + " + 1" * 9000 + " }}",
        "macros in macros": "".join(f"{{% macro m{i}() %}}" for i in range(300)) + "{% endmacro %}" * 300,
    },
    "large sources": {
        "an enormous literal": "{{ '" + "a" * 40_000_000 + "' | length }}",
        "an enormous list": "{{ [" + "1," * 2_000_000 + "] | length }}",
        "an enormous text": "a" * 40_000_000 + "{{ messages[0].content }}",
        "an enormous number": "{{ " + "9" * 4_000_000 + " }}",
        "many statements": "{{ messages[0].content }}" * 300_000,
        "many open comments": "{#" * 400_000,
        "a literal written in a loop": _loop("a" * 60_000),
    },
    "other templates": {
        "include": "{% include 'a' %}",
        "extends": "{% extends 'a' %}",
        "import": "{% import 'a' as a %}{{ a.b() }}",
        "extends itself": "{% extends self %}",
    },
    "errors": {
        "a giant error": "{{ raise_exception('a' * 60000000) }}",
        "a giant name": "{{ ({}['a' * 8000000]).b }}",
        "an error of a nest": _NEST + "{{ raise_exception(n.x) }}",
    },
    "late": {
        "with an answer": "{% if messages[-1].role == 'assistant' %}" + _GROW % ("'ab'", 60, _DOUBLED) + "{% endif %}a",
        "with a prompt": "{% if add_generation_prompt %}" + _GROW % ("'ab'", 60, "n.x ~ n.x") + "{% endif %}a",
        "cycle": _loop(_loop("{{ loop.cycle('a', 'b') }}")),
        "cycler": "{% set c = cycler('a' * 9000000, 'b' * 9000000) %}" + _GROW % ("''", 999, "n.x ~ c.next()"),
        "changed": _loop("{{ loop.changed('a' * 9000000 ~ i) }}"),
    },
}


HOSTILE = tuple(HostileTemplate(kind, name, source) for kind, named in _KINDS.items() for name, source in named.items())
"""All of them."""


def main() -> int:
    """Print the names, or a source."""
    for name in sys.argv[1:]:
        sys.stdout.write(next(one.source for one in HOSTILE if one.name == name))
    if not sys.argv[1:]:
        for kind, count in Counter(one.kind for one in HOSTILE).items():
            print(f"{kind} ({count}): {', '.join(one.name for one in HOSTILE if one.kind == kind)}")
        print(f"{len(HOSTILE)} templates of {len(_KINDS)} kinds")
    return 0


if __name__ == "__main__":
    sys.exit(main())
