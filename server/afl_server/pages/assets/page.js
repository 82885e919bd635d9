// The status page: says what the server tells of its run, and draws the curves.

import { Chart, color, element, workerLook } from "./charts.js";
import { Link } from "./link.js";
import { Table } from "./table.js";
import { bytes, capital, clock, facts, figure, measured, named, NONE, seconds, title } from "./words.js";

const REFRESH_MS = 2_000; // between two looks at curves and table
const FEW = 6; // up to so many workers, each has a line of its own
const MORE_LINES = 3; // events of so many lines are folded

const saved = byId("saved") && JSON.parse(byId("saved").textContent); // a report has all documents in it
const page = { state: null, history: null, chosen: null, worker: null, span: "recent" };
const ranked = (value) => measured(page.history.rank_by, value);
const served = new Chart(byId("served"), { shown: ranked, axis: (value) => ranked(value).replace(".0 ", " ") });
const loss = new Chart(byId("loss"), { shown: figure });
const weights = new Chart(byId("weights"), { shown: figure, zero: true });
const wire = new Chart(byId("bytes"), { shown: bytes, axis: (value) => bytes(value).replace(".00 ", " "), zero: true });
const table = new Table((worker) => {
  location.hash = `worker=${worker}`;
});

function byId(id) {
  return document.getElementById(id);
}

async function ask(path) {
  if (saved) return saved[path] ?? saved.ending[path.match(/(\w+)\.json/)[1]] ?? null;
  const answer = await fetch(path, { cache: "no-store", signal: AbortSignal.timeout(10_000) });
  if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
  return answer.json();
}

// States.

function heard(state) {
  if (page.state && (state.run_id !== page.state.run_id || state.afl_version !== page.state.afl_version)) {
    location.reload(); // another run, or another version of this page
    return;
  }
  page.state = state;
  document.body.dataset.phase = state.phase;
  document.body.dataset.losses = state.hides_losses ? "hidden" : "shown";
  const words = facts(state);
  document.title = words.title;
  for (const place of document.querySelectorAll("[data-fact]")) {
    const text = words[place.dataset.fact];
    if (place.textContent !== text) place.textContent = text;
  }
  byId("progress").value = state.round / state.rounds;
  byId("worst-link").hash = state.last ? `worker=${state.last.worst_worker}` : "workers";
  renew();
}

let link = null;
const retry = byId("retry");
retry.addEventListener("click", () => link.now());

function linkChanged(kind, since, wait) {
  // A server that comes back may have as many events as were seen, and others.
  if (kind === "lost" || kind === "over") eventsSeen = null;
  const said = byId("link");
  const texts = {
    live: () => "live",
    asking: () => "every 5 s (many pages are open)",
    over: () => `the server has ended, ${clock(since)}`,
    lost: () => `connection lost since ${clock(since)}; next try in ${Math.max(1, Math.round(wait / 1000))} s`,
  };
  const text = texts[kind]();
  if (said.textContent !== text) said.textContent = text;
  said.classList.toggle("lost", kind === "lost");
  document.body.dataset.link = kind;
  retry.hidden = kind !== "lost" && kind !== "over";
}

// Curves, table and events follow the states, but not as often.

let renewedAt = -Infinity;
let drawnStamp = null;
let eventsSeen = null;
let isRenewing = false;
let renewTimer = null;
let endings = 0;

