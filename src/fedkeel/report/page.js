/* Has Vega draw the figures of a Fedkeel report from their descriptions in the page, gives each a legend that filters,
   its numbers as a table and files to save, and makes tables sortable.
   Text goes in by textContent only, so that a name is never read as markup. */
(() => {
  "use strict";
  const page = JSON.parse(document.getElementById("numbers").textContent);
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const theme = () => root.dataset.theme || (system.matches ? "dark" : "light");

  // -- small things -----------------------------------------------------------------------------------------------
  function html(tag, attributes, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (typeof value === "function") node.addEventListener(name, value);
      else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
    }
    node.append(...children.filter((child) => child !== null && child !== undefined));
    return node;
  }

  function format(value, percent) {
    if (value === null || value === undefined) return "–";
    if (percent) return value.toFixed(1);
    if (Number.isInteger(value) && Math.abs(value) < 1e6) return String(value);
    const size = Math.abs(value);
    return size >= 1e5 || (size < 1e-3 && size > 0) ? Number(value.toPrecision(3)).toExponential() : String(Number(value.toPrecision(4)));
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
        const [first, other] = numeric ? ["descending", "ascending"] : ["ascending", "descending"];
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

  function tableOf(columns, rows, caption, percent) {
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
    return html("div", { class: "scroll", role: "region", tabindex: 0, "aria-label": caption }, table);
  }

  const noteOf = (figure) => (figure.note ? html("p", { class: "note" }, figure.note) : "");

  /* The numbers of a figure, from the same columns that Vega draws. */
  function numbersOf(figure) {
    const data = page.data[figure.data];
    const title = figure.title || "The numbers";
    const with_spread = (value, spread) => (value === null || value === undefined || spread === null || spread === undefined ? value : `${format(value, figure.percent)} ±${format(spread, figure.percent)}`);
    if (figure.kind === "lines") {
      const xs = [...new Set(data.flatMap((row) => row.x))].sort((a, b) => a - b);
      const at = data.map((row) => new Map(row.x.map((x, i) => [x, with_spread(row.y[i], row.spread[i])])));
      return tableOf([figure.x_label || "x", ...data.map((row) => row.name)], xs.map((x) => [x, ...at.map((values) => values.get(x) ?? null)]), title, figure.percent);
    }
    if (figure.kind === "bars") {
      const value = (row, i) => (row.seeds[i].length > 1 ? `${with_spread(row.value[i], row.spread[i])} (${row.seeds[i].map((seed) => format(seed, figure.percent)).join(", ")})` : with_spread(row.value[i], row.spread[i]));
      return tableOf(["", ...data[0].category], data.map((row) => [row.name, ...row.category.map((_, i) => value(row, i))]), title, figure.percent);
    }
    if (figure.kind === "matrix") return tableOf(["", ...data[0].column], data.map((row) => [row.row, ...row.value]), title);
    const [points] = data;
    return tableOf(["class", "domain", "x", "y"], points.x.map((x, i) => [points.class[i], points.domain[i], x, points.y[i]]), title);
  }

  // -- Vega -----------------------------------------------------------------------------------------------------------
  /* Unpacked when the first figure comes into view. The page's policy knows the script by its hash. */
  let unpacked = null;
  async function unpack() {
    const packed = Uint8Array.from(atob(document.getElementById("vega").textContent), (letter) => letter.charCodeAt(0));
    const text = await new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
    document.head.append(html("script", {}, text));
  }

  /* Of bars: as many as are shown. */
  const heightOf = (figure, values) => figure.groups * (page.bar * Math.max(1, page.data[figure.data].filter((row) => !values.hidden.includes(row.name)).length) + page.gap);

  /* Without legends: the page has its own. */
  function bare(spec) {
    const encoding = Object.fromEntries(Object.entries(spec.encoding || {}).map(([name, one]) => [name, one && "legend" in one ? { ...one, legend: null } : one]));
    return { ...spec, encoding, ...(spec.layer && { layer: spec.layer.map(bare) }) };
  }

  /* A view of a figure in `host`: as in the page, or, with `look`, as it is in a file. */
  async function embed(host, figure, values, width, look, tooltip) {
    await (unpacked ??= unpack());
    const { params, ...config } = page.themes[look || theme()];
    const spec = { ...page.specs[figure.spec], data: { name: "given", values: page.data[figure.data] }, width: Math.min(width, figure.widest || width) };
    const label = figure.title ? spec.title.subtitle : spec.title.text; // a title is above the figure, in the page
    if (!look || !figure.title) spec.title = label ? { text: label, fontSize: 12, fontWeight: "normal", color: config.title.subtitleColor } : undefined;
    spec.params = [...(spec.params || []), ...params, ...Object.entries(values).map(([name, value]) => ({ name, value }))];
    if (figure.groups) spec.height = heightOf(figure, values);
    if (!look) {
      Object.assign(spec, bare(spec));
      config.axis = { ...config.axis, labelLimit: width < 500 ? 90 : 170 };
    }
    // `ast`: expressions are read by an interpreter, since the page's policy lets no text become code.
    return (await vegaEmbed(host, spec, { mode: "vega-lite", renderer: "svg", actions: false, ast: true, defaultStyle: false, config, tooltip })).view;
  }

  async function save(chart, kind) {
    const values = { ...chart.values(), at: null };
    const view = await embed(html("div"), chart.figure, values, 640, "light", () => {});
    const link = html("a", { download: `${(chart.figure.title || page.specs[chart.figure.spec].description).replace(/[^\w-]+/g, "-").slice(0, 60).toLowerCase()}.${kind}` });
    link.href = await view.background("white").toImageURL(kind, kind === "png" ? 3 : 1);
    link.click();
    view.finalize();
  }

  // -- figures --------------------------------------------------------------------------------------------------------
  const charts = new Set();
  const GLYPHS = ["●", "■", "▲", "◆", "▼", "✚"];

  function coloured(glyph, colour, kind) {
    const mark = html("i", { "aria-hidden": "true", class: kind }, glyph);
    mark.style.color = colour;
    return mark;
  }

  function tooltip(plot) {
    const tip = html("div", { class: "tip", hidden: true });
    plot.append(tip);
    return {
      show(title, rows, x, y) {
        tip.replaceChildren(html("strong", {}, title), ...rows.map((row) => html("div", {}, coloured("", row.colour), html("span", {}, row.name), html("b", {}, row.text))));
        tip.hidden = false;
        const width = tip.offsetWidth;
        tip.style.left = `${x + 14 + width <= plot.clientWidth ? x + 14 : Math.max(0, x - 14 - width)}px`;
        tip.style.top = `${Math.max(0, y)}px`;
      },
      hide: () => { tip.hidden = true; },
    };
  }

  /* Buttons that show and hide, for each parameter of the figure that hides something. */
  function legend(chart, parameter) {
    const names = chart.figure.legend[parameter];
    const hidden = chart.hidden[parameter];
    const colours = page.themes[theme()].range.category;
    const list = html("ul", { class: "legend", "aria-label": "Legend: choose what is shown" });
    const isLine = chart.figure.kind === "lines";
    const swatch = (place) => {
      if (parameter === "apart") return coloured(GLYPHS[place % GLYPHS.length], "");
      return coloured(isLine ? "" : "■", colours[place % colours.length], isLine && `line d${Math.floor(place / colours.length) % 5}`);
    };
    const light = (name) => () => chart.signal("lit", hidden.has(name) ? null : name);
    const buttons = names.map((name, place) => {
      const does = { click: () => set([name], hidden.has(name)), pointerenter: light(name), focus: light(name), pointerleave: light(null), blur: light(null) };
      const button = html("button", { type: "button", "aria-pressed": String(!hidden.has(name)), title: name, ...does }, swatch(place), html("span", {}, name));
      list.append(html("li", {}, button));
      return button;
    });
    function set(some, shown) {
      for (const name of some) shown ? hidden.delete(name) : hidden.add(name);
      names.forEach((name, i) => buttons[i].setAttribute("aria-pressed", String(!hidden.has(name))));
      chart.empty();
      chart.signal("lit", null);
      if (chart.view && chart.figure.groups) chart.view.height(heightOf(chart.figure, chart.values())).resize();
      chart.signal(parameter, [...hidden]);
    }
    const every = names.length > 4 ? [["all", true], ["none", false]] : [];
    list.append(...every.map(([text, shown]) => html("li", {}, html("button", { type: "button", class: "all", click: () => set(names, shown) }, text))));
    return list;
  }

  class Chart {
    constructor(host, figure) {
      this.canvas = html("div", { "aria-hidden": "true" });
      this.plot = html("div", { class: "plot", role: figure.kind === "lines" ? "slider" : "img" }, this.canvas);
      this.tip = tooltip(this.plot);
      this.under = html("div");
      host.append(this.plot, this.under);
      this.hidden = {};
      this.take(figure);
      if (figure.kind === "lines") this.readable();
      new ResizeObserver(() => this.resize()).observe(this.plot);
      charts.add(this);
      watcher.observe(this.plot);
      this.plot.chart = this;
    }

    /* Another figure in the same place; what was hidden stays so. */
    take(figure, ends) {
      this.figure = figure;
      this.spec = JSON.stringify(page.specs[figure.spec]);
      this.ends = ends || {};
      for (const [parameter, names] of Object.entries(figure.legend)) {
        const before = this.hidden[parameter];
        this.hidden[parameter] = new Set(before ? names.filter((name) => before.has(name)) : figure.values[parameter]);
      }
      this.plot.setAttribute("aria-label", `${page.specs[figure.spec].description}; ${figure.kind === "lines" ? "arrow keys read the values, " : ""}the numbers are in the table below`);
      this.below();
      if (this.drawing) this.draw();
    }

    /* The same figure with more in it: what is open, zoomed, hidden or has the focus stays so. */
    grow(figure) {
      if (!this.view || this.spec !== JSON.stringify(page.specs[figure.spec])) return this.take(figure);
      this.figure = figure;
      const open = this.under.querySelector("details[open]");
      if (open) open.lastChild.replaceWith(numbersOf(figure));
      // Vega changes the rows that it is given; what the page reads must stay as it is.
      const rows = structuredClone(page.data[figure.data]);
      for (const [name, value] of Object.entries(this.values())) if (name !== "at" && name !== "lit") this.view.signal(name, value);
      this.view.data("given", rows).runAsync();
    }

    below() {
      const open = this.under.querySelector("details")?.open;
      const details = html("details", { class: "behind", open }, html("summary", {}, "The numbers"));
      details.addEventListener("toggle", () => { if (details.open && details.children.length === 1) details.append(numbersOf(this.figure)); });
      const files = ["svg", "png"].map((kind) => html("button", { type: "button", class: "save", "aria-label": `Save as ${kind.toUpperCase()}`, click: () => save(this, kind) }, kind.toUpperCase()));
      const legends = Object.keys(this.figure.legend).map((parameter) => legend(this, parameter));
      this.under.replaceChildren(...legends, noteOf(this.figure), html("div", { class: "below" }, details, html("span", { class: "files" }, "Save as ", ...files)));
      this.empty();
    }

    empty() {
      const none = Object.entries(this.figure.legend).some(([parameter, names]) => this.hidden[parameter].size >= names.length);
      this.plot.classList.toggle("none", none);
    }

    values() {
      const hidden = Object.fromEntries(Object.entries(this.hidden).map(([parameter, names]) => [parameter, [...names]]));
      return { ...this.figure.values, ...this.ends, ...hidden };
    }

    width() {
      return this.plot.clientWidth || (this.plot.closest("section") || document.body).clientWidth - 40 || 640;
    }

    draw() {
      watcher.unobserve(this.plot);
      const show = (handler, event, item, value) => {
        if (!value) return this.tip.hide();
        const box = this.plot.getBoundingClientRect();
        this.tip.show(String(value), [], event.clientX - box.left, event.clientY - box.top - 10);
      };
      // One after the other: a second one that was asked for while the first is drawn is the one to be seen.
      this.drawing = (this.drawing || Promise.resolve()).then(async () => {
        this.view?.finalize();
        this.drawn = this.width();
        this.view = await embed(this.canvas, this.figure, this.values(), this.drawn, null, show);
      }).catch(() => { this.canvas.textContent = "This figure cannot be drawn here; its numbers are below."; });
      return this.drawing;
    }

    resize() {
      const width = this.plot.clientWidth;
      if (!this.view || !width || Math.abs(width - this.drawn) < 2) return;
      this.drawn = width;
      this.view.width(Math.min(width, this.figure.widest || width)).resize().runAsync();
    }

    signal(name, value) {
      if (this.view && name in this.values()) this.view.signal(name, value).runAsync();
    }

    // -- lines: all values of one round, by pointer, finger or keys
    readable() {
      const { plot } = this;
      let at = -1;
      const rounds = () => [...new Set(this.shown().flatMap((row) => row.x.filter((_, i) => row.y[i] !== null)))].sort((a, b) => a - b);
      const place = (spot) => {
        const all = rounds();
        at = spot;
        this.signal("at", all[spot] ?? null);
        if (!(spot in all) || !this.view) return this.tip.hide();
        const rows = this.rows(all[spot]);
        const title = `${this.figure.x_label || "x"} ${format(all[spot])}`;
        plot.setAttribute("aria-valuenow", all[spot]);
        plot.setAttribute("aria-valuetext", `${title}: ${rows.map((row) => `${row.name} ${row.text}`).join(", ")}`);
        this.tip.show(title, rows, this.view.origin()[0] + this.view.scale("x")(all[spot]), 20);
      };
      const point = (event) => {
        const all = rounds();
        if (!this.view || !all.length) return;
        const x = this.view.scale("x").invert(event.clientX - this.canvas.getBoundingClientRect().left - this.view.origin()[0]);
        place(all.reduce((best, round, i) => (Math.abs(round - x) < Math.abs(all[best] - x) ? i : best), 0));
      };
      plot.tabIndex = 0;
      const { first, last } = this.figure.values;
      for (const [name, value] of Object.entries({ now: last, min: first, max: last })) plot.setAttribute(`aria-value${name}`, value);
      plot.addEventListener("pointermove", point);
      plot.addEventListener("pointerdown", (event) => {
        plot.focus({ preventScroll: true });
        point(event);
      });
      // A finger leaves as soon as it is lifted; what it asked for stays until it touches something else.
      plot.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") place(-1); });
      plot.addEventListener("blur", () => place(-1));
      plot.addEventListener("keydown", (event) => {
        const end = rounds().length - 1;
        const to = { ArrowLeft: at < 0 ? end : Math.max(0, at - 1), ArrowRight: at < 0 ? 0 : Math.min(end, at + 1), Home: 0, End: end, Escape: -1 }[event.key];
        if (to === undefined) return;
        event.preventDefault();
        place(to);
      });
    }

    shown() {
      return page.data[this.figure.data].filter((row) => !this.hidden.hidden?.has(row.name));
    }

    rows(x) {
      const names = this.figure.legend.hidden || page.data[this.figure.data].map((row) => row.name);
      const colours = page.themes[theme()].range.category;
      const found = this.shown().map((row) => [row, row.x.indexOf(x)]).filter(([row, i]) => i >= 0 && row.y[i] !== null);
      found.sort(([a, i], [b, j]) => b.y[j] - a.y[i]);
      return found.map(([row, i]) => {
        const most = Array.isArray(row.seeds) ? Math.max(...row.seeds) : 0;
        const few = most && row.seeds[i] < most ? ` (${row.seeds[i]} of ${most} seeds)` : "";
        const spread = row.spread[i] === null ? "" : ` ±${format(row.spread[i], this.figure.percent)}`;
        return { name: row.name, colour: colours[names.indexOf(row.name) % colours.length], text: format(row.y[i], this.figure.percent) + spread + few };
      });
    }
  }

  /* Figures are drawn when they come near the window, and the rest when there is nothing else to do. */
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) entry.target.chart.draw();
  }, { rootMargin: "300px" });
  const waiting = () => [...charts].filter((chart) => !chart.drawing && chart.plot.isConnected);
  window.drawEverything = async () => {
    for (const details of document.querySelectorAll("details:not(.behind, .copies details)")) details.open = true;
    for (const chart of waiting()) await chart.draw();
    await Promise.all([...charts].map((chart) => chart.drawing));
    for (const chart of charts) chart.resize();
  };
  const idle = window.requestIdleCallback || ((later) => setTimeout(later, 200));
  const rest = () => idle(async () => {
    const [next] = waiting();
    if (next) await next.draw();
    if (waiting().length) rest();
  });

  // -- the page ---------------------------------------------------------------------------------------------------------
  function figureOf(number) {
    const figure = page.figures[number];
    const host = html("figure", {}, figure.title ? html("figcaption", {}, figure.title) : null);
    if (figure.kind === "table") host.append(tableOf(figure.columns, figure.rows, figure.title || "Table"), noteOf(figure));
    else host.chart = new Chart(host, figure);
    return host;
  }

  /* One of several figures, chosen by a list before it. */
  function chosen(host) {
    const numbers = JSON.parse(host.dataset.figures);
    const figure = figureOf(numbers[0]);
    host.append(figure);
    const select = host.parentElement.querySelector("select");
    select?.addEventListener("change", () => figure.chart.take(page.figures[numbers[select.value]]));
  }

  /* The figures of two runs beside each other, on the same axes: else they could not be compared. */
  function beside(host) {
    const runs = JSON.parse(host.dataset.runs);
    const selects = [...host.parentElement.querySelectorAll("select")];
    function show() {
      const picked = selects.filter((select) => select.value !== "").map((select) => runs[select.value]);
      for (const plot of host.querySelectorAll(".plot")) {
        plot.chart.view?.finalize();
        charts.delete(plot.chart);
      }
      host.classList.toggle("two", picked.length > 1);
      host.replaceChildren(...picked.map(({ name, figures }) => html("div", {}, runs.length > 1 ? html("h6", {}, name) : null, ...figures.map(figureOf))));
      picked.forEach(({ figures }, column) => figures.forEach((number, i) => {
        const twins = picked.map((run) => page.figures[run.figures[i]]).filter((twin) => twin && twin.kind === page.figures[number].kind && twin.values);
        const ends = {};
        for (const [pick, names] of [[Math.min, ["first", "low", "base"]], [Math.max, ["last", "high"]]]) {
          for (const name of names) if (twins.length > 1 && twins.every((twin) => name in twin.values)) ends[name] = pick(...twins.map((twin) => twin.values[name]));
        }
        host.children[column].querySelectorAll(":scope > figure")[i].chart?.take(page.figures[number], ends);
      }));
    }
    selects.forEach((select) => select.addEventListener("change", show));
    show();
  }

  function themeButton() {
    const button = document.getElementById("theme");
    const changed = () => {
      const other = theme() === "dark" ? "Light" : "Dark";
      button.textContent = other;
      root.classList.toggle("dark", theme() === "dark");
      button.setAttribute("aria-label", `Switch to ${other.toLowerCase()} colours`);
      for (const chart of charts) {
        chart.below();
        if (chart.drawing) chart.draw();
      }
    };
    try {
      const kept = localStorage.getItem("fedkeel-theme");
      if (kept === "light" || kept === "dark") root.dataset.theme = kept;
    } catch { /* a page opened from disk may have no storage */ }
    button.hidden = false;
    button.addEventListener("click", () => {
      root.dataset.theme = theme() === "dark" ? "light" : "dark";
      changed();
      try {
        localStorage.setItem("fedkeel-theme", root.dataset.theme);
      } catch { /* then it is forgotten with the page */ }
    });
    system.addEventListener("change", changed);
    changed();
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

  // For a page that grows, see watch.js.
  window.fedkeel = { page, html, tableOf, figureOf };
  // On paper nothing can be opened any more.
  addEventListener("beforeprint", () => window.drawEverything());
  themeButton();
  document.querySelectorAll("table.sortable").forEach(sortable);
  document.querySelectorAll(".code").forEach(copyButton);
  document.querySelectorAll("[data-js]").forEach((node) => { node.hidden = false; });
  document.querySelectorAll("[data-nojs]").forEach((node) => node.remove());
  document.querySelectorAll("[data-figures]").forEach(chosen);
  document.querySelectorAll("[data-runs]").forEach(beside);
  addEventListener("load", () => setTimeout(rest, 500));
})();
