// The connection to the server: a stream of states, and what becomes of it when it breaks.

const SILENCE_MS = 10_000; // the server sends a state every second
const FIRST_WAIT_MS = 1_000;
const LONGEST_WAIT_MS = 30_000;
const ASK_EVERY_MS = 5_000; // where the server has streams enough

export class Link {
  // heard(state): a state has come. ended(rest): the server ends, and this is what it would be asked for.
  // changed(kind, since, waitMs): "live", "asking", "over" or "lost".
  constructor(heard, ended, changed) {
    this.heard = heard;
    this.hasEnded = ended;
    this.changed = changed;
    this.wait = FIRST_WAIT_MS;
    this.lostAt = null;
    this.isOver = false;
    addEventListener("online", () => this.now());
    document.addEventListener("visibilitychange", () => {
      if (!document.hidden && this.source === null) this.now();
    });
    this.open();
  }

  // Try again at once.
  now() {
    if (this.source) return;
    this.wait = FIRST_WAIT_MS;
    this.open();
  }

  open() {
    clearTimeout(this.timer);
    const source = new EventSource("data/stream");
    this.source = source;
    source.addEventListener("state", (event) => {
      this.took(JSON.parse(event.data), "live");
      this.watch();
    });
    source.addEventListener("end", (event) => {
      this.hasEnded(JSON.parse(event.data));
      this.ended();
    });
    source.addEventListener("error", () => this.broke());
    this.watch();
  }

  watch() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.broke(), SILENCE_MS);
  }

  took(state, kind) {
    this.lostAt = null;
    this.isOver = false;
    this.wait = FIRST_WAIT_MS;
    this.changed(kind, null, 0);
    this.heard(state);
  }

  drop() {
    clearTimeout(this.timer);
    if (this.source) this.source.close();
    this.source = null;
  }

  // The server has said its last word; something may start it again.
  ended() {
    this.drop();
    this.isOver = true;
    this.wait = LONGEST_WAIT_MS;
    this.lostAt ??= new Date();
    this.later();
  }

  // The stream is gone. A server that answers all the same has streams enough, and is asked instead.
  async broke() {
    this.drop();
    try {
      const answer = await fetch("data/state.json", { cache: "no-store", signal: AbortSignal.timeout(SILENCE_MS) });
      if (!answer.ok) throw new Error(answer.statusText);
      this.took(await answer.json(), "asking");
      this.timer = setTimeout(() => this.open(), ASK_EVERY_MS);
    } catch {
      this.lostAt ??= new Date();
      this.later();
    }
  }

  later() {
    const wait = this.wait * (0.75 + 0.5 * Math.random());
    this.wait = Math.min(LONGEST_WAIT_MS, 2 * this.wait);
    this.changed(this.isOver ? "over" : "lost", this.lostAt, wait);
    this.timer = setTimeout(() => this.open(), wait);
  }
}
