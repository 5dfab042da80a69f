"""Tables as LaTeX, with the rules of booktabs."""

from __future__ import annotations

import re
from collections.abc import Sequence

from evaluation.results import Table

_SPECIAL = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{sign: rf"\{sign}" for sign in "&%$#_{}"},
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "`": r"\textasciigrave{}",
    '"': r"\textquotedbl{}",
    "→": r"$\rightarrow$",
    "≥": r"$\geq$",
    "≤": r"$\leq$",
    "±": r"$\pm$",
    "×": r"$\times$",
    "−": r"$-$",
    "–": "--",
    "…": r"\ldots{}",
}


def to_latex(tables: Sequence[Table]) -> str:
    """Return the tables as a file to `\\input`; its first line names the packages it needs."""
    lines = ["% \\usepackage[T1]{fontenc} \\usepackage{booktabs} \\usepackage{graphicx}"]
    return "\n\n".join([*lines, *(latex_table(table) for table in tables)]) + "\n"


def latex_table(table: Table) -> str:
    """Format a table as a float; a rule separates the paper's rows."""
    head = " & ".join(escape(cell) for cell in table.head)
    body: list[str] = []
    for number, row in enumerate(table.rows):
        if number and _is_paper(row) and not _is_paper(table.rows[number - 1]):
            body.append(r"\midrule")
        # {}: LaTeX takes a [ at the start of a row as an option of the \\ before it.
        body.append("{}" + " & ".join(escape(cell) for cell in row) + r" \\")
    notes = [_typeset(note) for note in table.notes]
    return "\n".join(
        [
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{escape(table.title)}. {' '.join(notes)}}}",
            rf"\label{{tab:{re.sub('[^a-z0-9]+', '-', table.title.lower()).strip('-')}}}",
            r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%",
            rf"\begin{{tabular}}{{l{'r' * (len(table.head) - 1)}}}",
            r"\toprule",
            head + r" \\",
            r"\midrule",
            *body,
            r"\bottomrule",
            r"\end{tabular}}",
            r"\end{table}",
        ]
    )


def escape(text: str) -> str:
    """Escape LaTeX's special characters."""
    return "".join(_SPECIAL.get(sign, sign) for sign in text)


def _typeset(note: str) -> str:
    """Escape a note; set text between backticks as code."""
    parts = note.split("`")
    # An odd number of backticks does not pair: all are plain characters.
    if len(parts) % 2 == 0:
        return escape(note)
    return "".join(
        rf"\texttt{{{escape(part)}}}" if number % 2 else escape(part)
        for number, part in enumerate(parts)
    )


def _is_paper(row: Sequence[str]) -> bool:
    return row[0].startswith("paper, ")
