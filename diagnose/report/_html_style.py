"""The look of the HTML report: dark and light as the reader's system has it, no script, nothing to load."""

from __future__ import annotations

from diagnose.report._colors import DARK_PAGE, LIGHT_PAGE

STYLE = f"""
:root {{
  color-scheme: light dark;
  --page: {LIGHT_PAGE}; --raised: #f5f6f8; --line: #dfe2e7; --text: #1b1f25; --quiet: #5b6470;
  --alarm: #a8201a; --alarm-page: #fdeceb; --good: #1b6b41; --good-page: #e5f5ec;
  --mark: #c2571c;
}}
@media (prefers-color-scheme: dark) {{
  :root {{
    --page: {DARK_PAGE}; --raised: #1d2128; --line: #323842; --text: #e6e9ee; --quiet: #9aa4b1;
    --alarm: #ff9d96; --alarm-page: #3a1d1d; --good: #86d8aa; --good-page: #173325;
    --mark: #e58a56;
  }}
}}
* {{ box-sizing: border-box; }}
body {{
  margin: 0 auto; padding: 2rem clamp(1rem, 4vw, 2.5rem) 3rem; max-width: 62rem;
  background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
}}
code {{
  font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: .87em;
}}
h1 {{ margin: 0; font-size: 1.55rem; line-height: 1.25; overflow-wrap: anywhere; }}
main {{ margin-top: 1.4rem; }}
h2 {{ margin: 2.4rem 0 .6rem; font-size: 1.1rem; }}
p {{ margin: .5rem 0; max-width: 46rem; overflow-wrap: anywhere; }}
.eyebrow, .under, figcaption, th, dt, .detail, footer {{ color: var(--quiet); }}
.eyebrow {{ margin: 0; font-size: .8rem; letter-spacing: .04em; }}
.under {{ margin: .35rem 0 0; font-size: .87rem; overflow-wrap: anywhere; }}
.badge {{
  padding: .1rem .55rem; border-radius: 1rem; font-weight: 600; color: var(--good);
  background: var(--good-page);
}}
.badge.alarm {{ color: var(--alarm); background: var(--alarm-page); }}
p.alarm {{
  padding: .6rem .8rem; border-radius: .4rem; color: var(--alarm); background: var(--alarm-page);
  font-weight: 600;
}}
pre {{
  margin: .6rem 0; padding: .6rem .8rem; overflow-x: auto; border-radius: .4rem;
  background: var(--raised);
}}
dl {{ margin: .8rem 0; display: grid; grid-template-columns: max-content 1fr; gap: .3rem 1.4rem; }}
dl > div {{ display: contents; }}
dd {{ margin: 0; overflow-wrap: anywhere; }}
dd .detail {{ margin-left: .5rem; font-size: .87rem; }}
dl.headline {{
  margin: 1.2rem 0; grid-template-columns: repeat(auto-fit, minmax(10.5rem, 1fr)); gap: .75rem;
}}
dl.headline > div {{
  display: block; padding: .75rem .9rem; border-radius: .5rem; background: var(--raised);
}}
dl.headline dt {{ font-size: .8rem; }}
dl.headline dd {{
  font-size: 1.45rem; font-weight: 650; line-height: 1.3; font-variant-numeric: tabular-nums;
}}
dl.headline .detail {{ display: block; margin: 0; font-size: .8rem; font-weight: 400; line-height: 1.4; }}
article {{
  margin: 1rem 0; padding: 1rem 1.2rem; border: 1px solid var(--line); border-left: .3rem solid var(--mark);
  border-radius: .5rem;
}}
h3 {{ margin: 0; font-size: 1.05rem; line-height: 1.35; overflow-wrap: anywhere; }}
.tags {{ margin: .35rem 0 .8rem; }}
.tags code {{
  display: inline-block; margin: 0 .35rem .25rem 0; padding: .05rem .45rem; border-radius: .3rem;
  background: var(--raised); color: var(--quiet); overflow-wrap: anywhere;
}}
article dl {{ grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .6rem 1.2rem; }}
article dl > div {{ display: block; }}
article dt {{ font-size: .8rem; }}
article dd {{ font-size: 1.2rem; font-weight: 650; line-height: 1.3; font-variant-numeric: tabular-nums; }}
article dd .detail {{ display: block; margin: 0; font-size: .8rem; font-weight: 400; }}
article ul {{ margin: .8rem 0; padding-left: 1.1rem; max-width: 46rem; }}
article li {{ margin: .15rem 0; overflow-wrap: anywhere; }}
.advice {{ padding: .6rem .8rem; border-radius: .4rem; background: var(--good-page); }}
.advice p {{ margin: 0; }}
.advice b {{ color: var(--good); margin-right: .35rem; }}
.advice pre {{ margin: .5rem 0 0; background: var(--page); }}
article > .detail {{ margin: .6rem 0 0; font-size: .8rem; }}
svg.step {{ display: block; width: 100%; height: 2.75rem; margin: .8rem 0 1.1rem; border-radius: .4rem; }}
svg.step text {{ font-size: 12.5px; font-weight: 600; text-anchor: middle; dominant-baseline: central; }}
.scroll {{ overflow-x: auto; }}
.scroll:focus-visible {{ outline: 2px solid var(--quiet); }}
table {{ width: 100%; border-collapse: collapse; font-variant-numeric: tabular-nums; }}
figcaption {{ padding-bottom: .4rem; font-size: .87rem; }}
th, td {{
  padding: .32rem .7rem .32rem 0; text-align: left; vertical-align: baseline;
  border-top: 1px solid var(--line);
}}
thead th {{ border-top: 0; font-size: .8rem; font-weight: 600; white-space: nowrap; }}
tbody th {{ font-weight: 400; color: inherit; white-space: nowrap; }}
.number {{ text-align: right; white-space: nowrap; }}
td {{ white-space: nowrap; }}
td.code, tr.source td {{ white-space: normal; overflow-wrap: anywhere; min-width: 6rem; }}
tr.source td {{ padding-top: 0; border-top: 0; }}
figure {{ margin: 0; }}
figure + figure {{ margin-top: 1.6rem; }}
tr.source code {{ color: var(--quiet); white-space: pre-wrap; overflow-wrap: anywhere; }}
tr.total > * {{ border-top: 2px solid var(--line); font-weight: 600; }}
td.bar {{ width: 45%; padding-right: 0; }}
td.bar span {{ display: block; height: .7rem; min-width: 1px; border-radius: .15rem; }}
.swatch {{
  display: inline-block; width: .7rem; height: .7rem; margin-right: .5rem; border-radius: .15rem;
}}
footer {{ margin-top: 3rem; font-size: .8rem; }}
.chart {{ margin-bottom: 1rem; }}
.plot {{ position: relative; height: 13rem; margin: .6rem 0 1.8rem 3.4rem; }}
.plot svg {{ display: block; width: 100%; height: 100%; overflow: visible; }}
.plot path {{ vector-effect: non-scaling-stroke; }}
.plot .grid {{ stroke: var(--line); fill: none; }}
.line {{ stroke: #3975c9; stroke-width: 1.75; fill: none; }}
.line.s1 {{ stroke: #e06a2f; stroke-dasharray: 8 4; }}
.line.s2 {{ stroke: var(--quiet); stroke-dasharray: 2 3; }}
.line.s3 {{ stroke: #35a06f; stroke-dasharray: 8 3 2 3; }}
.line.roof {{ stroke: var(--quiet); }}
.plot .mark {{ stroke: var(--quiet); stroke-dasharray: 2 3; fill: none; }}
.plot .mark.strong {{ stroke: var(--text); stroke-width: 1.5; stroke-dasharray: none; }}
.plot span {{ position: absolute; font-size: .75rem; color: var(--quiet); white-space: nowrap; }}
.plot .y {{
  right: 100%; margin-right: .5rem; transform: translateY(50%); font-variant-numeric: tabular-nums;
}}
.plot .x {{ top: 100%; margin-top: .25rem; }}
.plot .told {{
  top: 0; padding: 0 .4rem; overflow: hidden; text-overflow: ellipsis;
  color: var(--text); background: var(--page); opacity: .9;
}}
.plot .told.low {{ top: 1.25rem; }}
.plot .dot {{
  width: .7rem; height: .7rem; margin: 0 0 -.35rem -.35rem; border-radius: 50%; background: #e06a2f;
}}
.plot .dot b {{
  position: absolute; left: 50%; top: 100%; transform: translateX(-50%); font-weight: 400;
  color: var(--text);
}}
.plot .dot.above b {{ top: auto; bottom: 100%; }}
.map .plot, .map .legend {{ margin-left: 4.8rem; }}
.map .plot svg {{ shape-rendering: crispEdges; outline: 1px solid var(--line); }}
.stroke {{ width: 28px; height: 12px; margin-right: .45rem; vertical-align: middle; }}
.shades .swatch {{ margin: 0; border-radius: 0; vertical-align: -1px; }}
.legend {{
  display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; margin: -.4rem 0 1.4rem 3.4rem; padding: 0;
  list-style: none; font-size: .84rem; color: var(--quiet);
}}
dl.bars, dl.bars > div {{ display: block; }}
dl.bars > div {{
  display: grid; grid-template-columns: minmax(7rem, 13rem) 1fr; gap: 1rem; align-items: center;
  padding: .18rem 0;
}}
dl.bars dd {{
  display: grid; grid-template-columns: 1fr minmax(6rem, max-content); gap: .8rem; align-items: center;
}}
dl.bars.gains dd {{ grid-template-columns: 1fr 15rem; }}
dl.bars dd span {{ font-size: .84rem; font-variant-numeric: tabular-nums; }}
dl.bars svg {{ width: 100%; height: 1.1rem; overflow: visible; }}
dl.bars .whole {{ fill: var(--quiet); }}
dl.bars .better {{ fill: #35a06f; stroke: #35a06f; }} dl.bars .worse {{ fill: #e06a2f; }}
dl.bars .rest {{ fill: var(--page); stroke: var(--quiet); }}
dl.bars line {{ stroke-width: 2; }}
dl.bars line.none {{ stroke: var(--line); }}
dl.bars .predicted {{ fill: none; stroke: var(--quiet); stroke-width: 1.5; }}
@media (max-width: 34rem) {{
  dl.bars > div, dl.bars.gains dd {{ grid-template-columns: 1fr; gap: .1rem; }}
  td.bar, th.bar {{ display: none; }}
  th, td {{ padding-right: .5rem; }}
  table.lines thead, table.lines tr.source td:first-child {{ display: none; }}
  table.lines tbody tr {{
    display: flex; flex-wrap: wrap; border-top: 1px solid var(--line); padding-top: .3rem;
  }}
  table.lines tbody tr.source {{ border: 0; padding: 0 0 .3rem; }}
  table.lines td {{ border: 0; padding-block: .05rem; min-width: 0; }}
  dl {{ gap: .3rem .8rem; }}
  dl.headline {{ grid-template-columns: repeat(auto-fit, minmax(8.5rem, 1fr)); }}
  dd .detail {{ display: block; margin-left: 0; }}
  svg.step text {{ display: none; }}
}}
@media print {{ body {{ padding: 0; }} article {{ break-inside: avoid; }} }}
"""
