/* Draws the figures of a Fedkeel report from the numbers in the page, and makes its tables sortable.
   Text goes in by textContent only, so that a name is never read as markup. */
(() => {
  "use strict";
  const numbers = JSON.parse(document.getElementById("numbers").textContent);
  const COLOURS = 10;

  // -- small things -----------------------------------------------------------------------------------------------
  function make(space, tag, attributes, children) {
    const node = space ? document.createElementNS(space, tag) : document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (typeof value === "function") node.addEventListener(name, value);
      else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
    }
    node.append(...children.filter((child) => child !== null && child !== undefined));
    return node;
  }
  const html = (tag, attributes, ...children) => make(null, tag, attributes, children);
  const svg = (tag, attributes, ...children) => make("http://www.w3.org/2000/svg", tag, attributes, children);
  const colour = (index) => `c${index % COLOURS}`;
  const dash = (index) => `d${Math.floor(index / COLOURS) % 4}`;
  const known = (values) => values.filter((value) => value !== null && value !== undefined);

  const ruler = document.createElement("canvas").getContext("2d");
  function textWidth(text) {
    ruler.font = "12px system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif";
    return ruler.measureText(text).width;
  }
  /* Shortened in the middle: methods with long options differ at their ends. */
  function fitted(text, width) {
    if (textWidth(text) <= width) return text;
    const letters = [...text];
    const cut = (kept) => letters.slice(0, Math.ceil(kept / 2)).join("") + "…" + (kept > 1 ? letters.slice(-Math.floor(kept / 2)).join("") : "");
    let low = 0;
    let high = letters.length;
    while (low < high) {
      const middle = Math.ceil((low + high) / 2);
      if (textWidth(cut(middle)) <= width) low = middle;
      else high = middle - 1;
    }
    return cut(low);
  }

  function format(value, percent) {
    if (value === null || value === undefined) return "–";
    if (percent) return value.toFixed(1);
    if (Number.isInteger(value) && Math.abs(value) < 1e6) return String(value);
    const size = Math.abs(value);
    return size >= 1e5 || (size < 1e-3 && size > 0) ? Number(value.toPrecision(3)).toExponential() : String(Number(value.toPrecision(4)));
  }

  /* Values that stand below each other have the same number of decimals. */
  function aligned(values, percent) {
    const size = Math.max(...values.map(Math.abs));
    if (percent || size >= 1e5 || size < 1e-3) return (value) => format(value, percent);
    const decimals = values.every(Number.isInteger) ? 0 : Math.max(0, 3 - Math.floor(Math.log10(size)));
    return (value) => value.toFixed(decimals);
  }

  /* Round numbers that cover [low, high]. */
  function ticks(low, high, about) {
    const raw = (high - low || Math.abs(high) || 1) / Math.max(1, about);
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].find((multiple) => multiple * power >= raw * 0.75) * power;
    const found = [];
    for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) found.push(Number((k * step).toPrecision(12)));
    return found;
  }

  /* Ticks are told apart, however close they are. */
  function tickText(value, all) {
    const gap = all.length > 1 ? Math.abs(all[1] - all[0]) : 0;
    const size = Math.max(...all.map(Math.abs));
    if (!gap || size >= 1e5 || size < 1e-3) return format(value);
    return value.toFixed(Math.min(8, Math.max(0, Math.ceil(-Math.log10(gap) - 1e-9))));
  }

  /* From values to pixels. A logarithm is only taken where all values are positive. */
  function scale(low, high, from, to, log) {
    if (log) {
      const a = Math.log10(low);
      const b = Math.log10(high);
      return (value) => from + ((Math.log10(value) - a) / (b - a || 1)) * (to - from);
    }
    return (value) => from + ((value - low) / (high - low || 1)) * (to - from);
  }
  function logTicks(low, high) {
    const all = [];
    for (let k = Math.floor(Math.log10(low)); k <= Math.ceil(Math.log10(high)); k++) all.push(10 ** k);
    const inside = all.filter((value) => value >= low * 0.999 && value <= high * 1.001);
    if (inside.length < 2) return [low, Math.sqrt(low * high), high].map((value) => Number(value.toPrecision(2)));
    return inside.filter((_, i) => i % Math.ceil(inside.length / 7) === 0);
  }
  function extent(values) {
    let low = Infinity;
    let high = -Infinity;
    for (const value of values) {
      if (value < low) low = value;
      if (value > high) high = value;
    }
    return low > high ? [0, 1] : [low, high];
  }
  function spanOf(values, log, percent) {
    const [low, high] = extent(values);
    if (!values.length) return [low, high];
    if (log) return low === high ? [low / 2, high * 2] : [low, high];
    const margin = (high - low) * 0.05 || Math.abs(high) * 0.05 || 0.5;
    const bounds = [low - margin, high + margin];
    if (low >= 0 && bounds[0] < 0) bounds[0] = 0;
    if (percent && high <= 100 && bounds[1] > 100) bounds[1] = 100;
    return bounds;
  }

  // -- tables -----------------------------------------------------------------------------------------------------
  function sortable(table) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      if (!head.textContent.trim()) return;
      const button = html("button", { type: "button", title: "Sort by this column" }, ...head.childNodes);
      head.append(button);
      if (table.tBodies[0].rows[0]?.cells[column]?.classList.contains("n")) head.classList.add("n");
      button.addEventListener("click", () => {
        const value = (row) => row.cells[column].dataset.v ?? row.cells[column].textContent;
        const rows = [...table.tBodies[0].rows];
        const filled = rows.filter((row) => value(row) !== "");
        const numeric = filled.length > 0 && filled.every((row) => !Number.isNaN(Number(value(row))));
        // Numbers from the largest: what one looks for in a table of accuracies.
        const first = numeric ? "descending" : "ascending";
        const other = numeric ? "ascending" : "descending";
        const order = head.getAttribute("aria-sort") === first ? other : first;
        for (const each of heads) each.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", order);
        const sign = order === "ascending" ? 1 : -1;
        rows.sort((a, b) => {
          const [x, y] = [value(a), value(b)];
          if (x === "" || y === "") return (x === "") - (y === "");
          return sign * (numeric ? x - y : x.localeCompare(y, "en", { numeric: true }));
        });
        table.tBodies[0].append(...rows);
      });
    });
  }

  function tableOf(columns, rows, caption, percent, note) {
    const cell = (value, first) => {
      const number = typeof value === "number";
      const text = number ? format(value, percent && !first) : value === null || value === undefined ? "–" : String(value);
      const attributes = { class: number && !first ? "n" : null, "data-v": number ? value : value === null ? "" : null };
      if (first) return html("th", { ...attributes, scope: "row" }, html("span", { class: "name" }, text));
      return html("td", attributes, text);
    };
    const table = html(
      "table",
      { class: "sortable" },
      html("caption", {}, caption),
      html("thead", {}, html("tr", {}, ...columns.map((name) => html("th", { scope: "col" }, name)))),
      html("tbody", {}, ...rows.map((row) => html("tr", {}, ...row.map((value, i) => cell(value, i === 0))))),
    );
    sortable(table);
    const scroll = html("div", { class: "scroll", role: "region", tabindex: 0, "aria-label": caption }, table);
    return note ? html("div", {}, scroll, html("p", { class: "note" }, note)) : scroll;
  }

  /* The numbers of a figure, made when somebody asks for them. */
  function behind(title, build) {
    const details = html("details", { class: "behind" }, html("summary", {}, "The numbers"));
    details.addEventListener("toggle", () => {
      if (details.open && details.children.length === 1) details.append(build());
    });
    details.setAttribute("aria-label", `The numbers of ${title}`);
    return details;
  }

  // -- figures: the parts they share ---------------------------------------------------------------------------------
  function frame(figure) {
    const host = html("figure", {});
    if (figure.title) host.append(html("figcaption", {}, figure.title));
    const plot = html("div", { class: "plot" });
    host.append(plot);
    if (figure.note) host.append(html("p", { class: "note" }, figure.note));
    return { host, plot };
  }

  function swatch(index, shape) {
    const mark = shape === undefined
      ? svg("line", { x1: 1, x2: 21, y1: 6, y2: 6, class: `curve ${colour(index)} ${dash(index)}` })
      : svg("path", { d: shapePath(shape, 11, 6, 5), class: `point ${colour(index)}` });
    return svg("svg", { viewBox: "0 0 22 12", "aria-hidden": "true" }, mark);
  }

  /* Buttons that show and hide; `entries` have name, label, index and shown. */
  function legend(entries, changed, light) {
    const list = html("ul", { class: "legend", "aria-label": "Legend: choose what is shown" });
    const buttons = entries.map((entry) => {
      const button = html(
        "button",
        { type: "button", "aria-pressed": String(entry.shown), title: entry.label || entry.name },
        swatch(entry.index, entry.shape),
        html("span", {}, fitted(entry.name, 180)),
      );
      button.addEventListener("click", () => set([entry], !entry.shown));
      if (light) {
        for (const kind of ["pointerenter", "focus"]) button.addEventListener(kind, () => light(entry.index));
        for (const kind of ["pointerleave", "blur"]) button.addEventListener(kind, () => light(null));
      }
      list.append(html("li", {}, button));
      return button;
    });
    function set(some, shown) {
      for (const entry of some) entry.shown = shown;
      entries.forEach((entry, i) => buttons[i].setAttribute("aria-pressed", String(entry.shown)));
      changed();
    }
    if (entries.length > 4) {
      for (const [text, shown] of [["all", true], ["none", false]]) {
        const button = html("button", { type: "button", class: "all" }, text);
        button.addEventListener("click", () => set(entries, shown));
        list.append(html("li", {}, button));
      }
    }
    return list;
  }

  function tooltip(plot) {
    const tip = html("div", { class: "tip", hidden: true });
    plot.append(tip);
    return {
      show(title, rows, x, y) {
        const lines = rows.map((row) => html("div", { class: colour(row.index) }, html("i", {}), html("span", {}, fitted(row.name, 170)), html("b", {}, row.text)));
        tip.replaceChildren(html("strong", {}, title), ...lines);
        tip.hidden = false;
        const room = plot.clientWidth;
        const width = tip.offsetWidth;
        const left = x + 14 + width <= room ? x + 14 : Math.max(0, x - 14 - width);
        tip.style.left = `${left}px`;
        tip.style.top = `${Math.max(0, y)}px`;
      },
      hide() {
        tip.hidden = true;
      },
    };
  }

  /* Draw now and whenever the width changes. */
  function responsive(plot, draw) {
    let width = 0;
    const redraw = () => {
      const now = plot.clientWidth;
      if (now > 0 && now !== width) {
        width = now;
        draw(now);
      }
    };
    new ResizeObserver(redraw).observe(plot);
    redraw();
    return () => draw(plot.clientWidth || width || 640);
  }

  function axes(root, box, x, y, xTicks, yTicks, xLabel, yLabel, yText) {
    for (const value of yTicks) {
      root.append(svg("line", { class: "grid", x1: box.left, x2: box.right, y1: y(value), y2: y(value) }));
      root.append(svg("text", { x: box.left - 8, y: y(value) + 4, "text-anchor": "end" }, yText(value)));
    }
    root.append(svg("line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }));
    for (const value of xTicks) {
      root.append(svg("line", { class: "axis", x1: x(value), x2: x(value), y1: box.bottom, y2: box.bottom + 4 }));
      root.append(svg("text", { x: x(value), y: box.bottom + 18, "text-anchor": "middle" }, tickText(value, xTicks)));
    }
    if (xLabel) root.append(svg("text", { x: (box.left + box.right) / 2, y: box.bottom + 36, "text-anchor": "middle" }, fitted(xLabel, box.right - box.left)));
    if (yLabel) root.append(svg("text", { x: 2, y: 13 }, fitted(yLabel, box.right - 4)));
  }

  // -- lines ----------------------------------------------------------------------------------------------------------
  /* `figure.series` have name, x, y and, where there are seeds, spread and seeds. `setSeries` changes what is drawn. */
  function lines(figure) {
    const { host, plot } = frame(figure);
    let current = figure;
    const shownBefore = new Map();
    const root = svg("svg", { tabindex: 0, role: "slider", "aria-roledescription": "chart" });
    plot.append(root);
    const tip = tooltip(plot);
    let entries = [];
    let spots = [];
    let at = -1;
    let place = () => {};

    function read(next) {
      current = next;
      entries.forEach((entry) => shownBefore.set(entry.label || entry.name, entry.shown));
      entries = next.series.map((series, index) => ({ index, ...series, shown: shownBefore.get(series.label || series.name) ?? series.shown !== false }));
    }

    const usable = (value) => value !== null && value !== undefined && !(current.log && value <= 0);

    function draw(width) {
      const log = Boolean(current.log_y) && entries.some((e) => e.y.some((value) => value > 0));
      current.log = log;
      const shown = entries.filter((entry) => entry.shown && entry.y.some(usable));
      const height = Math.round(Math.min(420, Math.max(250, width * 0.45)));
      root.setAttribute("viewBox", `0 0 ${width} ${height}`);
      const values = [];
      const rounds = new Set();
      for (const entry of shown) {
        entry.y.forEach((value, i) => {
          if (!usable(value)) return;
          const spread = log ? 0 : entry.spread?.[i] || 0;
          values.push(value - spread, value + spread);
          rounds.add(entry.x[i]);
        });
      }
      spots = [...rounds].sort((a, b) => a - b);
      const [low, high] = current.range || spanOf(values, log, current.percent);
      const yTicks = log ? logTicks(low, high) : ticks(low, high, 5);
      const yText = (value) => (log ? format(value) : tickText(value, yTicks));
      const left = 14 + Math.max(18, ...yTicks.map((value) => textWidth(yText(value))));
      const box = { left, right: width - 14, top: log ? 32 : 24, bottom: height - (current.x_label ? 44 : 26) };
      const [first, last] = current.rounds || (spots.length ? [spots[0], spots[spots.length - 1]] : [0, 1]);
      const pad = first === last ? 0.5 : 0;
      const x = scale(first - pad, last + pad, box.left + 4, box.right - 4);
      const y = scale(low, high, box.bottom, box.top, log);
      root.replaceChildren();
      const xTicks = ticks(first, last, Math.max(2, width / 110)).filter((value) => !spots.every(Number.isInteger) || Number.isInteger(value));
      axes(root, box, x, y, xTicks, yTicks, current.x_label, current.y_label, yText);
      const clip = (pixel) => Math.max(box.top, Math.min(box.bottom, pixel));
      for (const entry of shown) {
        if (!entry.spread || log) continue;
        for (const stretch of stretches(entry.y.map((value, i) => usable(value) && entry.spread[i] !== null))) {
          const up = stretch.map((i) => `${x(entry.x[i])},${clip(y(entry.y[i] + entry.spread[i]))}`);
          const down = stretch.map((i) => `${x(entry.x[i])},${clip(y(entry.y[i] - entry.spread[i]))}`).reverse();
          root.append(svg("polygon", { class: `band ${colour(entry.index)}`, "data-of": entry.index, points: [...up, ...down].join(" ") }));
        }
      }
      for (const entry of shown) {
        const where = entry.y.map((value, i) => (usable(value) ? `${x(entry.x[i]).toFixed(1)},${y(value).toFixed(1)}` : null));
        for (const stretch of stretches(where.map((spot) => spot !== null))) {
          root.append(svg("polyline", { class: `curve ${colour(entry.index)} ${dash(entry.index)}`, "data-of": entry.index, points: stretch.map((i) => where[i]).join(" ") }));
          if (stretch.length === 1 || entry.x.length <= 15) {
            for (const i of stretch) root.append(svg("circle", { class: `dot ${colour(entry.index)}`, "data-of": entry.index, cx: x(entry.x[i]), cy: y(entry.y[i]), r: 3.2 }));
          }
        }
      }
      if (!shown.length) root.append(svg("text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, "Nothing is chosen in the legend."));
      const marks = svg("g", {});
      root.append(marks);
      root.setAttribute("aria-label", `${current.title || current.y_label || "Chart"}: ${shown.length} of ${entries.length} curves; arrow keys read the values`);
      root.setAttribute("aria-valuemin", first);
      root.setAttribute("aria-valuemax", last);
      root.setAttribute("aria-valuenow", last);

      place = (spot) => {
        marks.replaceChildren();
        at = spot;
        if (spot < 0 || spot >= spots.length) {
          tip.hide();
          return;
        }
        const round = spots[spot];
        const rows = [];
        for (const entry of shown) {
          const i = entry.x.indexOf(round);
          if (i < 0 || !usable(entry.y[i])) continue;
          const spread = entry.spread ? entry.spread[i] : null;
          const all = Array.isArray(entry.seeds) ? Math.max(...entry.seeds) : 0;
          const seeds = all && entry.seeds[i] < all ? ` (${entry.seeds[i]} of ${all} seeds)` : "";
          rows.push({ index: entry.index, name: entry.name, value: entry.y[i], spread, seeds });
          marks.append(svg("circle", { class: `dot ${colour(entry.index)}`, cx: x(round), cy: y(entry.y[i]), r: 4.5 }));
        }
        marks.prepend(svg("line", { class: "cross", x1: x(round), x2: x(round), y1: box.top, y2: box.bottom }));
        rows.sort((a, b) => b.value - a.value);
        const text = aligned(rows.map((row) => row.value), current.percent);
        for (const row of rows) row.text = text(row.value) + (row.spread === null ? "" : ` ±${text(row.spread)}`) + row.seeds;
        const title = `${current.x_label || "x"} ${format(round)}`;
        root.setAttribute("aria-valuenow", round);
        root.setAttribute("aria-valuetext", `${title}: ${rows.map((row) => `${row.name} ${row.text}`).join(", ")}`);
        const ratio = plot.clientWidth / width || 1;
        tip.show(title, rows, x(round) * ratio, box.top);
      };
      root.onpointermove = root.onpointerdown = (event) => {
        if (!spots.length) return;
        const bounds = root.getBoundingClientRect();
        const pixel = ((event.clientX - bounds.left) / bounds.width) * width;
        let best = 0;
        spots.forEach((round, i) => {
          if (Math.abs(x(round) - pixel) < Math.abs(x(spots[best]) - pixel)) best = i;
        });
        place(best);
      };
    }

    read(figure);
    const again = responsive(plot, draw);
    // A finger leaves as soon as it is lifted; what it asked for stays until it touches something else.
    root.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") place(-1); });
    root.addEventListener("blur", () => place(-1));
    root.addEventListener("keydown", (event) => {
      const from = at < 0 ? spots.length : at;
      const to = { ArrowLeft: Math.max(0, from - 1), ArrowRight: at < 0 ? 0 : Math.min(spots.length - 1, at + 1), Home: 0, End: spots.length - 1, Escape: -1 }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      place(to);
    });
    function light(index) {
      root.classList.toggle("lit", entries.some((entry) => entry.shown && entry.index === index));
      for (const node of root.querySelectorAll("[data-of]")) node.classList.toggle("this", node.dataset.of === String(index));
    }
    let keys = null;
    function addLegend() {
      keys?.remove();
      keys = entries.length > 1 ? legend(entries, again, light) : null;
      if (keys) plot.after(keys);
    }
    addLegend();

    function addNumbers() {
      host.querySelector(":scope > .behind")?.remove();
      const seen = current;
      host.append(behind(seen.title || seen.y_label || "the chart", () => {
        const xs = [...new Set(seen.series.flatMap((series) => series.x))].sort((a, b) => a - b);
        const value = (series, x) => {
          const i = series.x.indexOf(x);
          if (i < 0 || series.y[i] === null) return null;
          return series.spread && series.spread[i] !== null ? `${format(series.y[i], seen.percent)} ±${format(series.spread[i], seen.percent)}` : series.y[i];
        };
        const rows = xs.map((x) => [x, ...seen.series.map((series) => value(series, x))]);
        return tableOf([seen.x_label || "x", ...seen.series.map((series) => series.name)], rows, seen.title || seen.y_label || "Values", seen.percent);
      }));
    }
    addNumbers();
    host.setFigure = (next) => {
      read(next);
      addLegend();
      addNumbers();
      again();
    };
    return host;
  }

  /* Runs of neighbours that are all there: a gap in the values is a gap in the curve. */
  function stretches(present) {
    const found = [];
    let open = null;
    present.forEach((here, i) => {
      if (!here) open = null;
      else if (open) open.push(i);
      else found.push((open = [i]));
    });
    return found;
  }

  // -- bars -----------------------------------------------------------------------------------------------------------
  /* Rows have name, index, mean, and where known spread and the values of single seeds. */
  function barPanel(panel) {
    const host = html("figure", {});
    const plot = html("div", { class: "plot" });
    host.append(plot);
    const root = svg("svg", { role: "img" });
    plot.append(root);
    const text = (row) => format(row.mean, panel.percent) + (row.spread === null || row.spread === undefined ? "" : ` ±${format(row.spread, panel.percent)}`);
    root.setAttribute("aria-label", `${panel.title}: ${panel.rows.map((row) => `${row.name} ${text(row)}`).join(", ")}`);
    responsive(plot, (width) => {
      const step = 23;
      const top = panel.title ? 26 : 4;
      const height = top + step * panel.rows.length + 6;
      root.setAttribute("viewBox", `0 0 ${width} ${height}`);
      root.replaceChildren();
      if (panel.title) root.append(svg("text", { class: "title", x: 0, y: 14 }, fitted(panel.title, width * 0.92)));
      const names = Math.min(width * 0.36, Math.max(0, ...panel.rows.map((row) => textWidth(row.name))));
      const numbersWidth = Math.max(0, ...panel.rows.map((row) => textWidth(text(row)))) + 4;
      const [low, high] = panel.span;
      const positive = panel.log && low > 0;
      const x = scale(low, high, names + 10, width - numbersWidth - 8, positive);
      const zero = positive ? x(low) : x(Math.min(Math.max(0, low), high));
      const inside = (value) => Math.max(x(low), Math.min(x(high), x(positive ? Math.max(value, low) : value)));
      panel.rows.forEach((row, i) => {
        const y = top + i * step;
        const middle = y + step / 2 - 1;
        const label = svg("text", { class: "strong", x: 0, y: middle + 4 }, fitted(row.name, names), svg("title", {}, row.label || row.name));
        root.append(label, svg("text", { class: row.best ? "title" : "strong", x: width - 2, y: middle + 4, "text-anchor": "end" }, text(row)));
        if (row.mean === null || row.mean === undefined) return;
        const end = inside(row.mean);
        root.append(svg("rect", { class: `bar-fill ${colour(row.index)}`, x: Math.min(zero, end), width: Math.max(1, Math.abs(end - zero)), y: middle - 7, height: 14, rx: 2 }));
        if (row.spread) {
          const [a, b] = [inside(row.mean - row.spread), inside(row.mean + row.spread)];
          for (const [x1, x2, y1, y2] of [[a, b, middle, middle], [a, a, middle - 4, middle + 4], [b, b, middle - 4, middle + 4]]) root.append(svg("line", { class: "whisker", x1, x2, y1, y2 }));
        }
        if (row.values && row.values.length > 1) for (const value of row.values) root.append(svg("circle", { class: "seed", cx: inside(value), cy: middle, r: 1.8 }));
      });
      root.append(svg("line", { class: "axis", x1: zero, x2: zero, y1: top, y2: height - 6 }));
    });
    return host;
  }

  function bars(figure) {
    const { host, plot } = frame({ ...figure, title: [figure.title, figure.y_label].filter(Boolean).join(" — ") });
    const every = figure.series.flatMap((series) => series.values.flatMap((value, i) => (value === null ? [] : [value - (series.spread?.[i] || 0), value + (series.spread?.[i] || 0)])));
    const log = Boolean(figure.log_y) && every.length > 0 && every.every((value) => value > 0);
    const [least, most] = figure.range || extent(every);
    const span = log ? [10 ** Math.floor(Math.log10(least)), most] : [Math.min(0, least), Math.max(0, most) || 1];
    const panels = figure.series.length === 1
      ? [{ title: "", rows: figure.categories.map((name, i) => ({ name, index: 0, mean: figure.series[0].values[i], spread: figure.series[0].spread?.[i] })) }]
      : figure.categories.map((title, i) => ({ title, rows: figure.series.map((series, index) => ({ name: series.name, index, mean: series.values[i], spread: series.spread?.[i] })) }));
    const grid = html("div", { class: panels.length > 1 ? "panels" : "" });
    plot.append(grid);
    for (const panel of panels) grid.append(barPanel({ ...panel, span, log }));
    host.append(behind(figure.title, () => {
      const spreads = figure.series.some((series) => series.spread);
      const columns = figure.series.flatMap((series) => (spreads ? [series.name, `${series.name} ±`] : [series.name]));
      const rows = figure.categories.map((name, i) => [name, ...figure.series.flatMap((series) => (spreads ? [series.values[i], series.spread ? series.spread[i] : null] : [series.values[i]]))]);
      return tableOf(["", ...columns], rows, figure.title || "Values");
    }));
    return host;
  }

  // -- matrices -------------------------------------------------------------------------------------------------------
  function matrix(figure) {
    const { host, plot } = frame(figure);
    const root = svg("svg", { role: "img", "aria-label": `${figure.title}: ${figure.rows.length} rows by ${figure.columns.length} columns; the numbers are in the table below` });
    plot.append(root);
    const tip = tooltip(plot);
    const every = known(figure.values.flat());
    const [low, high] = figure.range || extent(every);
    const signed = low < 0 && high > 0;
    const strength = (value) => (signed ? Math.abs(value) / Math.max(-low, high) : (value - low) / (high - low || 1));
    responsive(plot, (width) => {
      const names = Math.min(width * 0.3, Math.max(20, textWidth(figure.y_label || ""), ...figure.rows.map(textWidth))) + 12;
      const side = Math.min(64, (width - names - 2) / figure.columns.length);
      const tall = Math.min(34, Math.max(side, 12));
      const columnNames = figure.columns.map((name) => fitted(name, 110));
      const slanted = columnNames.some((name) => textWidth(name) > side - 4);
      const top = (slanted ? 14 + Math.max(...columnNames.map(textWidth)) * 0.72 : 22) + (figure.x_label ? 18 : 0);
      const height = top + tall * figure.rows.length + 4;
      root.setAttribute("viewBox", `0 0 ${width} ${height}`);
      root.replaceChildren();
      if (figure.x_label) root.append(svg("text", { x: names, y: 12 }, figure.x_label));
      if (figure.y_label) root.append(svg("text", { x: names - 8, y: top - 6, "text-anchor": "end" }, fitted(figure.y_label, names - 10)));
      columnNames.forEach((name, j) => {
        const x = names + side * (j + 0.5);
        root.append(slanted
          ? svg("text", { transform: `translate(${x + 4},${top - 6}) rotate(-45)` }, name)
          : svg("text", { x, y: top - 6, "text-anchor": "middle" }, name));
      });
      const texts = figure.values.map((row) => row.map((value) => format(value)));
      const room = tall >= 15 && texts.flat().every((text) => textWidth(text) <= side - 4);
      figure.rows.forEach((name, i) => {
        const y = top + tall * i;
        root.append(svg("text", { class: "strong", x: names - 8, y: y + tall / 2 + 4, "text-anchor": "end" }, fitted(name, names - 10)));
        figure.values[i].forEach((value, j) => {
          const missing = value === null;
          const power = missing ? 0 : strength(value);
          const cell = svg("rect", { class: `cell${missing ? " none" : value < 0 && signed ? " negative" : ""}`, x: names + side * j, y, width: side, height: tall, rx: 2 });
          if (!missing) cell.setAttribute("fill-opacity", (0.06 + 0.94 * power).toFixed(3));
          cell.onpointerenter = cell.onpointerdown = () => tip.show(`${name} / ${figure.columns[j]}`, [{ index: 0, name: "value", text: format(value) }], names + side * j, y);
          root.append(cell);
          if (room) root.append(svg("text", { class: power > 0.79 ? "on" : power > 0.57 ? "mid" : "strong", x: names + side * (j + 0.5), y: y + tall / 2 + 4, "text-anchor": "middle", "pointer-events": "none" }, texts[i][j]));
        });
      });
    });
    root.addEventListener("pointerleave", () => tip.hide());
    host.append(behind(figure.title, () => tableOf([figure.y_label || "", ...figure.columns], figure.rows.map((name, i) => [name, ...figure.values[i]]), figure.title || "Values")));
    return host;
  }

  // -- points ---------------------------------------------------------------------------------------------------------
  function shapePath(shape, x, y, r) {
    const at = (dx, dy) => `${(x + dx).toFixed(1)},${(y + dy).toFixed(1)}`;
    switch (shape % 6) {
      case 1: return `M${at(-r, -r)}H${x + r}V${y + r}H${x - r}Z`;
      case 2: return `M${at(0, -1.2 * r)}L${at(1.15 * r, 0.9 * r)}L${at(-1.15 * r, 0.9 * r)}Z`;
      case 3: return `M${at(0, -1.3 * r)}L${at(1.3 * r, 0)}L${at(0, 1.3 * r)}L${at(-1.3 * r, 0)}Z`;
      case 4: return `M${at(0, 1.2 * r)}L${at(1.15 * r, -0.9 * r)}L${at(-1.15 * r, -0.9 * r)}Z`;
      case 5: { const t = r / 3; return `M${at(-t, -r)}h${2 * t}v${r - t}h${r - t}v${2 * t}h${t - r}v${r - t}h${-2 * t}v${t - r}h${t - r}v${-2 * t}h${r - t}Z`; }
      default: return `M${at(-r, 0)}a${r},${r} 0 1,0 ${2 * r},0a${r},${r} 0 1,0 ${-2 * r},0Z`;
    }
  }

  function points(figure) {
    const { host, plot } = frame(figure);
    const classes = [...new Set(figure.class)].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
    const domains = [...new Set(figure.domain)];
    const classEntries = classes.map((name, index) => ({ name: name || "all", index, shape: 0, shown: true }));
    const domainEntries = domains.map((name, index) => ({ name: name || "all", index: 7, shape: index, shown: true }));
    const root = svg("svg", { role: "img", "aria-label": `${figure.title}: ${figure.x.length} points of ${classes.length} classes and ${domains.length} domains; the numbers are in the table below` });
    plot.append(root);
    const tip = tooltip(plot);
    const used = figure.x.map((x, i) => i).filter((i) => figure.x[i] !== null && figure.y[i] !== null);
    const again = responsive(plot, (width) => {
      const height = Math.round(Math.min(520, Math.max(300, width * 0.62)));
      root.setAttribute("viewBox", `0 0 ${width} ${height}`);
      root.replaceChildren();
      const [x0, x1] = spanOf(used.map((i) => figure.x[i]));
      const [y0, y1] = spanOf(used.map((i) => figure.y[i]));
      const yTicks = ticks(y0, y1, 5);
      const yText = (value) => tickText(value, yTicks);
      const box = { left: 14 + Math.max(18, ...yTicks.map((value) => textWidth(yText(value)))), right: width - 8, top: 22, bottom: height - (figure.x_label ? 44 : 26) };
      const x = scale(x0, x1, box.left, box.right);
      const y = scale(y0, y1, box.bottom, box.top);
      axes(root, box, x, y, ticks(x0, x1, width / 110), yTicks, figure.x_label, figure.y_label, yText);
      for (const i of used) {
        const kind = classes.indexOf(figure.class[i]);
        const domain = domains.indexOf(figure.domain[i]);
        if (!classEntries[kind].shown || !domainEntries[domain].shown) continue;
        const mark = svg("path", { class: `point ${colour(kind)}`, d: shapePath(domain, x(figure.x[i]), y(figure.y[i]), 3.6) });
        mark.onpointerenter = mark.onpointerdown = () => tip.show([figure.class[i], figure.domain[i]].filter(Boolean).join(", ") || "point", [{ index: kind, name: "at", text: `${format(figure.x[i])}, ${format(figure.y[i])}` }], x(figure.x[i]), y(figure.y[i]));
        root.append(mark);
      }
    });
    root.addEventListener("pointerleave", () => tip.hide());
    if (domains.length > 1) plot.after(legend(domainEntries, () => again()));
    if (classes.length > 1) plot.after(legend(classEntries, () => again()));
    host.append(behind(figure.title, () => tableOf(["class", "domain", figure.x_label || "x", figure.y_label || "y"], used.map((i) => [figure.class[i], figure.domain[i], figure.x[i], figure.y[i]]), figure.title || "Points")));
    return host;
  }

  function plainTable(figure) {
    const host = html("figure", {});
    if (figure.title) host.append(html("figcaption", {}, figure.title));
    host.append(tableOf(figure.columns, figure.rows, figure.title || "Table", false, figure.note));
    return host;
  }

  const KINDS = { lines, bars, matrix, points, table: plainTable };

  // -- the page ---------------------------------------------------------------------------------------------------------
  function curvesOf(group, host, select) {
    const figure = (key) => {
      const metric = group.metrics.find((each) => each.key === key);
      const series = group.series
        .map((entry) => ({ index: entry.colour, name: entry.name, label: entry.label, shown: entry.shown, ...entry.curves[key] }))
        .filter((entry) => entry.x && entry.x.length)
        .sort((a, b) => a.index - b.index);
      return { title: "", x_label: "round", y_label: metric.name + (metric.percent ? ", %" : ""), percent: metric.percent, series };
    };
    const chart = lines(figure(group.metrics[0].key));
    host.append(chart);
    select.addEventListener("change", () => chart.setFigure(figure(select.value)));
  }

  function panelsOf(group, host) {
    const byLabel = new Map(group.series.map((entry) => [entry.label, entry]));
    const highest = Math.max(...group.panels.flatMap((panel) => panel.bars.map((bar) => bar.mean + (bar.spread || 0))), 1);
    for (const panel of group.panels) {
      const rows = panel.bars.map((bar) => ({ ...bar, index: byLabel.get(bar.label).colour, name: byLabel.get(bar.label).name }));
      host.append(barPanel({ title: panel.title, rows, span: [0, Math.min(100, highest)], percent: true }));
    }
    const labels = [...new Set(group.panels.flatMap((panel) => panel.bars.map((bar) => bar.label)))];
    host.after(behind("the bars", () => {
      const rows = labels.map((label) => [byLabel.get(label).name, ...group.panels.map((panel) => {
        const bar = panel.bars.find((each) => each.label === label);
        return bar ? bar.values.map((value) => value.toFixed(1)).join(", ") : null;
      })]);
      return tableOf(["method", ...group.panels.map((panel) => panel.title)], rows, "Accuracy in % of each seed");
    }));
  }

  /* Two runs side by side share their axes, or they could not be compared. */
  function sharedRange(figures) {
    const every = figures.flatMap((figure) => {
      if (figure.kind === "lines") return figure.series.flatMap((series) => known(series.y));
      if (figure.kind === "bars") return figure.series.flatMap((series) => series.values.flatMap((value, i) => (value === null ? [] : [value - (series.spread?.[i] || 0), value + (series.spread?.[i] || 0)])));
      return figure.kind === "matrix" ? known(figure.values.flat()) : [];
    });
    const log = figures.some((figure) => figure.log_y);
    const used = log ? every.filter((value) => value > 0) : every;
    if (!used.length) return undefined;
    return figures[0].kind === "lines" ? spanOf(used, log) : extent(used);
  }

  function diagnosticOf(diagnostic, article) {
    const selects = [...article.querySelectorAll("select")];
    const host = article.querySelector(".beside");
    function show() {
      const runs = selects.filter((select) => select.value !== "").map((select) => diagnostic.runs[select.value]);
      host.classList.toggle("two", runs.length > 1);
      host.replaceChildren(...runs.map(() => html("div", {})));
      runs.forEach((run, column) => {
        const place = host.children[column];
        if (diagnostic.runs.length > 1) place.append(html("h6", {}, run.name));
        run.figures.forEach((figure, i) => {
          const twins = runs.map((other) => other.figures[i]).filter((other) => other && other.kind === figure.kind);
          const range = twins.length > 1 ? sharedRange(twins) : undefined;
          const rounds = range && figure.kind === "lines" ? extent(twins.flatMap((twin) => twin.series.flatMap((series) => series.x))) : undefined;
          place.append(KINDS[figure.kind]({ ...figure, range, rounds }));
        });
      });
    }
    selects.forEach((select) => select.addEventListener("change", show));
    show();
  }

  function themeButton() {
    const button = document.getElementById("theme");
    const root = document.documentElement;
    const system = matchMedia("(prefers-color-scheme: dark)");
    const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
    const name = () => {
      button.textContent = dark() ? "Light" : "Dark";
      button.setAttribute("aria-label", `Switch to ${dark() ? "light" : "dark"} colours`);
    };
    try {
      const kept = localStorage.getItem("fedkeel-theme");
      if (kept === "light" || kept === "dark") root.dataset.theme = kept;
    } catch { /* a page opened from disk may have no storage */ }
    button.hidden = false;
    button.addEventListener("click", () => {
      root.dataset.theme = dark() ? "light" : "dark";
      name();
      try {
        localStorage.setItem("fedkeel-theme", root.dataset.theme);
      } catch { /* then it is forgotten with the page */ }
    });
    system.addEventListener("change", name);
    name();
  }

  function copyButton(block) {
    const button = html("button", { type: "button" }, "Copy");
    button.addEventListener("click", async () => {
      const code = block.querySelector("code");
      try {
        await navigator.clipboard.writeText(code.textContent);
        button.textContent = "Copied";
      } catch {
        getSelection().selectAllChildren(code);
        button.textContent = "Selected";
      }
      setTimeout(() => { button.textContent = "Copy"; }, 1500);
    });
    block.append(button);
  }

  // On paper nothing can be opened any more.
  addEventListener("beforeprint", () => {
    for (const details of document.querySelectorAll("section[id$=-config] details, section[id$=-runs] details, details.question")) details.open = true;
  });
  themeButton();
  document.querySelectorAll("table.sortable").forEach(sortable);
  document.querySelectorAll(".code").forEach(copyButton);
  document.querySelectorAll("[data-js]").forEach((node) => { node.hidden = false; });
  document.querySelectorAll("[data-nojs]").forEach((node) => node.remove());
  numbers.groups.forEach((group, number) => {
    const curves = document.querySelector(`[data-curves="g${number}"]`);
    if (curves) curvesOf(group, curves, document.querySelector(`[data-metric="g${number}"]`));
    const panels = document.querySelector(`[data-panels="g${number}"]`);
    if (panels) panelsOf(group, panels);
    group.diagnostics.forEach((diagnostic, i) => diagnosticOf(diagnostic, document.querySelector(`[data-diagnostic="g${number} ${i}"]`)));
  });
})();
