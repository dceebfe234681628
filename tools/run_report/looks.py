"""Style and behaviour of a report's page: CSS that fits a phone, paper and both themes, and the script that draws.

The page around them is `page.py`'s; colours are the variables that it sets.
"""

STYLE = """
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--paper);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans",sans-serif}
header,main{max-width:1180px;margin:0 auto;padding:0 20px}
header{padding-top:22px}
.top{display:flex;align-items:flex-start;justify-content:space-between;gap:12px}
h1{font-size:26px;line-height:1.2;margin:0;overflow-wrap:anywhere}
h2{font-size:19px;margin:38px 0 10px;padding-top:14px;border-top:1px solid var(--line)}
h3{font-size:15px;line-height:1.35;margin:0 0 6px;font-weight:600;overflow-wrap:anywhere}
.sub{margin:4px 0 14px;color:var(--muted);overflow-wrap:anywhere}
button{flex:none;font:inherit;font-size:13px;color:var(--ink);background:var(--panel);border:1px solid var(--line);
border-radius:6px;padding:5px 10px;cursor:pointer}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(140px,1fr));gap:10px;margin:0 0 12px}
.cards div{background:var(--panel);border:1px solid var(--line);border-radius:8px;padding:9px 12px;min-width:0}
.cards dt{font-size:12px;color:var(--muted)}
.cards dd{margin:0;font-size:17px;font-weight:600;overflow-wrap:anywhere;font-variant-numeric:tabular-nums}
.about dl{display:grid;grid-template-columns:minmax(90px,max-content) minmax(0,1fr);gap:3px 16px;margin:10px 0;
font-size:14px}
.about dt{color:var(--muted)}
.about dd{margin:0;overflow-wrap:anywhere}
nav{display:flex;flex-wrap:wrap;gap:4px 16px;margin:14px 0 0;font-size:14px}
a{color:var(--blue)}
.figures{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:16px}
figure{margin:0;padding:14px 16px 10px;border:1px solid var(--line);border-radius:10px;min-width:0;
break-inside:avoid}
figure.big{grid-column:1/-1}
.chart{width:100%;overflow:hidden}
.chart svg{display:block;max-width:100%}
.chart .vega-embed,.chart.vega-embed{width:100%;display:block}
.notes{margin:4px 0 6px;padding-left:18px;font-size:12.5px;color:var(--muted)}
.words{color:var(--muted);margin:4px 0 10px;font-size:14px;overflow-wrap:anywhere}
.failed{color:var(--vermilion)}
details{margin:6px 0}
summary{cursor:pointer;font-size:13px;color:var(--muted)}
summary:hover,summary:focus-visible{color:var(--ink)}
.scroll{overflow:auto;max-height:420px;border:1px solid var(--line);border-radius:6px;margin-top:6px}
table{border-collapse:collapse;width:100%;font-size:12.5px;font-variant-numeric:tabular-nums}
caption{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%);white-space:nowrap}
th,td{padding:3px 10px;text-align:right;white-space:nowrap;border-bottom:1px solid var(--grid)}
th{position:sticky;top:0;background:var(--panel);font-weight:600}
.t{text-align:left}
#vg-tooltip-element{position:fixed;z-index:1000;visibility:hidden;max-width:320px;padding:7px 10px;font-size:12px;
background:var(--panel);color:var(--ink);border:1px solid var(--line);border-radius:6px;pointer-events:none;
box-shadow:0 2px 8px rgb(0 0 0/.25)}
#vg-tooltip-element.visible{visibility:visible}
#vg-tooltip-element table{width:auto}
#vg-tooltip-element td{border:0;padding:1px 4px;white-space:normal;text-align:left;overflow-wrap:anywhere}
#vg-tooltip-element td.key{color:var(--muted);white-space:nowrap}
main{padding-bottom:48px}
@media (max-width:760px){
header,main{padding-left:12px;padding-right:12px}
.figures{grid-template-columns:minmax(0,1fr)}
figure{padding:12px 10px 8px}
h1{font-size:21px}
.cards{grid-template-columns:repeat(2,minmax(0,1fr))}
}
@media print{
button,nav,summary{display:none}
body{font-size:12px}
figure{border-color:#ccc}
.figures{gap:10px}
}
"""

SCRIPT = """"use strict";
(() => {
  const report = JSON.parse(document.getElementById("report").textContent);
  const root = document.documentElement;
  const narrow = () => window.innerWidth < 560;
  let wasNarrow = narrow();
  const draw = async () => {
    const small = narrow();
    for (const [key, spec] of Object.entries(report.figures)) {
      const place = document.getElementById("chart-" + key);
      const config = structuredClone(report.config);
      config.axis.labelLimit = small ? 120 : 190;
      // As many columns of a legend as its longest label leaves room for.
      const labels = (spec.layer?.[0] ?? spec).encoding.color?.scale?.domain ?? [];
      const room = (place.clientWidth - 80) / (5.6 * Math.max(8, ...labels.map(label => label.length)) + 30);
      config.legend.columns = Math.max(1, Math.min(8, Math.floor(room)));
      try {
        await window.vegaEmbed(place, structuredClone(spec), {
          mode: "vega-lite", renderer: "svg", actions: false, ast: true, defaultStyle: false, config,
          tooltip: {theme: "custom", disableDefaultStyle: true},
        });
        place.style.minHeight = "";
      } catch (error) {
        place.textContent = "This chart could not be drawn: " + error.message;
        place.classList.add("failed");
        console.error(key, error);
      }
    }
    root.dataset.drawn = String(Number(root.dataset.drawn || 0) + 1);
  };
  let waiting = Promise.resolve();
  const redraw = () => { waiting = waiting.then(draw); };
  window.addEventListener("resize", () => {
    if (narrow() !== wasNarrow) { wasNarrow = narrow(); redraw(); }
  });
  document.getElementById("theme").addEventListener("click", () => {
    const dark = root.dataset.theme
      ? root.dataset.theme === "dark" : window.matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  });
  redraw();
})();
"""
