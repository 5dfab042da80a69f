"""The report as one HTML page that needs nothing else: style, images and curves are in it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

from evaluation.grounding.heatmaps import data_uri
from evaluation.html_report.curves import Chart, svg
from evaluation.results import Table

if TYPE_CHECKING:
    from evaluation.html_report.html_report import RunPart

STYLE = """
:root { color-scheme: light dark; --page: #fff; --ink: #1a1c1f; --soft: #565c64; --rule: #d5d9de;
  --band: #f3f5f7; --link: #0b57a4; --c0: #0b62b5; --c1: #b3460a; --c2: #14734a; --c3: #a2267f;
  --c4: #6c5200; --c5: #5b48c0; --c6: #b01e2f; --c7: #4c5560; }
@media (prefers-color-scheme: dark) { :root { --page: #15181c; --ink: #e8eaed; --soft: #a9b1ba;
  --rule: #3a4149; --band: #1e2328; --link: #8ec2ff; --c0: #6fb3ff; --c1: #ff9a5c; --c2: #5fd39b;
  --c3: #f286cf; --c4: #e3c14b; --c5: #b3a5ff; --c6: #ff8590; --c7: #b6c0ca; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 1rem; background: var(--page); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: .5rem 0; }
h2 { font-size: 1.3rem; border-bottom: 2px solid var(--rule); margin: 2.5rem 0 .75rem; }
h3 { font-size: 1.05rem; margin: 1.5rem 0 .5rem; }
h4 { font-size: .95rem; margin: 1.1rem 0 .4rem; }
a { color: var(--link); }
nav ul { padding: 0; list-style: none; display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; }
nav a { display: inline-block; padding: .3rem 0; }
nav.parts { font-size: .92rem; }
:focus-visible { outline: 3px solid var(--link); outline-offset: 2px; }
.skip { position: absolute; left: -99rem; }
.skip:focus { position: static; }
.unseen { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%);
  padding: 0; }
.wide { position: relative; width: fit-content; max-width: 100%; overflow-x: auto;
  border: 1px solid var(--rule); border-radius: .4rem; }
table { border-collapse: collapse; font-size: .9rem; }
.interval { display: block; color: var(--soft); font-size: .85em; }
caption { text-align: left; font-weight: 600; padding: .4rem .6rem; }
th, td { padding: .3rem .6rem; border-top: 1px solid var(--rule); text-align: right;
  white-space: nowrap; overflow-wrap: normal; font-variant-numeric: tabular-nums; }
th { font-weight: 600; background: var(--band); }
thead tr:first-child > *, .facts caption + tbody tr:first-child > * { border-top: 0; }
th[scope=row] { text-align: left; position: sticky; left: 0; background: var(--page);
  white-space: normal; min-width: 8rem; max-width: 18rem; font-weight: 500; }
thead th { text-align: right; white-space: normal; min-width: 4.6rem; vertical-align: bottom; }
thead th:first-child { text-align: left; }
tr.paper th, tr.paper td, tr.chance th, tr.chance td { color: var(--soft); }
tr.first th, tr.first td { border-top: 2px solid var(--soft); }
.tables { display: flex; flex-wrap: wrap; gap: 1rem; align-items: flex-start; }
.facts caption { border-bottom: 1px solid var(--rule); }
.facts th { white-space: nowrap; min-width: 0; }
.facts td { text-align: left; white-space: normal; }
.note { color: var(--soft); font-size: .88rem; margin: .3rem 0; }
.charts { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fill, minmax(17rem, 1fr)); }
figure { margin: 0; min-width: 0; }
figcaption { font-size: .85rem; }
svg { width: 100%; height: auto; display: block; }
.cases { display: grid; gap: .8rem; grid-template-columns: repeat(auto-fill, minmax(19rem, 1fr)); }
.case { border: 1px solid var(--rule); border-radius: .4rem; padding: .7rem; min-width: 0; }
.case { display: flex; flex-direction: column; gap: .6rem; }
.case dl { margin: 0; display: grid; grid-template-columns: fit-content(6rem) 1fr;
  gap: .2rem .7rem; font-size: .9rem; line-height: 1.4; }
.case dt { color: var(--soft); }
.case dd { margin: 0; }
.case dd span { display: block; }
.case dd span + span { margin-top: .25rem; }
.row { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: .5rem;
  align-items: start; }
.row.words { grid-template-columns: repeat(auto-fill, minmax(5.3rem, 1fr)); }
.row img { width: 100%; height: auto; display: block; border-radius: .2rem; }
.row figcaption { color: var(--soft); font-size: .8rem; line-height: 1.25; margin-top: .15rem; }
details { margin: .6rem 0; }
summary { cursor: pointer; padding: .3rem 0; color: var(--link); }
pre { overflow: auto; max-height: 26rem; background: var(--band); padding: .7rem; font-size: .82rem;
  border-radius: .4rem; }
@media (max-width: 34rem) { .cases { grid-template-columns: 1fr; }
  .row.words { grid-template-columns: repeat(4, minmax(0, 1fr)); }
  th[scope=row] { min-width: 6.5rem; max-width: 8rem; }
  .facts th { white-space: normal; max-width: 7.5rem; } }
@media print { .wide { overflow: visible; } }
"""

PAGE = """\
{% macro figure(shown) -%}
<figure><img src="{{ shown.image | data_uri }}" alt="{{ shown.text }}" loading="lazy"
  width="{{ shown.image.width }}" height="{{ shown.image.height }}">
<figcaption>{{ shown.text }}</figcaption></figure>
{%- endmacro -%}
{% macro table(shown) -%}
<div class="wide" role="region" aria-label="{{ shown.title }}" tabindex="0"><table>
<caption class="unseen">{{ shown.title }}</caption>
<thead><tr>{% for cell in shown.head %}
{%- if loop.first and not cell %}<td></td>{% else %}<th scope="col">{{ cell }}</th>{% endif %}
{%- endfor %}</tr></thead>
<tbody>{% for row in shown.rows %}
<tr{{ row | row_class(loop.previtem | default(None)) }}><th scope="row">{{ row[0] }}</th>
{%- for cell in row[1:] %}<td>{{ cell | stacked }}</td>{% endfor %}</tr>{% endfor %}
</tbody></table></div>
{% for note in shown.notes %}<p class="note">{{ note | code }}</p>
{% endfor %}
{%- endmacro -%}
{% macro facts(title, rows) -%}
<div class="wide" role="region" aria-label="{{ title }}" tabindex="0"><table class="facts">
<caption>{{ title }}</caption><tbody>
{% for label, value in rows %}<tr><th scope="row">{{ label }}</th><td>{{ value }}</td></tr>
{% endfor %}</tbody></table></div>
{%- endmacro -%}
{% macro curves(charts) -%}
<div class="charts">{% for chart in charts %}
<figure><figcaption><strong>{{ chart.title }}</strong>
{%- if chart.unit %}, {{ chart.unit }}{% endif %}</figcaption>
{{ chart | svg }}</figure>{% endfor %}</div>
{%- endmacro -%}
{% macro case(one) -%}
{% set images %}<div class="row">{% for shown in one.images %}{{ figure(shown) }}{% endfor %}
{%- for shown in one.found %}{{ figure(shown) }}{% endfor %}</div>{% endset %}
<div class="case">{% if not one.found %}{{ images }}{% endif %}
<dl>{% for label, text in one.lines %}<dt>{{ label }}</dt>
<dd>{% for line in text.splitlines() or [""] %}<span>{{ line }}</span>{% endfor %}</dd>
{%- endfor %}</dl>{% if one.found %}{{ images }}{% endif %}</div>
{%- endmacro -%}
<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Report: {{ names }}</title><style>{{ stylesheet }}</style></head>
<body><a class="skip" href="#main">To the results</a>
<header><h1>Report: {{ names }}</h1>
<nav aria-label="Contents"><ul><li><a href="#results">Results</a></li>
{% for run in runs %}<li><a href="#run{{ loop.index }}">{{ run.source.name }}</a></li>
{% endfor %}</ul></nav></header>
<main id="main">
<section aria-labelledby="results"><h2 id="results">Results</h2>
{% for shown in tables %}<h3>{{ shown.title }}</h3>
{{ table(shown) }}
{% else %}<p>None of these folders holds results.</p>
{% endfor %}
{% if compared %}<h3>Trainings side by side</h3>{{ curves(compared) }}{% endif %}
</section>
{% for run in runs %}{% set number = loop.index %}
<section aria-labelledby="run{{ number }}"><h2 id="run{{ number }}">{{ run.source.name }}</h2>
<p class="note">{{ run.source.folder }}
{%- if run.source.task %}, fine-tuned for {{ run.source.task }}{% endif %}</p>
{% for word in run.source.missing %}<p class="note">Left out: {{ word | code }}.</p>
{% endfor %}
{% set parts = run | parts %}
{% if parts | length > 1 %}<nav class="parts" aria-label="Parts of {{ run.source.name }}"><ul>
{%- for part, title in parts %}<li><a href="#run{{ number }}-{{ part }}">{{ title }}</a></li>
{%- endfor %}</ul></nav>{% endif %}
{% if run.settings or run.course %}<h3 id="run{{ number }}-training">Training</h3>
<div class="tables">
{% if run.settings %}{{ facts("What was trained, and on what", run.settings) }}{% endif %}
{% if run.course %}{{ facts("How it went", run.course) }}{% endif %}</div>
{% if run.source.training %}<h4>Skipped samples</h4>
{% if run.source.skipped %}{{ facts("Skipped while training, by kind", run.skipped) }}
{% else %}<p>None.</p>{% endif %}{% endif %}
{% if run.config %}<details><summary>Whole configuration</summary>
<pre tabindex="0">{{ run.config }}</pre></details>{% endif %}{% endif %}
{% if run.charts %}<h3 id="run{{ number }}-curves">Curves</h3>{{ curves(run.charts) }}{% endif %}
{% for title, groups in run.cases %}<h3 id="run{{ number }}-cases{{ loop.index }}">{{ title }}</h3>
{% for group in groups %}<h4>{{ group.title }}</h4>
{% if group.note %}<p class="note">{{ group.note }}</p>{% endif %}
<div class="cases">{% for one in group.cases %}{{ case(one) }}{% endfor %}</div>
{% endfor %}{% endfor %}
{% if run.anchors %}<h3 id="run{{ number }}-anchors">Anchors</h3>
<p class="note">Over each patch the share of channel groups in which the word anchors it: none is
clear, from dark for few to yellow for all. A green frame is the box of what the word names, where
that is known.</p>
{% for row in run.anchors %}<h4>{{ row.caption }}</h4>
<p class="note">Anchors: S ≥ {{ "%.2f" | format(row.threshold) }}</p>
<div class="row words">{{ figure(row.image) }}
{%- for word in row.words %}{{ figure(word) }}{% endfor %}</div>
{% endfor %}{% endif %}
{% if run.maps %}<h3 id="run{{ number }}-maps">Where expressions point</h3>
<p class="note">Grad-CAM of a cross-attention layer, from blue for weak to red for strong.</p>
<div class="cases">{% for one in run.maps %}{{ case(one) }}{% endfor %}</div>{% endif %}
</section>{% endfor %}
</main></body></html>
"""


def page(runs: Sequence[RunPart], tables: Sequence[Table], compared: Sequence[Chart]) -> str:
    """Return the whole page; what comes from files is escaped."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters |= {
        "data_uri": data_uri,
        "svg": svg,
        "row_class": _row_class,
        "stacked": _stacked,
        "code": _code,
        "parts": _parts,
    }
    names = ", ".join(run.source.name for run in runs)
    return environment.from_string(PAGE).render(
        runs=runs, tables=tables, compared=compared, names=names, stylesheet=Markup(STYLE)
    )


