// Numbers as people read them.

export const percent = (value) => `${(100 * value).toFixed(1)} %`;

export const figure = (value) => (value == null ? "—" : String(Number(value.toPrecision(4))));

export function bytes(count) {
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (count < 1000) return `${unit === "B" ? count : count.toPrecision(3)} ${unit}`;
    count /= 1000;
  }
  return `${count.toPrecision(3)} TB`;
}

export function seconds(count) {
  if (count == null) return "—";
  if (count < 60) return `${count < 10 ? count.toFixed(2) : count.toFixed(1)} s`;
  const minutes = Math.floor(count / 60);
  return minutes < 60 ? `${minutes} min ${Math.round(count % 60)} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

export const clock = (date) => date.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