async function renew() {
  const { state } = page;
  const isOld = `${state.stamp} ${page.chosen}` !== drawnStamp;
  if (isRenewing || document.hidden || (!isOld && state.events === eventsSeen)) return;
  const wait = renewedAt + REFRESH_MS - performance.now();
  if (wait > 0) {
    clearTimeout(renewTimer);
    renewTimer = setTimeout(renew, wait);
    return;
  }
  isRenewing = true;
  renewedAt = performance.now();
  try {
    const { chosen } = page;
    const endedBefore = endings;
    const hasNews = state.events !== eventsSeen;
    const [workers, history, worker, events] = await Promise.all([
      isOld ? ask("data/workers.json") : null,
      isOld ? ask("data/history.json") : null,
      isOld && chosen !== null ? ask(`data/worker.json?id=${chosen}`) : null,
      hasNews ? ask("data/events.json") : null,
    ]);
    if (endings > endedBefore) return; // what came with the end is newer
    if (isOld) {
      // Documents are made every two seconds: these may be older than the state that they were asked for.
      drawnStamp = workers.stamp === history.stamp ? `${workers.stamp} ${chosen}` : null;
      if (chosen === page.chosen) page.worker = worker;
      take(workers, history);
    }
    if (hasNews) showEvents(events, state.events);
    performance.mark("drawn");
  } catch (error) {
    // The stream will tell whether the connection is lost; the next state asks again.
    document.body.dataset.failed = String(error);
  } finally {
    isRenewing = false;
  }
}

function take(workers, history) {
  page.history = history;
  table.take(workers);
  draw();
  describeChosen();
  document.body.dataset.drawn = String(history.round.at(-1) ?? 0);
}

// The server is about to go: what came with its last state is drawn at once, also where nobody looks.
function ended({ workers, history, events }) {
  endings += 1;
  clearTimeout(renewTimer);
  drawnStamp = `${page.state.stamp} ${page.chosen}`;
  take(workers, history);
  showEvents(events, page.state.events);
}

document.addEventListener("visibilitychange", () => {
  if (page.state) renew();
});

// Curves.

function draw() {
  const { history } = page;
  const hides = page.state.hides_losses;
  const { rank_by: metric } = history;
  document.body.dataset.ranked = metric;
  for (const place of document.querySelectorAll("[data-ranked-title]")) place.textContent = title(metric);
  // Where the loss ranks, one chart of it is enough.
  byId("loss").hidden = metric === "loss";
  drawServed(served, history.worst_value, history.mean_value, "value", metric, hides ? "smooth worst" : "worst");
  drawServed(loss, hides ? history.smooth_worst_loss : history.max_loss, history.mean_loss, "loss", "loss", hides ? "smooth worst" : "largest");
  if (!hides) drawWeights();
  drawBytes();
}

function chosenCurve(kind, rounds) {
  const { worker, history } = page;
  if (!worker?.curves) return [];
  // The two may be of different times.
  const values = new Map(worker[rounds].map((round, place) => [round, worker.curves[0][kind][place]]));
  const shown = history[rounds].map((round) => values.get(round) ?? null);
  return [{ label: named(worker.id, worker.site), values: shown, color: color("chosen"), width: 2, dash: [6, 3] }];
}

function drawServed(chart, worst, mean, kind, metric, name) {
  const shown = (value) => measured(metric, value);
  const { history } = page;
  const hides = page.state.hides_losses;
  const xs = history.evaluation_round;
  const lines = [];
  if (!hides && history.workers > FEW) {
    const [lowest, quarter, threeQuarters, highest] = history.spread[kind];
    lines.push({ label: "highest", values: highest, color: color("others"), width: 0.75, silent: true, fill: 1, tint: color("band") });
    lines.push({ label: "lowest", values: lowest, color: color("others"), width: 0.75, silent: true });
    lines.push({ label: "upper", values: threeQuarters, color: color("others"), width: 0, silent: true, fill: 3, tint: color("half") });
    lines.push({ label: "lower", values: quarter, color: color("others"), width: 0, silent: true });
  } else {
    for (const curve of history.curves) {
      lines.push({ label: named(curve.worker, curve.site), values: curve[kind], color: color("others"), width: 1, silent: true });
    }
  }
  if (mean.some((value) => value != null)) lines.push({ label: "mean", values: mean, color: color("mean"), width: 1.5, dash: [7, 3] });
  const isKnown = !hides || worst.some((value) => value != null);
  if (isKnown) lines.push({ label: name, values: worst, color: color("worst"), width: 2.5, first: 1 });
  if (!hides) lines.push(...chosenCurve(kind, "evaluation_round"));
  const last = worst.at(-1);
  const usual = mean.at(-1) ?? last;
  const said = last == null ? "" : ` The ${name} is ${shown(last)}${hides ? "" : `, of ${named(history.worst_worker.at(-1), history.worst_site)}`}; the mean is ${shown(usual)}.`;
  const all = hides && usual != null ? ` The mean is ${shown(usual)}.` : "";
  const every = history.evaluations_a_point;
  chart.draw(xs, lines, {
    about: said || all ? `${title(metric)} over the rounds.${said || all}` : `No ${metric} yet.`,
    note: [
      every > 1 ? `every ${every}th evaluation` : "",
      history.block && xs.length ? `the last one ${(xs.at(-1) - 1) % history.block + 1} rounds after a restart, of ${history.block}` : "",
      hides ? "" : history.workers > FEW ? "in grey: all workers, and the middle half of them" : "in grey: each worker",
    ].filter(Boolean).join("; "),
  });
}

