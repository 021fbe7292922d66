"""The charts of the HTML report as plotly draws them, with plotly.js in the file: 5 MB, and offline."""

from __future__ import annotations

import base64
import hashlib
import json

from diagnose.report._charts import Chart
from diagnose.report._html_axes import escape
from diagnose.report._plotly import CONFIG, figure

DRAW = """
for (const holder of document.querySelectorAll(".interactive")) {
  const drawn = JSON.parse(holder.querySelector("script").textContent);
  const place = holder.appendChild(document.createElement("div"));
  place.style.height = (drawn.layout.height || 300) + "px";
  Plotly.newPlot(place, drawn.data, drawn.layout, drawn.config);
}
"""
STYLE = """
.interactive { margin: 1rem -.4rem; }
.main-svg text, .main-svg tspan { fill: var(--quiet) !important; }
.main-svg .annotation-text, .main-svg .bartext { fill: var(--text) !important; }
.gridlayer path { stroke: var(--line) !important; }
.hoverlayer .hovertext path, .hoverlayer .legend .bg {
  fill: var(--raised) !important; stroke: var(--line) !important; fill-opacity: 1 !important;
}
.hoverlayer .hovertext text, .hoverlayer .legendtext { fill: var(--text) !important; }
"""
"""plotly writes its colours into each element; these outrank them, dark and light."""


def chart_interactive(chart: Chart) -> str:
    """Returns a chart as data in the page, which the script at its end draws."""
    data = json.dumps({**figure(chart), "config": CONFIG}, separators=(",", ":")).replace("<", "\\u003c")
    return (
        f"<figure><figcaption>{escape(chart.title)}</figcaption>"
        f'<div class="interactive"><script type="application/json">{data}</script></div></figure>\n'
    )


def scripts() -> tuple[str, ...]:
    """Returns the scripts of the page: plotly.js as it was installed, and what draws the charts."""
    from plotly.offline import get_plotlyjs

    return (get_plotlyjs(), DRAW)


def policy(scripts: tuple[str, ...]) -> str:
    """Returns the page's policy: these scripts and no other, and nothing from anywhere."""
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode('ascii')}'"
        for script in scripts
    )
    return f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:"
