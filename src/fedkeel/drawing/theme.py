"""How figures look, in light and in dark: one palette for all of them, and what Vega-Lite calls a config."""

from typing import Any

# Ten colours that can be told apart also by those who see no red, no green or no blue (at least 0.09 from each other in
# Oklab, also as they see them), each 3 : 1 against its paper. What is beyond ten gets dashes.
TEN = {
    "light": "#1871fa #6a1008 #207301 #dd6ba6 #a08f22 #6407b0 #7c5c79 #053965 #be37b7 #000000",
    "dark": "#4d69fc #ee8d2c #10b5a0 #eb9cfd #e5e626 #b229ad #baf4fe #d41101 #85da98 #437566",
}
COLOURS = {theme: colours.split() for theme, colours in TEN.items()}
DASHES = [[1, 0], [7, 4], [2, 3], [9, 3, 2, 3], [14, 5]]
SHAPES = ["circle", "square", "triangle-up", "diamond", "triangle-down", "cross"]
NARROW = {"expr": "(containerSize()[0] || 640) < 500 ? 90 : 170"}  # of the names beside an axis, in pixels
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', Arial, sans-serif"

# Paper, ink, softer ink, grid, and the shades of matrices from nothing to much and from minus to plus.
PAPERS = {
    "light": ("#ffffff", "#1a2230", "#55606f", "#e2e6ec", ["#f2f6fc", "#0d4a9c"], ["#8f3903", "#f6f3ee", "#0d4a9c"]),
    "dark": ("#171b21", "#e6eaf0", "#a2adbb", "#2c333d", ["#1d2a3b", "#9cc7ff"], ["#ffb27f", "#2a2a2c", "#9cc7ff"]),
}
# The text on a matrix's shades: on weak ones, on strong ones, and from which share on they are strong.
ON_SHADES = {"light": ("#1a2230", "#ffffff", 0.68), "dark": ("#ffffff", "#000000", 0.41)}


def config(theme: str = "light") -> dict[str, Any]:
    paper, ink, soft, grid, shades, signs = PAPERS[theme]
    named = dict(zip(("paper", "ink", "weak", "strong", "darkens"), (paper, ink, *ON_SHADES[theme]), strict=True))
    line = {"domainColor": grid, "tickColor": grid, "gridColor": grid, "labelColor": soft, "titleColor": soft}
    return {
        "background": paper,
        "font": FONT,
        "view": {"stroke": None},
        "axis": {**line, "labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": "normal", "labelLimit": NARROW},
        "axisQuantitative": {"tickCount": 5},
        "legend": {"labelColor": ink, "titleColor": soft, "labelFontSize": 11, "labelLimit": 260, "orient": "bottom"},
        "title": {"color": ink, "subtitleColor": soft, "anchor": "start", "frame": "bounds", "fontSize": 13},
        "range": {"category": COLOURS[theme], "heatmap": shades, "diverging": signs},
        "mark": {"color": COLOURS[theme][0], "aria": False},
        "text": {"color": ink, "font": FONT, "fontSize": 12},
        "rule": {"color": soft},
        "tick": {"color": ink},
        "params": [{"name": name, "value": value} for name, value in named.items()],
    }