def _stacked(cell: str) -> Markup:
    """Set a figure with its interval under it, which keeps wide tables on the screen."""
    value, bracket, rest = cell.partition(" [")
    if not bracket:
        return escape(cell)
    return Markup('{} <span class="interval">[{}</span>').format(value, rest)


def _code(text: str) -> Markup:
    """Text in which `what is between backticks` is code."""
    # Plain text again: what re.sub puts into Markup would be escaped.
    said = str(escape(text))
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", said))


def _parts(run: RunPart) -> list[tuple[str, str]]:
    """Anchors and titles of what the page holds of a run, in its order."""
    found = [
        ("training", "Training", run.settings or run.course),
        ("curves", "Curves", run.charts),
        *((f"cases{n}", title, groups) for n, (title, groups) in enumerate(run.cases, 1)),
        ("anchors", "Anchors", run.anchors),
        ("maps", "Where expressions point", run.maps),
    ]
    return [(name, title) for name, title, content in found if content]


def _row_class(row: Sequence[str], before: Sequence[str] | None) -> Markup:
    """Rows that are not of our runs stand back, and the first of them is set off."""
    kind = next((word for word in ("paper", "chance") if row[0].startswith(word)), "")
    if not kind:
        return Markup("")
    first = " first" if before is None or not before[0].startswith(kind) else ""
    return Markup(f' class="{kind}{first}"')
