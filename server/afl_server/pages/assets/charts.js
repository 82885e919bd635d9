// Charts: uPlot's canvases, with keys to read values by, and words for who cannot see them.

/* global uPlot */

const HEIGHT = 190;
const LEAST_GAP_PX = 7; // restarts closer together than this would be a grey wall

// Of workers' weights: colours that differ in lightness too, and dashes. The worst worker has its own.
const LIGHT = ["#0a5a9c", "#1c6b45", "#6d3a9c", "#7a5c00", "#1b2027", "#00788a", "#a3195b"];
const DARK = ["#74b6f0", "#6fcf9b", "#c9a2f0", "#e8cf6a", "#e8eaed", "#5fd3e0", "#ff8fc0"];
const DASHES = [[7, 3], [2, 3], [10, 3, 2, 3], [], [7, 3], [2, 3], [10, 3, 2, 3]];

const dark = matchMedia("(prefers-color-scheme: dark)");

export function workerLook(place) {
  const colours = dark.matches ? DARK : LIGHT;
  return { color: colours[place % colours.length], dash: DASHES[place % DASHES.length] };
}

export function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

export class Chart {
  // shown(value): how a value is written; axis(value): likewise, where there is little room.
  constructor(figure, { shown, axis = shown, zero = false }) {
    this.figure = figure;
    this.shown = shown;
    this.axis = axis;
    this.zero = zero;
    this.plot = element("div", "plot empty");
    this.plot.textContent = "Nothing to draw yet.";
    this.keys = element("ul", "keys");
    this.note = element("p", "note");
    this.spoken = element("p", "said");
    this.spoken.setAttribute("aria-live", "polite");
    figure.querySelector("figcaption").after(this.plot, this.keys, this.note, this.spoken);
    this.plot.addEventListener("keydown", (event) => this.walk(event));
    new ResizeObserver(() => this.fit()).observe(this.plot);
    dark.addEventListener("change", () => {
      this.shape = "";
      if (this.last) this.draw(...this.last);
    });
  }

  // xs: rounds. lines: {label, values, color, dash, width, fill: another line's place, silent, first: in the key}.
  // about: a sentence for the whole chart. marks: rounds at which the dual weights began again.
  draw(xs, lines, { about, note = "", marks = [] }) {
    this.last = [xs, lines, { about, note, marks }];
    if (xs.length === 0) return;
    this.note.textContent = note;
    this.note.hidden = !note;
    this.lines = lines;
    this.marks = marks;
    const shape = JSON.stringify(lines.map((line) => [line.label, line.color, line.dash, line.width, line.fill]));
    const data = [xs, ...lines.map((line) => line.values)];
    if (this.shape === shape) {
      this.uplot.setData(data);
    } else {
      this.shape = shape;
      this.make(data);
    }
    this.plot.setAttribute("aria-label", `${about} Left and right arrow keys read single values.`);
    this.say();
  }

  make(data) {
    const isFocused = document.activeElement === this.plot;
    if (this.uplot) this.uplot.destroy();
    this.plot.textContent = "";
    this.plot.classList.remove("empty");
    this.plot.tabIndex = 0;
    this.plot.setAttribute("role", "img");
    const stroke = color("quiet");
    const grid = { stroke: color("line"), width: 1 };
    const ticks = { show: false };
    const font = `12px ${getComputedStyle(document.body).fontFamily}`;
    const few = data[0].length < 3;
    this.uplot = new uPlot(
      {
        width: Math.max(160, this.plot.clientWidth),
        height: HEIGHT,
        padding: [8, 20, 0, 0],
        legend: { show: false },
        cursor: { drag: { x: false, y: false }, points: { size: 7 }, y: false },
        scales: {
          x: { time: false, range: (_, low, high) => (low === high ? [low - 1, high + 1] : [low, high]) },
          y: { range: (_, low, high) => this.range(low, high) },
        },
        axes: [
          { stroke, grid: { show: false }, ticks, font, size: 26, values: (_, found) => found.map(rounded) },
          { stroke, grid, ticks, font, size: 58, values: (_, found) => found.map(this.axis) },
        ],
        series: [
          {},
          ...this.lines.map((line) => ({
            stroke: line.color,
            width: line.width ?? 1.5,
            dash: line.dash ?? [],
            spanGaps: true,
            pxAlign: 0,
            points: { show: few && !line.silent, size: 6, fill: line.color },
          })),
        ],
        bands: this.lines.flatMap((line, place) =>
          line.fill === undefined ? [] : [{ series: [place + 1, line.fill + 1], fill: line.tint ?? color("band") }],
        ),
        hooks: { drawClear: [(plot) => this.mark(plot)], setCursor: [() => this.say()] },
      },
      data,
      this.plot,
    );
    for (const canvas of this.plot.querySelectorAll("canvas")) canvas.setAttribute("aria-hidden", "true");
    if (isFocused) this.plot.focus();
  }

