// Numbers for people, in the units of `baton status` and `baton trace`.

const NONE = "–";

export const count = (n) => (n === null || n === undefined ? NONE : Math.round(n).toLocaleString("en"));

/** Milliseconds, in three figures. */
export function ms(n) {
  if (n === null || n === undefined) return NONE;
  if (n >= 100_000) return `${Math.round(n / 1000)} s`;
  if (n >= 1000) return `${(n / 1000).toFixed(n >= 10_000 ? 1 : 2)} s`;
  return `${n.toFixed(n >= 100 ? 0 : n >= 10 ? 1 : 2)} ms`;
}

export const us = (n) => (n === null || n === undefined ? NONE : ms(n / 1000));

export function bytes(n) {
  if (n === null || n === undefined) return NONE;
  for (const [unit, name] of [[1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) {
    if (n >= unit) return `${(n / unit).toFixed(n >= 100 * unit ? 0 : 1)} ${name}`;
  }
  return `${Math.round(n)} B`;
}

export const perSecond = (n) => (n === null || n === undefined ? NONE : n >= 1e3 ? count(n) : n.toFixed(n >= 100 ? 0 : 1));

/** A time in its largest unit. */
export function age(n) {
  if (n === null || n === undefined) return NONE;
  const s = n / 1000;
  if (s < 10) return `${s.toFixed(1)} s`;
  if (s < 120) return `${Math.floor(s)} s`;
  return s < 7200 ? `${Math.floor(s / 60)} min` : `${Math.floor(s / 3600)} h`;
}

export const clock = (unixMs) => new Date(unixMs).toLocaleTimeString("en-GB");
