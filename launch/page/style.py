"""The look of a page: colours of both schemes, small screens and paper. Nothing in it is loaded from anywhere."""

from __future__ import annotations

from .html import escape

COLOURS = (  # colours of stacked bars, lines and groups; middle tones, which both schemes can show
    "#3f72b8",
    "#df8a1f",
    "#4f9e63",
    "#c9473f",
    "#8a66bb",
    "#d26fa4",
    "#98a2ae",
    "#8d6e4a",
    "#27a3a3",
    "#b5a02c",
    "#7f9a2f",
    "#5a4fcf",
)
STYLE = """
:root { color-scheme: light dark; --paper: #fff; --panel: #f4f6f8; --ink: #1f2933; --pale: #5d6b78; --line: #cdd4db;
  --mark: #b3261e; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #14181d; --panel: #1e242b; --ink: #e6eaee; --pale: #9fabb7; --line: #3b4650; --mark: #ff8a80; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 76rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", Helvetica, Arial, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: .5rem 0; }
h2 { font-size: 1.15rem; margin: 0 0 .5rem; }
h3 { font-size: 1rem; margin: 0 0 .25rem; }
p { margin: .4rem 0; max-width: 60rem; }
section { margin: 2rem 0; }
.pale, figcaption { color: var(--pale); font-size: .87rem; }
pre { background: var(--panel); padding: .6rem .8rem; border-radius: 6px; white-space: pre-wrap; margin: .5rem 0; }
figure { margin: .5rem 0; max-width: 100%; }
.maps { display: flex; flex-wrap: wrap; gap: .5rem 1.5rem; }
.wide { overflow-x: auto; max-width: 100%; }
table { border-collapse: collapse; font-size: .87rem; font-variant-numeric: tabular-nums; margin: .5rem 0; }
th, td { padding: .25rem .6rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--pale); font-weight: 600; }
.text { text-align: left; white-space: normal; overflow-wrap: normal; }
td.text { min-width: 8.5rem; }
.columns { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 1.5rem; }
.columns > div { min-width: 0; }
.legend span { display: inline-block; margin-right: 1rem; font-size: .87rem; }
.swatch { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .45em; }
.bar { margin: .6rem 0; }
.bar p { display: flex; flex-wrap: wrap; justify-content: space-between; column-gap: 1rem; margin: 0; max-width: none; }
.bar svg { width: 100%; height: 1.5rem; display: block; background: var(--panel); }
.chart { display: block; width: 100%; height: auto; max-width: 36rem; }
.chart text { fill: var(--ink); font-size: 15px; }
.chart .small { fill: var(--pale); font-size: 12px; }
.lane { fill: var(--panel); }
.facts { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; margin: .5rem 0; }
.facts dt { color: var(--pale); }
.facts dd { margin: 0; min-width: 0; }
.state { display: inline-block; padding: .1rem .6rem; border-radius: 6px; color: #fff; font-weight: 600; }
.good { background: #2f7d43; } .wait { background: #7a6200; } .bad { background: #b3261e; }
.grid { stroke: var(--line); stroke-width: 1; }
.outline { fill: var(--paper); stroke: var(--line); }
.node { fill: var(--panel); stroke: var(--line); }
.ideal { stroke: var(--pale); stroke-dasharray: 5 4; }
.curve { fill: none; stroke-width: 2.2; }
.across { stroke-dasharray: 5 4; }
.whisker { fill: var(--ink); }
.limit { fill: var(--mark); background: var(--mark); }
.timeline { background: #fff; border: 1px solid var(--line); border-radius: 6px; }
.timeline svg { display: block; }
footer { margin-top: 2rem; }
@media (max-width: 40rem) {
  .attempts, .attempts thead, .attempts tbody { display: block; }
  .attempts tr { display: grid; grid-template-columns: 4fr 5fr 4fr 3fr 3.5fr 3.5fr; padding: .3rem 0;
    border-bottom: 1px solid var(--line); }
  .attempts th, .attempts td { border: 0; padding: 0 .2rem; min-width: 0; white-space: normal; font-size: .75rem; }
  .attempts td { overflow-wrap: anywhere; }
  .attempts :is(th, td):last-child { grid-column: 1 / -1; }
}
@media print {
  :root { --paper: #fff; --panel: #f4f6f8; --ink: #000; --pale: #444; --line: #bbb; --mark: #b3261e; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  body { max-width: none; padding: 0; font-size: 11px; }
  .bar, figure, tr { break-inside: avoid; }
  h2, h3 { break-after: avoid; }
  .wide { overflow: visible; }
  .timeline svg { max-width: 100%; height: auto; }
  table { font-size: 9px; }
  th, td { padding: .15rem .3rem; white-space: normal; overflow-wrap: normal; }
  td.text { min-width: 0; overflow-wrap: anywhere; }
}
"""


def document(title: str, body: str) -> str:
    """A whole page. body: HTML."""
    colours = "\n".join(
        f".c{at} {{ fill: {colour}; background: {colour}; }} .s{at} {{ stroke: {colour}; }}"
        for at, colour in enumerate(COLOURS)
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{escape(title)}</title>
<style>{STYLE}{colours}
</style>
</head>
<body>
{body}
</body>
</html>
"""
