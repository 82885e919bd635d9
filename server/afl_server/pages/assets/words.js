// What the page says, from the figures that the server sends.

export const NONE = "—"; // for what is not known

const PHASES = {
  waiting: "waiting for workers",
  running: "running",
  stalled: "waiting for a straggler",
  finished: "finished",
  stopped: "stopped, can be resumed",
  aborted: "ended early",
};

export const WORKER_STATES = { ready: "ready", late: "computing", gone: "not connected", new: "has not joined yet", over: "ended" };

export const percent = (value) => `${(100 * value).toFixed(1)} %`;

// Accuracies are shares; of other metrics nobody knows.
const isShare = (metric) => /^(held_out_)?accuracy$/.test(metric);

export const figure = (value) => (value == null ? NONE : String(Number(value.toPrecision(4))));

export const measured = (metric, value) => (value != null && isShare(metric) ? percent(value) : figure(value));

export const named = (worker, site) => `worker ${worker}${site ? ` (${site})` : ""}`;

export function bytes(count) {
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (count < 1000) return `${unit === "B" ? count : count.toFixed(2)} ${unit}`;
    count /= 1000;
  }
  return `${count.toFixed(2)} TB`;
}

export function seconds(count) {
  if (count == null) return NONE;
  if (count < 60) return `${count.toFixed(count < 10 ? 2 : 1)} s`;
  const minutes = Math.floor(Math.round(count) / 60);
  return minutes < 60 ? `${minutes} min ${Math.round(count) % 60} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

export const clock = (date) => date.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });

const grouped = (count) => String(count).replace(/\B(?=(\d{3})+$)/g, "\u202f");

function rate(value) {
  if (value == null) return NONE;
  if (value === 0) return "no round closes";
  return value < 1 ? `${(60 * value).toFixed(1)} rounds/min` : `${value.toFixed(1)} rounds/s`;
}

// How the worst worker is served, in one number; the mean; and how far apart they are.
function served(summary) {
  if (!summary) return [NONE, NONE, NONE];
  if (summary.smooth_worst_loss != null) {
    const { smooth_worst_loss: smooth, mean_loss: loss, mean_value: value, rank_by: metric } = summary;
    return [figure(smooth), metric === "loss" ? figure(loss) : `${measured(metric, value)}, loss ${figure(loss)}`, NONE];
  }
  const { rank_by: metric, worst_value: worst, mean_value: mean } = summary;
  const gap = worst == null || mean == null ? null : Math.abs(mean - worst);
  const apart = gap != null && isShare(metric) ? `${(100 * gap).toFixed(1)} points` : figure(gap);
  return [measured(metric, worst), measured(metric, mean), apart];
}

function measure(last) {
  if (!last) return "";
  if (last.smooth_worst_loss != null) return "smooth worst test loss";
  return place(last.rank_by);
}

// What was measured where: the metrics of held-out records say so by their names.
function place(metric) {
  return metric.startsWith("held_out_") ? metric.replaceAll("_", " ").replace("held out", "held-out") : `test ${metric}`;
}

export const capital = (words) => words[0].toUpperCase() + words.slice(1);

export const title = (metric) => capital(place(metric));

export const heading = (metric) => capital(place(metric).replace(/^test /, ""));

// By the name of its place in the page.
export function facts(state) {
  const { last, best } = state;
  const [worst, mean, gap] = served(last);
  const sent = state.up + state.down;
  return {
    ...state,
    title: `${worst} · ${state.task} · afl`,
    phase_words: PHASES[state.phase],
    round: grouped(state.round),
    rounds: grouped(state.rounds),
    percent: `${((100 * state.round) / state.rounds).toFixed(0)} %`,
    left: state.seconds_left ? seconds(state.seconds_left) : NONE,
    spent: seconds(state.seconds),
    rate: rate(state.rounds_a_second),
    ready: `${state.workers - state.missing_count} of ${state.workers}`,
    measure: measure(last),
    worst_figure: worst,
    worst_worker: last ? named(last.worst_worker, state.last_site) : "not evaluated yet",
    worst_round: last ? `after round ${grouped(last.round)}` : "",
    mean_figure: mean,
    gap,
    largest_loss: figure(last?.max_loss),
    own_metrics: state.own_metrics.replaceAll(", ", "\n"), // a line each
    worst_weight: state.worst_weight == null ? NONE : `${(state.worst_weight * state.workers).toFixed(2)} × even`,
    best_figure: served(best)[0],
    best_where: best ? `${best.worst_worker == null ? "" : `${named(best.worst_worker, state.best_site)}, `}round ${grouped(best.round)}` : "",
    bytes: bytes(sent),
    bytes_up: bytes(state.up),
    bytes_down: bytes(state.down),
    uncompressed: state.uncompressed ? bytes(state.uncompressed) : NONE,
    share: state.uncompressed ? `${((100 * sent) / state.uncompressed).toFixed(1)} % of it is sent` : "",
    paper: bytes(state.paper),
    ...integers(state.integers),
  };
}

// Of the last round's integer messages; empty where values are float32.
function integers(sent) {
  if (!sent) return { integer_bits: "", integer_shares: "" };
  const up = sent.uplink_bits == null ? "32 (float32)" : figure(sent.uplink_bits);
  return {
    integer_bits: `${up} up, ${figure(sent.downlink_bits)} down`,
    integer_shares: `${sent.of_update ? "of the update's, " : ""}${percent(sent.zeros)} are 0, ${percent(sent.at_limit)} the largest there is`,
  };
}