function drawWeights() {
  const { history, span } = page;
  const isRecent = span === "recent";
  const xs = isRecent ? history.recent_round : history.round;
  const lines = [];
  const worst = page.state?.last?.worst_worker;
  history.curves.forEach((curve, place) => {
    const look = curve.worker === worst ? { color: color("worst"), dash: [] } : workerLook(place);
    const label = named(curve.worker, curve.site);
    if (isRecent) {
      lines.push({ label, values: curve.recent_weight, ...look });
    } else {
      lines.push({ label, values: curve.weight_high, ...look, fill: lines.length + 1, tint: `${look.color}22` });
      lines.push({ label, values: curve.weight_low, ...look, width: 0, silent: true });
    }
  });
  if (!history.follows) lines.push({ label: "largest", values: history.weight_max, color: color("worst"), width: 2 });
  const even = 1 / history.workers;
  lines.push({ label: "even", values: xs.map(() => even), color: color("quiet"), width: 1, dash: [2, 4] });
  if (!history.curves.some((curve) => curve.worker === page.chosen)) {
    lines.push(...chosenCurve(isRecent ? "recent_weight" : "weight_high", isRecent ? "recent_round" : "round"));
  }
  const marks = [];
  if (history.block && xs.length) {
    const first = Math.floor((xs[0] - 1) / history.block);
    const count = Math.ceil((xs.at(-1) - xs[0]) / history.block) + 1;
    if (count < 400) for (let k = Math.max(1, first); k <= first + count; k++) marks.push(k * history.block + 1);
  }
  const notes = [];
  if (history.block) notes.push(`Restarts to even weights every ${history.block} rounds${marks.length ? " (dotted)" : ""}`);
  if (!isRecent && history.rounds_a_point > 1) notes.push(`least to largest of ${history.rounds_a_point} rounds each`);
  if (history.workers > FEW && history.curves.length) notes.push(`the worst worker and ${history.curves.length - 1} of the heaviest of ${history.workers}`);
  const heaviest = history.curves
    .map((curve) => [(isRecent ? curve.recent_weight : curve.weight_high).at(-1), named(curve.worker, curve.site)])
    .filter(([weight]) => weight != null)
    .sort((one, other) => other[0] - one[0])[0];
  weights.draw(xs, lines, {
    about: heaviest ? `Dual weights over the rounds. ${capital(heaviest[1])} has ${figure(heaviest[0])}; even weights would be ${figure(even)}.` : "Dual weights over the rounds.",
    note: notes.join("; "),
    marks,
  });
}

function drawBytes() {
  const { history } = page;
  const lines = [{ label: "sent", values: history.bytes, color: color("mean"), width: 2.5 }];
  if (history.uncompressed) lines.push({ label: "uncompressed", values: history.uncompressed, color: color("quiet"), width: 1.5, dash: [7, 3] });
  const sent = history.bytes.at(-1);
  wire.draw(history.round, lines, {
    about: sent == null ? "Nothing sent yet." : `Bytes over the rounds: ${bytes(sent)} sent${history.uncompressed ? `, where uncompressed training would have sent ${bytes(history.uncompressed.at(-1))}` : ""}.`,
  });
}

