// The table of all tensors: sorted by its headings, searched by words, a part of it at a time.

const PAGES = [100, 500];

/** Columns; `value` sorts, `text` is shown, `text: true` in `words` sets it to the left. */
function columnsOf() {
  const name = { title: "Tensor", kind: "name", value: (row) => row.name, text: (row) => row.label };
  const place = { title: "Layer", value: (row) => row.layer, text: (row) => row.layer ?? "" };
  const shape = { title: "Shape", value: (row) => row.elements, text: (row) => row.shape };
  const dtype = { title: "dtype", kind: "text", value: (row) => row.dtype };
  const before = { title: "Before", value: (row) => row.before, text: (row) => size(row.before) };
  if (isSurvey) {
    return [name, place, shape, dtype, before,
      { title: "Choice", kind: "text", value: (row) => row.choice },
      ...report.candidates.map((candidate) => ({
        title: candidate + " dB",
        value: (row) => row.sqnrs[candidate] ?? null,
        text: (row) => decibels(row.sqnrs[candidate]),
      })),
      { title: "Kept", kind: "words", value: (row) => row.what }];
  }
  return [name, place, shape, dtype,
    { title: "Format", kind: "text", value: (row) => row.format },
    before,
    { title: "After", value: (row) => row.after, text: (row) => size(row.after) },
    { title: "SQNR dB", value: (row) => row.sqnr, text: (row) => decibels(row.sqnr) },
    { title: "Earlier dB", value: (row) => row.was, text: (row) => decibels(row.was) },
    { title: "Change dB", value: (row) => row.change, kind: "change",
      text: (row) => row.change === null ? "" : (row.change > 0 ? "+" : "") + row.change.toFixed(2) },
    { title: "RMS error %", value: (row) => row.rms, text: (row) => digits(row.rms) },
    { title: "Max error", value: (row) => row.largest, text: (row) => digits(row.largest) },
    { title: "At max %", value: (row) => row.atMax, text: (row) => percent(row.atMax) },
    { title: "Flushed %", value: (row) => row.flushed, text: (row) => percent(row.flushed) },
    { title: "Subnormal %", value: (row) => row.subnormal, text: (row) => percent(row.subnormal) },
    { title: "What was done", kind: "words", value: (row) => row.what },
  ];
}

/** Whether a column says anything. */
function saysSomething(column) {
  return rows.some((row) => {
    const value = column.value(row);
    return value !== null && value !== undefined && value !== "";
  });
}

/** Orders values; what is missing comes last whatever the direction. */
function comparing(column, direction) {
  return (a, b) => {
    const [one, other] = [column.value(a) ?? null, column.value(b) ?? null];
    if (one === null || other === null) return (one === null) - (other === null) || a.index - b.index;
    const order = typeof one === "string" ? one.localeCompare(other, "en", { numeric: true })
      : one < other ? -1 : one > other ? 1 : 0;
    return direction * order || a.index - b.index;
  };
}

function cellOf(column, row) {
  const text = column.text ? column.text(row) : shown(column.value(row) ?? "");
  const kind = { name: "name text", text: "text", words: "words text" }[column.kind] ?? "";
  const change = column.kind === "change" && row.change ? (row.change > 0 ? "better" : "worse") : "";
  const title = column.kind === "name" && text.length > 300 ? text : null;
  return el("td", { class: kind || change || null, title },
    column.kind === "name" ? foldable(row.name) : String(text));
}

/** The section of the table; `table.search` filters it from elsewhere. */
function tableSection() {
  const columns = columnsOf().filter((column, index) => index === 0 || saysSomething(column));
  const words = new Map(rows.map((row) => [row, [row.name, row.type, row.format, row.dtype, row.shape,
    row.what, row.choice, "layer:" + row.layer].filter(Boolean).join(" ").toLowerCase()]));
  const state = { column: null, direction: 1, query: "", from: 0, size: PAGES[0], found: rows };

  const body = el("tbody");
  const said = el("p", { class: "note", role: "status", "aria-live": "polite", id: "found" });
  const query = el("input", { type: "search", id: "query", autocomplete: "off", spellcheck: "false",
    placeholder: "words of the name, format, dtype; layer:3" });
  const many = el("select", { id: "many" },
    PAGES.map((number) => el("option", { value: number }, String(number))), el("option", { value: rows.length }, "all"));
  const back = el("button", { type: "button", id: "back" }, "Previous");
  const on = el("button", { type: "button", id: "next" }, "Next");
  const headings = columns.map((column) => {
    const button = el("button", { type: "button" }, shown(column.title));
    const left = ["name", "text", "words"].includes(column.kind);
    const heading = el("th", { scope: "col", class: left ? "text" : null, "aria-sort": "none" }, button,
      el("span", { class: "paper", "aria-hidden": "true" }, shown(column.title)));
    button.addEventListener("click", () => {
      state.direction = state.column === column ? -state.direction : 1;
      state.column = column;
      for (const other of headings) other.setAttribute("aria-sort", "none");
      heading.setAttribute("aria-sort", state.direction > 0 ? "ascending" : "descending");
      state.from = 0;
      show();
    });
    return heading;
  });

  function show() {
    const asked = state.query.toLowerCase().split(/\s+/).filter(Boolean);
    state.found = rows.filter((row) => asked.every((word) => matches(words.get(row), word)));
    if (state.column) state.found.sort(comparing(state.column, state.direction));
    const end = Math.min(state.from + state.size, state.found.length);
    const part = state.found.slice(state.from, end);
    body.replaceChildren(...part.map((row) => el("tr", {}, columns.map((column) => cellOf(column, row)))));
    if (!part.length) {
      const why = rows.length ? "No tensor has all of these words." : "There are no tensors.";
      body.append(el("tr", {}, el("td", { class: "empty", colspan: columns.length }, why)));
    }
    const of = state.found.length === rows.length ? counted(rows.length, "tensor")
      : count(state.found.length) + " of " + counted(rows.length, "tensor");
    said.textContent = part.length < state.found.length
      ? of + ", rows " + count(state.from + 1) + " to " + count(end) : of;
    back.hidden = on.hidden = part.length === state.found.length;
    back.disabled = state.from === 0;
    on.disabled = end >= state.found.length;
  }

  /** `layer:3` is that layer and not the thirtieth. */
  function matches(text, word) {
    return word.startsWith("layer:") ? text.split(" ").includes(word) : text.includes(word);
  }

  const search = (text) => {
    query.value = text;
    state.query = text;
    state.from = 0;
    show();
  };
  query.addEventListener("input", () => search(query.value));
  many.addEventListener("change", () => { state.size = Number(many.value); state.from = 0; show(); });
  back.addEventListener("click", () => { state.from = Math.max(0, state.from - state.size); show(); });
  on.addEventListener("click", () => { state.from += state.size; show(); });
  show();

  const section = el("section", { "aria-labelledby": "tensors" },
    el("h2", { id: "tensors", tabindex: -1 }, "All tensors"),
    el("div", { class: "tools" },
      el("label", { class: "wide" }, "Search", query),
      el("label", {}, "Rows", many), back, on),
    said,
    el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Table of all tensors" },
      el("table", {}, el("thead", {}, el("tr", {}, headings)), body)));
  return { section, search };
}