  range(low, high) {
    if (low === null || high === null) return [0, 1];
    if (this.zero) return [0, high > 0 ? high * 1.05 : 1];
    const spare = (high - low || Math.abs(high) || 1) * 0.08;
    return [low - spare, high + spare];
  }

  // Where the dual weights began again.
  mark(plot) {
    const visible = this.marks.filter((x) => x >= plot.scales.x.min && x <= plot.scales.x.max);
    if (visible.length === 0 || plot.bbox.width / devicePixelRatio / visible.length < LEAST_GAP_PX) return;
    const { ctx } = plot;
    ctx.save();
    ctx.strokeStyle = color("quiet");
    ctx.globalAlpha = 0.55;
    ctx.lineWidth = devicePixelRatio;
    ctx.setLineDash([2 * devicePixelRatio, 3 * devicePixelRatio]);
    for (const x of visible) {
      const at = Math.round(plot.valToPos(x, "x", true));
      ctx.beginPath();
      ctx.moveTo(at, plot.bbox.top);
      ctx.lineTo(at, plot.bbox.top + plot.bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  }

  place() {
    const place = this.uplot.cursor.idx;
    return place ?? this.uplot.data[0].length - 1;
  }

  // The key, with the values under the cursor, or the last ones.
  say() {
    if (!this.uplot) return;
    const place = this.place();
    const lines = this.lines.filter((line) => !line.silent).sort((one, other) => (other.first ?? 0) - (one.first ?? 0));
    while (this.keys.children.length > lines.length) this.keys.lastChild.remove();
    lines.forEach((line, number) => {
      const item = this.keys.children[number] ?? this.keys.appendChild(keyItem());
      swatch(item.firstChild, line);
      item.lastChild.textContent = `${line.label} ${written(line.values[place], this.shown)}`;
    });
  }

  walk(event) {
    if (!this.uplot) return;
    const xs = this.uplot.data[0];
    const steps = { ArrowLeft: -1, ArrowRight: 1, Home: -xs.length, End: xs.length };
    if (!(event.key in steps)) return;
    event.preventDefault();
    const place = Math.min(xs.length - 1, Math.max(0, this.place() + steps[event.key]));
    const top = this.lines.find((line) => line.values[place] != null);
    this.uplot.setCursor({
      left: this.uplot.valToPos(xs[place], "x"),
      top: top ? this.uplot.valToPos(top.values[place], "y") : 0,
    });
    const values = this.lines.filter((line) => !line.silent);
    this.spoken.textContent =
      `round ${xs[place]}: ` +
      values.map((line) => `${line.label} ${written(line.values[place], this.shown)}`).join(", ");
  }

  fit() {
    if (this.uplot && this.plot.clientWidth > 0 && this.plot.clientWidth !== this.uplot.width) {
      this.uplot.setSize({ width: this.plot.clientWidth, height: HEIGHT });
    }
  }
}

function written(value, shown) {
  return value == null ? "—" : shown(value);
}

function rounded(value) {
  if (!Number.isInteger(value)) return "";
  return value >= 1e6 ? `${value / 1e6}M` : value >= 1e4 ? `${value / 1e3}k` : String(value);
}

function keyItem() {
  const item = element("li");
  const canvas = element("canvas");
  canvas.width = 52;
  canvas.height = 20;
  canvas.setAttribute("aria-hidden", "true");
  item.append(canvas, element("span"));
  return item;
}

function swatch(canvas, line) {
  const look = line.color + line.dash;
  if (canvas.dataset.look === look) return;
  canvas.dataset.look = look;
  const pen = canvas.getContext("2d");
  pen.clearRect(0, 0, 52, 20);
  pen.strokeStyle = line.color;
  pen.lineWidth = 2 * (line.width ?? 1.5);
  pen.setLineDash((line.dash ?? []).map((length) => 2 * length));
  pen.beginPath();
  pen.moveTo(0, 10);
  pen.lineTo(52, 10);
  pen.stroke();
}

export function element(name, kind = "", text = "") {
  const made = document.createElement(name);
  if (kind) made.className = kind;
  if (text) made.textContent = text;
  return made;
}
