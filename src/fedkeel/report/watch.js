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

  // -- what is told -----------------------------------------------------------------------------------------------------
  const MOST_CLIENTS = 200;
  const MOST_NOTES = 30;
  const percent = (share) => (100 * share).toFixed(1);
  const of = (runs, state) => runs.filter((run) => run.state === state).length;
  const everyone = (state) => Object.entries(state.sites || state.clients || {});

  function duration(seconds) {
    const [hours, minutes, rest] = [seconds / 3600, (seconds / 60) % 60, seconds % 60].map(Math.floor);
    const two = (number) => String(number).padStart(2, "0");
    return hours ? `${hours} h ${two(minutes)} min` : minutes ? `${minutes} min ${two(rest)} s` : `${rest} s`;
  }

  /* A sentence that changes when something has happened, and not with every second: it is read aloud. */
  function told(state) {
    const { runs } = state;
    if (state.state === "waiting") return runs.length ? `${runs.length} runs are planned, and none has begun yet.` : `This page waits. A run or a comparison with '--out ${state.directory}' is shown as soon as it begins.`;
    if (runs.length > 1) {
      const over = `${of(runs, "finished")} of ${runs.length} runs are finished`;
      const first = runs.find((run) => run.continue);
      if (state.state === "stopped") return `Stopped: ${over}; the command that began them again goes on with them${first ? `, and '${first.continue}' with the first of them alone` : ""}.`;
      return `${over}${of(runs, "running") ? `, ${of(runs, "running")} under way` : ""}.`;
    }
    const [run] = runs;
    if (run.state === "finished") return `Finished after ${run.rounds} rounds: ${percent(run.accuracy)} %.`;
    const reason = run.reason && run.reason !== "stopped" ? `: ${run.reason.replace(/\.$/, "")}` : "";
    if (run.state === "stopped") return `Stopped after ${run.round} of ${run.rounds} rounds${reason}. '${run.continue}' continues it.`;
    if (run.round) return `Round ${run.round} of ${run.rounds}.`;
    return state.sites ? `Waiting for sites; connected so far: ${everyone(state).filter(([, site]) => site.connected).length}.` : "It is being prepared.";
  }

  function training(run) {
    if (run.state !== "running" || !run.round) return "";
    const [done, clients] = run.clients;
    if (!clients) return ""; // of the first round, before anyone is done
    return done < clients ? `${done} of ${clients} clients have trained` : "averaging and testing";
  }

  /* A name, a number, and what to know of it. */
  function tilesOf(state) {
    const { runs } = state;
    const alone = runs.length === 1 ? runs[0] : null;
    const tiles = [];
    if (alone?.state === "running") tiles.push(["round", `${alone.round} of ${alone.rounds}`, training(alone)]);
    if (runs.length > 1) tiles.push(["runs finished", `${of(runs, "finished")} of ${runs.length}`, `${of(runs, "running")} under way`]);
    const [best] = runs.filter((run) => typeof run.accuracy === "number").sort((a, b) => b.accuracy - a.accuracy);
    if (best) tiles.push([`${alone ? "accuracy" : "highest accuracy"}${state.state === "finished" ? "" : " so far"}`, `${percent(best.accuracy)} %`, best.run]);
    if (state.state === "running") tiles.push(["time left", state.left === null ? "–" : duration(state.left), state.left === null ? "not known before the first round" : "if it goes on like the last rounds"]);
    const dropped = everyone(state).reduce((sum, [, one]) => sum + one.dropped, 0);
    if (dropped) tiles.push(["updates dropped", String(dropped), "see the table and the notes"]);
    return tiles;
  }

  function tablesOf(state) {
    const { runs } = state;
    const found = [];
    if (runs.length > 1) {
      const row = (run) => [run.run, run.state, run.rounds ? `${run.round} of ${run.rounds}` : null, typeof run.accuracy === "number" ? 100 * run.accuracy : null, typeof run.left === "number" ? duration(run.left) : null, training(run)];
      found.push({ title: "Runs", columns: ["run", "state", "round", "accuracy %", "time left", "now"], rows: runs.map(row), percent: true });
    }
    const all = everyone(state);
    if (!all.length) return found;
    const first = new Set([...all].sort(([, a], [, b]) => b.dropped - a.dropped).slice(0, MOST_CLIENTS).map(([name]) => name));
    const does = state.sites ? (one) => [one.connected ? "yes" : "no", one.state, one.at] : () => [];
    const row = ([name, one]) => [name, ...does(one), one.updates, one.dropped, one.loss, one.seconds === null ? null : Number(one.seconds.toPrecision(3)), one.reason];
    const columns = [state.sites ? "site" : "client", ...(state.sites ? ["connected", "last", "since"] : []), "updates", "dropped", "last loss", "last seconds", "last reason"];
    const note = all.length > first.size ? `${first.size} of ${all.length}` : "";
    found.push({ title: state.sites ? "Sites" : "Clients", columns, rows: all.filter(([name]) => first.has(name)).map(row), note });
    return found;
  }

  const noteOf = (state) => ({ at, run, text }) => `${at ? `${new Date(1000 * at).toLocaleTimeString()} ` : ""}${run && state.runs.length > 1 ? `${run}: ` : ""}${text}`;

  // -- tables ---------------------------------------------------------------------------------------------------------
  const tables = new Map();

  /* New rows in the table that is there, in the order that was asked for. */
  function fill({ title, columns, rows, note, percent: shares }) {
    const made = tableOf(columns, rows, note ? `${title}, ${note}` : title, shares);
    columns.forEach((_, i) => {
      if (!rows.some((row) => typeof row[i] === "number")) return;
      for (const cell of (tables.get(title) || made).querySelectorAll(`thead th:nth-child(${i + 1})`)) cell.classList.add("n");
      for (const cell of made.querySelectorAll(`tbody td:nth-child(${i + 1})`)) cell.classList.add("n");
    });
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

  function show(known) {
    const state = { ...known, tiles: tilesOf(known), tables: tablesOf(known), notes: known.notes.slice(-MOST_NOTES).reverse().map(noteOf(known)) };
    document.title = `${state.state === "running" ? `${Math.floor(100 * state.share)} %` : state.state} – ${state.title}`;
    say(at("title"), state.title);
    say(at("told"), told(known));
    say(at("place"), `Looking at '${state.directory}'. This page asks only the server on this machine that made it; 'fedkeel report ${state.directory}' writes what stays.`);
    at("share").value = state.share;
    at("report").hidden = !state.runs.some((run) => run.state !== "waiting");
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
