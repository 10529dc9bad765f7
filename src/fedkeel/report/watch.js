/* Asks the server of `fedkeel watch` how far the runs are, again and again, and shows it: the curves by what page.js has
   for the figures of a report. A server that is gone is asked until it is there again.
   Text goes in by textContent only, so that a name is never read as markup. */
(() => {
  "use strict";
  const { page, html, tableOf, figureOf } = window.fedkeel;
  const at = (id) => document.getElementById(id);
  const say = (node, text) => { if (node.textContent !== text) node.textContent = text; };
  const same = (a, b) => JSON.stringify(a) === JSON.stringify(b);
  const LOST = "The server of this page does not answer: 'fedkeel watch' was ended, or this machine sleeps. What is shown is the last that is known; the page asks again by itself.";

  // -- curves -------------------------------------------------------------------------------------------------------
  let places = [];

  /* A figure of those to choose from; the choice stays when there is more to choose from. */
  function placeOf(name) {
    const place = { name, choices: [], select: html("select", { change: () => draw(place) }), host: html("div") };
    place.control = html("div", { class: "controls" }, html("label", {}, "Show ", place.select));
    place.node = html("div", {}, name ? html("h4", {}, name) : null, place.control, place.host);
    return place;
  }

  function draw(place) {
    const figure = place.choices[place.select.value][1];
    if (place.figure) place.figure.chart.grow(page.figures[figure]);
    else place.host.append((place.figure = figureOf(figure)));
  }

  function drawAll(charts) {
    if (!same(charts.map((chart) => chart.name), places.map((place) => place.name))) {
      places = charts.map((chart) => placeOf(chart.name));
      const two = html("div", { class: "beside two" }, ...places.map((place) => place.node));
      at("curves").replaceChildren(at("curves").firstElementChild, two);
      at("curves").hidden = !charts.length;
    }
    charts.forEach(({ choices }, i) => {
      const place = places[i];
      const names = choices.map(([name]) => name);
      if (!same(names, place.choices.map(([name]) => name))) {
        const before = place.choices[place.select.value]?.[0];
        place.select.replaceChildren(...names.map((name, n) => html("option", { value: n, selected: name === before }, name)));
        place.control.hidden = names.length < 2;
      }
      place.choices = choices;
      draw(place);
    });
  }

  // -- tables ---------------------------------------------------------------------------------------------------------
  const tables = new Map();

  /* New rows in the table that is there, in the order that was asked for. */
  function fill({ title, columns, rows, note }) {
    const made = tableOf(columns, rows, note ? `${title}, ${note}` : title);
    const known = tables.get(title);
    if (!known) {
      tables.set(title, made);
      at("tables").append(html("section", {}, html("h3", {}, title), made));
      return;
    }
    known.querySelector("tbody").replaceWith(made.querySelector("tbody"));
    const sorted = known.querySelector("th[aria-sort]");
    const order = sorted?.getAttribute("aria-sort");
    sorted?.removeAttribute("aria-sort");
    for (let turn = 0; sorted && sorted.getAttribute("aria-sort") !== order && turn < 2; turn += 1) sorted.querySelector("button").click();
  }

  // -- the whole --------------------------------------------------------------------------------------------------------
  let before = {};

  function show(state) {
    document.title = `${state.state === "running" ? `${Math.floor(100 * state.share)} %` : state.state} – ${state.title}`;
    say(at("title"), state.title);
    say(at("told"), state.told);
    say(at("place"), `Looking at ${state.directory}. This page asks only the server on this machine that made it; 'fedkeel report ${state.directory}' writes what stays.`);
    at("share").value = state.share;
    at("report").hidden = state.state === "waiting";
    if (!same(state.tiles, before.tiles)) at("tiles").replaceChildren(...state.tiles.map(([name, value, more]) => html("div", {}, html("dt", {}, name), html("dd", {}, html("b", {}, value), html("span", {}, more)))));
    const titles = state.tables.map((table) => table.title);
    if (!titles.every((title) => tables.has(title)) || tables.size !== titles.length) {
      tables.clear();
      at("tables").replaceChildren();
      before.tables = [];
    }
    state.tables.forEach((table, i) => { if (!same(table, before.tables?.[i])) fill(table); });
    if (!same(state.notes, before.notes)) at("notes").replaceChildren(...state.notes.map((note) => html("li", {}, note)));
    at("noted").hidden = !state.notes.length;
    before = state;
  }

  let drawn = "";
  async function ask(path) {
    const reply = await fetch(path, { cache: "no-store" });
    if (!reply.ok) throw new Error(reply.status);
    return reply.json();
  }

  async function look() {
    let again = 2;
    try {
      const state = await ask("state.json");
      again = state.again;
      say(at("lost"), state.problem);
      if (!state.problem) {
        if (state.figures !== drawn) {
          const figures = await ask("figures.json");
          Object.assign(page, figures);
          drawAll(figures.charts || []);
          drawn = state.figures;
        }
        show(state);
      }
    } catch {
      say(at("lost"), LOST);
    }
    at("lost").hidden = !at("lost").textContent;
    document.documentElement.dataset.looked = String(Number(document.documentElement.dataset.looked || 0) + 1);
    setTimeout(look, 1000 * again);
  }
  look();
})();