for (const button of document.querySelectorAll("[data-span]")) {
  button.addEventListener("click", () => {
    page.span = button.dataset.span;
    for (const other of document.querySelectorAll("[data-span]")) other.setAttribute("aria-pressed", String(other === button));
    if (page.history) drawWeights();
  });
}

// One worker.

function hashChanged() {
  const asked = location.hash.match(/^#worker=(\d+)$/);
  page.chosen = table.chosen = asked ? +asked[1] : null;
  page.worker = null;
  byId("worker").hidden = page.chosen === null;
  if (page.chosen !== null) {
    byId("worker-title").textContent = capital(named(page.chosen, table.siteOf(page.chosen)));
    byId("worker-facts").textContent = "";
    byId("worker").scrollIntoView({ block: "nearest" });
    byId("worker").focus({ preventScroll: true });
  }
  if (page.history) draw();
  if (table.table) table.show();
  renewedAt = -Infinity;
  if (page.state) renew();
}

function describeChosen() {
  const { worker } = page;
  if (!worker) return;
  byId("worker-title").textContent = capital(named(worker.id, worker.site));
  const facts = [];
  for (const [name, value] of Object.entries(worker.metrics)) facts.push([title(name), measured(name, value)]);
  if (!page.state.hides_losses) {
    facts.push(["Test examples", worker.examples ?? NONE], ["Minibatch loss", figure(worker.train_loss)]);
    facts.push(["Dual weight", figure(worker.weight)]);
  }
  facts.push(["Last report after", seconds(worker.seconds)]);
  if (saved) facts.splice(facts.findIndex(([name]) => name === "Last report after"), 1);
  else if (worker.peer) facts.push(["Connected from", decodeURIComponent(worker.peer.replace(/^ipv[46]:/, ""))], ["Ready for", seconds(worker.ready_seconds)], ["Version of afl", worker.version], ["Workers on this connection", worker.hosted_with]);
  else facts.push(["Not connected for", worker.missing_seconds === null ? "has not joined yet" : seconds(worker.missing_seconds)]);
  const list = byId("worker-facts");
  const rows = facts.map(([name, value]) => {
    const row = element("div");
    row.append(element("dt", "", name), element("dd", "", String(value)));
    return row;
  });
  list.replaceChildren(...rows);
}

byId("leave").addEventListener("click", () => {
  history.replaceState(null, "", location.pathname + location.search);
  hashChanged();
  byId("workers").focus({ preventScroll: true });
});
addEventListener("hashchange", hashChanged);

// Events.

function showEvents(events, count) {
  const items = events.map((event) => {
    const item = element("li", event.level);
    const time = element("time", "", clock(new Date(1000 * event.time)));
    time.dateTime = new Date(1000 * event.time).toISOString();
    const told = element("div");
    told.append(element("b", "", event.name.replaceAll("_", " ")));
    const lines = event.message.trimEnd().split("\n");
    if (lines.length > MORE_LINES) {
      const more = element("details");
      more.dataset.number = event.number;
      more.append(element("summary", "", lines[0]), element("pre", "", lines.slice(1).join("\n")));
      told.append(" ", more);
    } else {
      told.append(` ${event.message}`);
    }
    item.append(time, told);
    return item;
  });
  // What was unfolded stays so.
  const unfolded = new Set([...byId("events").querySelectorAll("details[open]")].map((details) => details.dataset.number));
  byId("events").replaceChildren(...items);
  for (const details of byId("events").querySelectorAll("details")) details.open = unfolded.has(details.dataset.number);
  eventsSeen = count;
}

hashChanged();
if (saved) {
  page.span = "whole";
  document.body.dataset.link = "report";
  heard(saved.state);
  ended(saved.ending);
} else {
  link = new Link(heard, ended, linkChanged);
}
