/* Has Vega-Embed draw the figures of a Fedkeel report from their descriptions in the page, shows their numbers, and
   makes tables sortable. Text goes in by textContent, so that a name is never read as markup. */
"use strict";
const page = JSON.parse(document.getElementById("numbers").textContent);
const root = document.documentElement;
const system = matchMedia("(prefers-color-scheme: dark)");
const theme = () => root.dataset.theme || (system.matches ? "dark" : "light");
const all = (selector, place = document) => [...place.querySelectorAll(selector)];

function element(tag, attributes = {}, ...children) {
  const node = Object.assign(document.createElement(tag), attributes);
  node.append(...children);
  return node;
}

function sortable(table) {
  const heads = [...table.tHead.rows[0].cells];
  const body = table.tBodies[0];
  heads.forEach((head, column) => {
    const value = (row) => row.cells[column].dataset.v ?? row.cells[column].textContent;
    if ([...body.rows].some((row) => row.cells[column].className === "n")) head.className = "n";
    const button = element("button", { type: "button", title: "Sort by this column" }, ...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const rows = [...body.rows];
      const numeric = rows.every((row) => value(row) === "" || !Number.isNaN(parseFloat(value(row))));
      // Numbers from the largest: what one looks for in a table of accuracies.
      const [first, other] = numeric ? ["descending", "ascending"] : ["ascending", "descending"];
      const order = head.getAttribute("aria-sort") === first ? other : first;
      heads.forEach((each) => each.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", order);
      rows.sort((a, b) => value(a).localeCompare(value(b), "en", { numeric: true }));
      if (numeric) rows.sort((a, b) => (parseFloat(value(a)) || 0) - (parseFloat(value(b)) || 0));
      body.append(...(order === "ascending" ? rows : rows.reverse()));
    });
  });
}

function tableOf(columns, rows) {
  const text = (value) => (typeof value === "number" ? String(Number(value.toPrecision(5))) : value ?? "–");
  const cell = (value, i) => element(i ? "td" : "th", { className: i && typeof value === "number" ? "n" : "" }, text(value));
  const head = element("tr", {}, ...columns.map((name) => element("th", { scope: "col" }, name)));
  const body = rows.map((row) => element("tr", {}, ...row.map(cell)));
  const table = element("table", {}, element("thead", {}, head), element("tbody", {}, ...body));
  sortable(table);
  return element("div", { className: "scroll", tabIndex: 0 }, table);
}

/* From the same columns that Vega draws. */
function numbersOf({ data: { values }, usermeta }) {
  const places = [...new Set(values.flatMap((row) => row.x))];
  const cell = (row, x) => {
    const i = row.x.indexOf(x);
    const spread = row.spread?.[i] ?? null;
    return spread === null ? row.y[i] ?? null : `${row.y[i]} ±${spread}`;
  };
  if (!usermeta?.x) return tableOf(["", ...places], values.map((row) => [row.name, ...places.map((x) => cell(row, x))]));
  const names = values.map((row) => row.name);
  return tableOf([usermeta.x, ...names], places.sort((a, b) => a - b).map((x) => [x, ...values.map((row) => cell(row, x))]));
}

/* Unpacked when the first figure comes into view. The page's policy knows the script by its hash. */
async function unpack() {
  const packed = Uint8Array.from(atob(document.getElementById("vega").textContent), (letter) => letter.charCodeAt(0));
  const text = new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  document.head.append(element("script", {}, await text));
}

let vega = null;
const draw = (host) => (host.drawing = Promise.resolve(host.drawing).then(() => embed(host))); // one after the other
async function embed(host) {
  near.unobserve(host);
  const { spec } = page.figures[host.dataset.figure];
  host.style.maxWidth = spec.usermeta?.widest ? `${spec.usermeta.widest}px` : "";
  await (vega ??= unpack());
  // `ast`: expressions are read by an interpreter, since the page's policy lets no text become code.
  const told = { mode: "vega-lite", renderer: "svg", logLevel: 1, ast: true, config: page.themes[theme()], defaultStyle: false,
    tooltip: { disableDefaultStyle: true }, actions: { export: true, source: false, compiled: false, editor: false } };
  host.view = (await vegaEmbed(host, structuredClone(spec), told)).view; // Vega changes the rows that it is given
}
const near = new IntersectionObserver((seen) => seen.forEach((one) => one.isIntersecting && draw(one.target)), { rootMargin: "300px" });

function figure(number) {
  const { spec, title, columns, rows, note } = page.figures[number];
  const below = note ? [element("p", { className: "note" }, note)] : [];
  if (!spec) return element("figure", {}, element("figcaption", {}, title), tableOf(columns, rows), ...below);
  const host = element("div", { className: "chart" });
  host.dataset.figure = number;
  near.observe(host);
  if (Array.isArray(spec.data.values[0]?.x)) {
    const details = element("details", { className: "behind" }, element("summary", {}, "The numbers"));
    details.addEventListener("toggle", () => details.open && details.replaceChildren(details.firstChild, numbersOf(page.figures[number].spec)));
    below.push(details);
  }
  return element("figure", {}, host, ...below);
}

/* Figures that are chosen by a list above them. */
function choose(choice) {
  const [select, place] = all("select, .figures", choice);
  const show = () => {
    all(".chart", place).forEach((host) => host.view?.finalize());
    place.replaceChildren(...select.value.split(" ").map(figure));
  };
  select.addEventListener("change", show);
  show();
}

function wire(place) {
  all("table", place).forEach(sortable);
  all("[data-js]", place).forEach((node) => { node.hidden = false; });
  all(".choice", place).forEach(choose);
}

function colours(chosen) {
  if (chosen) root.dataset.theme = chosen;
  document.getElementById("theme").textContent = theme() === "dark" ? "Light" : "Dark";
  all(".chart").filter((host) => host.drawing).forEach(draw);
}
document.getElementById("theme").addEventListener("click", () => colours(theme() === "dark" ? "light" : "dark"));
system.addEventListener("change", () => colours());
wire(document);
colours();

/* `fedkeel watch`: what has changed comes from the server; of the same figures only the numbers, so that a zoom and what
   was chosen in a legend stay. */
async function look(known = {}) {
  const lost = document.getElementById("lost");
  let state = known;
  try {
    state = await (await fetch(`state.json?${known.drawn ?? ""}`)).json();
    lost.textContent = state.problem;
    if (state.status !== known.status) document.getElementById("status").innerHTML = state.status; // escaped
    page.figures = state.figures ?? page.figures;
    if (state.parts !== known.parts) {
      const parts = document.getElementById("parts");
      parts.innerHTML = state.parts;
      wire(parts);
    } else if (state.figures) {
      const rows = (host) => structuredClone(page.figures[host.dataset.figure].spec.data.values);
      all(".chart").forEach((host) => host.view?.data("given", rows(host)).runAsync());
    }
    document.title = document.querySelector("h1").textContent = state.title;
  } catch {
    lost.textContent = "The server of this page does not answer: 'fedkeel watch' was ended, or this machine sleeps.";
  }
  lost.hidden = lost.textContent === "";
  setTimeout(() => look(state), 1000 * (state.again ?? 2));
}
if (document.getElementById("status")) look();
