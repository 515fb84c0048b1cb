/* Elements of a page, and what is written in them. What strangers wrote comes on a page through
   `visible` and textContent alone. */

export const get = (id) => document.getElementById(id);

export function element(tag, className = "", text = "", more = {}) {
  return Object.assign(document.createElement(tag), {className, textContent: text, ...more});
}

export function tell(target, text) {
  if (target.textContent !== text) target.textContent = text;
}

/** What a stranger wrote, cut, with all that is invisible or reorders shown as its number. */
export function visible(text, most = 200) {
  const characters = [...String(text).slice(0, 2 * most)];
  const cut = characters.length > most || String(text).length > 2 * most;
  return escaped(characters.slice(0, most).join("")) + (cut ? "…" : "");
}

export function escaped(text) {
  return text.replace(/[\p{C}\p{Zl}\p{Zp}]/gu, (c) =>
    `⟨U+${c.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`);
}

/** Three digits of it are enough. */
export function figure(x) {
  if (!Number.isFinite(x)) return "–";
  if (Number.isInteger(x) || x >= 100) return Math.round(x).toLocaleString("en");
  return x.toFixed(x >= 10 ? 1 : 2);
}

/** A share in percent; with more digits where it would be shown as 0 or as 100 and is neither. */
export function percent(share, digits = 0) {
  const text = (100 * share).toFixed(digits), part = share > 1e-11 && share < 1 - 1e-11;
  return part && [0, 100].includes(Number(text)) ? percent(share, digits + 1) : `${text}%`;
}

export function duration(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  return seconds < 1 ? `${figure(seconds * 1000)} ms` : `${figure(seconds)} s`;
}

export const count = (n, what) => `${figure(n)} ${what}${n === 1 ? "" : "s"}`;
export const clamp = (x, least, most) => Math.max(least, Math.min(x, most));
