// The table of workers: sorted, searched and paged here; rows are reused, so that the focus stays where it is.

import { element } from "./charts.js";
import { capital, figure, heading, measured, named, NONE, WORKER_STATES } from "./words.js";

const ROWS = 20;
const SLOW_TIMES = 3; // a report that takes so many times the median is slow

// Worst first: which way a column is sorted at first.
const FIRST = { id: 1, value: 1, loss: -1, weight: -1, first: 1, best: 1, first_weight: -1, records: 1, seconds: -1, state: 1 };
const TROUBLE_FIRST = { gone: 0, new: 1, late: 2, ready: 3, over: 4 };

export class Table {
  // choose(id): a worker has been chosen.
  constructor(choose) {
    this.choose = choose;
    this.column = null;
    this.way = 1;
    this.page = 0;
    this.rows = document.getElementById("rows");
    this.find = document.getElementById("find");
    this.only = document.getElementById("only");
    document.getElementById("tools").hidden = false;
    document.getElementById("tools").addEventListener("submit", (event) => event.preventDefault());
    for (const input of [this.find, this.only]) input.addEventListener("input", () => this.turn(0));
    document.getElementById("before").addEventListener("click", () => this.turn(this.page - 1));
    document.getElementById("after").addEventListener("click", () => this.turn(this.page + 1));
    for (const head of document.querySelectorAll("th[data-column]")) {
      const button = element("button", "", head.textContent);
      button.type = "button";
      button.addEventListener("click", () => this.sort(head.dataset.column));
      head.replaceChildren(button);
    }
  }

  take(table) {
    this.table = table;
    const reports = table.seconds.filter((value) => value != null).sort((one, other) => one - other);
    this.slowFrom = reports.length > 2 ? Math.max(1, SLOW_TIMES * reports[reports.length >> 1]) : Infinity;
    if (this.column === null) {
      this.column = "value";
      // With hidden losses nothing says who is served worst.
      if (document.body.dataset.losses === "hidden") this.column = "id";
      this.way = this.first(this.column);
    }
    const head = document.querySelector("th[data-column=value] button");
    if (head.textContent !== heading(table.rank_by)) head.textContent = heading(table.rank_by);
    this.show();
  }

  siteOf(worker) {
    return this.table?.site?.[this.table.id.indexOf(worker)];
  }

  first(column) {
    return ["value", "first", "best"].includes(column) && !this.table?.higher_is_better ? -1 : FIRST[column];
  }

  sort(column) {
    this.way = this.column === column ? -this.way : this.first(column);
    this.column = column;
    this.turn(0);
  }

  turn(page) {
    this.page = page;
    if (this.table) this.show();
  }

  isSlow(place) {
    return this.table.state[place] === "ready" && this.table.seconds[place] > this.slowFrom;
  }

  wanted() {
    const { id, site, state } = this.table;
    const asked = this.find.value.trim();
    const span = asked.match(/^(\d+)(?:\s*-\s*(\d+))?$/);
    const fits = (worker, name) =>
      !asked || name?.toLowerCase().includes(asked.toLowerCase()) || (span !== null && (span[2] === undefined ? worker === +span[1] : worker >= +span[1] && worker <= +span[2]));
    const places = [...id.keys()].filter(
      (place) => fits(id[place], site?.[place]) && (!this.only.value || state[place] === "gone" || state[place] === "new" || this.isSlow(place)),
    );
    const values = this.column === "state" ? state.map((name) => TROUBLE_FIRST[name]) : this.table[this.column];
    // What is not known comes last, either way; of equals, those that are served worse come first.
    return places.sort((one, other) => {
      if (values[one] == null || values[other] == null) return (values[one] == null) - (values[other] == null) || one - other;
      return this.way * (values[one] - values[other]) || one - other;
    });
  }

  show() {
    const places = this.wanted();
    const pages = Math.max(1, Math.ceil(places.length / ROWS));
    this.page = Math.min(pages - 1, Math.max(0, this.page));
    const shown = places.slice(this.page * ROWS, (this.page + 1) * ROWS);
    while (this.rows.children.length > shown.length) this.rows.lastChild.remove();
    shown.forEach((place, number) => this.fill(this.rows.children[number] ?? this.rows.appendChild(this.row()), place));
    for (const head of document.querySelectorAll("th[data-column]")) {
      if (head.dataset.column === this.column) head.setAttribute("aria-sort", this.way > 0 ? "ascending" : "descending");
      else head.removeAttribute("aria-sort");
    }
    const { workers, id } = this.table;
    const cut = id.length < workers ? ` (the ${id.length} that are served worst of ${workers})` : "";
    document.getElementById("found").textContent = `${places.length} of ${workers} workers${cut}`;
    document.getElementById("pages").hidden = pages === 1;
    document.getElementById("page").textContent = `page ${this.page + 1} of ${pages}`;
    document.getElementById("before").disabled = this.page === 0;
    document.getElementById("after").disabled = this.page === pages - 1;
  }

  row() {
    const row = element("tr");
    const head = element("th");
    head.scope = "row";
    const button = element("button");
    button.type = "button";
    button.addEventListener("click", () => this.choose(+row.dataset.worker));
    head.append(button);
    row.append(head, ...Array.from({ length: 9 }, () => element("td")));
    row.children[1].className = "of-worst";
    for (const place of [1, 2, 3, 4, 5, 6, 7]) row.children[place].classList.add("of-each");
    row.children[2].classList.add("of-loss");
    for (const place of [8, 9]) row.children[place].classList.add("live");
    return row;
  }

  fill(row, place) {
    const { id, site, rank_by: metric, value, loss, weight, first, best, best_round: round, first_weight: atFirst, records, seconds, state } = this.table;
    row.dataset.worker = id[place];
    row.toggleAttribute("aria-current", false);
    if (id[place] === this.chosen) row.setAttribute("aria-current", "true");
    row.firstChild.firstChild.textContent = site?.[place] ? `${id[place]} ${site[place]}` : id[place];
    row.firstChild.firstChild.setAttribute("aria-label", capital(named(id[place], site?.[place])));
    const cells = [
      measured(metric, value[place]),
      figure(loss[place]),
      figure(weight[place]),
      measured(metric, first[place]),
      best[place] == null ? NONE : `${measured(metric, best[place])} (${round[place]})`,
      figure(atFirst[place]),
      String(records[place] ?? NONE),
      seconds[place] == null ? NONE : seconds[place].toFixed(seconds[place] < 10 ? 3 : 1),
      this.isSlow(place) ? "ready, slow" : WORKER_STATES[state[place]],
    ];
    cells.forEach((text, number) => {
      if (row.children[number + 1].textContent !== text) row.children[number + 1].textContent = text;
    });
    const isTrouble = state[place] === "gone" || state[place] === "new" || this.isSlow(place);
    row.lastChild.classList.toggle("trouble", isTrouble);
  }
}
