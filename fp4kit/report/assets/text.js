// Text for people. Names come from files that anyone may have written: whatever is shown goes
// through `shown`, and into the page as text, never as markup.

const HIDDEN = /[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Cn}\p{Zl}\p{Zp}]/gu;

/** Text with what cannot be seen, or turns the writing around, as escapes. */
function shown(text) {
  return String(text).replace(HIDDEN, (char) => {
    const code = char.codePointAt(0);
    const digits = code.toString(16);
    if (code < 0x100) return "\\x" + digits.padStart(2, "0");
    return code < 0x10000 ? "\\u" + digits.padStart(4, "0") : "\\u{" + digits + "}";
  });
}

/** A name in the length that an axis or a box has room for; its middle says least. */
function short(text, limit = 64) {
  const whole = shown(text);
  if (whole.length <= limit) return whole;
  const head = Math.ceil((limit - 1) / 2);
  return whole.slice(0, head) + "\u2026" + whole.slice(whole.length - (limit - 1 - head));
}

/** A count with thousands set apart. */
function count(number) {
  return number.toLocaleString("en");
}

/** `1 tensor`, `2 tensors`. */
function counted(number, what) {
  return count(number) + " " + what + (number === 1 ? "" : "s");
}

/** Bytes in the largest binary unit that leaves a whole part. */
function size(bytes) {
  if (bytes < 1024) return bytes + " B";
  let value = bytes;
  let unit = "";
  for (unit of ["KiB", "MiB", "GiB", "TiB"]) {
    value /= 1024;
    if (value < 1024) break;
  }
  return value.toFixed(1) + " " + unit;
}

/** A number in so many significant digits. */
function digits(value, many = 3) {
  if (value === null || value === undefined) return "";
  if (value !== 0 && (Math.abs(value) < 1e-4 || Math.abs(value) >= 1e6)) {
    return value.toExponential(many - 1);
  }
  return Math.abs(value) >= 10 ** many ? value.toFixed(0) : value.toPrecision(many);
}

/** A share of 1 in percent; a few in a million must not read as none. */
function percent(share) {
  if (share === null || share === undefined) return "";
  if (share > 0 && share < 5e-6) return "<0.001";
  return (100 * share).toFixed(share < 0.01 && share > 0 ? 3 : 2);
}

/** A signal to noise ratio in dB: Infinity is none at all, -Infinity one that is not finite. */
function decibels(value) {
  if (value === null || value === undefined) return "";
  if (value === Infinity) return "exact";
  return value === -Infinity ? "not finite" : value.toFixed(2);
}

/** An element with attributes and children; children that are strings become text. */
function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
}

/** A list of terms and what they are. */
function terms(kind, pairs) {
  return el("dl", { class: kind }, pairs.map(([term, value]) =>
    el("div", {}, el("dt", {}, term), el("dd", {}, value))));
}

/** A name that is folded behind its dots where it must be; one beyond reason is cut. */
function foldable(name, limit = 300) {
  return short(name, limit).split(/(?<=[./])/).flatMap((part) => [part, el("wbr")]);
}

const RAISED = "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079";

/** `2^-7` with its exponent set high. */
function raised(text) {
  return text.replace(/\^(-?)(\d+)/, (_, sign, number) =>
    (sign ? "\u207b" : "") + [...number].map((digit) => RAISED[digit]).join(""));
}
