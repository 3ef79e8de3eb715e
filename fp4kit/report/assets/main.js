// The page, from top to bottom. What is read first is there first; pictures follow one by one.

/** The totals. */
function tiles() {
  const small = (text) => el("small", {}, text);
  const all = (of) => rows.reduce((sum, row) => sum + of(row), 0);
  if (isSurvey) {
    const chosen = report.chosen;
    return terms("tiles", [
      ["Tensors", [count(rows.length), small(count(report.tensors.length) + " surveyed, "
        + count(report.kept.length) + " kept")]],
      ["Candidates", [count(report.candidates.length), small(shown(report.candidates.join(", ")))]],
      ...(chosen ? [["Bits a surveyed weight", [digits(chosen.bits, 4), small("as chosen")]],
        ["Size", [size(chosen.total_nbytes), small("from " + size(all((row) => row.before)))]],
        ["Error", [digits(chosen.error) + " %", small(report.moments
          ? "relative RMS of the layers\u2019 outputs" : "relative RMS of the weights")]]] : []),
    ]);
  }
  const total = report.total;
  const done = rows.filter((row) => row.format);
  const found = [["Tensors", [count(rows.length), small(page.kind === "quantize"
    ? count(done.length) + " quantized, " + count(rows.length - done.length) + " kept"
    : count(done.length) + " stored as codes")]]];
  const [before, after] = [all((row) => row.before), all((row) => row.after)];
  if (page.kind === "verify") found.push(["Size", size(after)]);
  else {
    found.push(["Size", [size(after), small("from " + size(before)
      + (after ? ", ratio " + (before / after).toFixed(2) : ""))]]);
  }
  const weights = done.reduce((sum, row) => sum + row.elements, 0);
  if (weights) {
    const bits = 8 * done.reduce((sum, row) => sum + row.after, 0) / weights;
    found.push(["Bits a quantized weight", [bits.toFixed(2), small("scales included")]]);
  }
  if (total.stats) {
    found.push(["SQNR", [decibels(sqnrOf(total)) + (Number.isFinite(sqnrOf(total)) ? " dB" : ""),
      small("RMS error " + digits(total.stats.relative_rms) + " %")]]);
  }
  if (page.kind === "verify") found.push(["Faults", count(report.faults.length)]);
  return terms("tiles", found.map(([term, value]) => [term, value]));
}

/** A box of lines that want to be read; null without any. */
function lines(id, title, texts) {
  if (!texts || !texts.length) return null;
  return el("section", { "aria-labelledby": id }, el("h2", { id }, title),
    el("ul", { class: "warnings" }, texts.map((text) => el("li", {}, shown(text)))));
}

/** Error by layer and type of module, with what it shows to be chosen. */
function layersSection(later, width, search) {
  const measures = isSurvey ? surveyMeasures() : Object.entries(MEASURES)
    .filter(([, measure]) => measured.some((row) => measure.of(row) !== null));
  const section = el("section", { "aria-labelledby": "layers" }, el("h2", { id: "layers" }, "Error by layer and type"));
  if (!measured.length) {
    section.append(el("p", { class: "note" }, report.dry_run
      ? "A dry run computes nothing, so that no error is known."
      : page.kind === "verify" ? "No error is known: values are compared with --against." : "No tensor differs."));
    return section;
  }
  const choice = el("select", { id: "measure" },
    measures.map(([key, measure]) => el("option", { value: key }, measure.title)));
  const said = el("p", { class: "note", role: "status", "aria-live": "polite" });
  const figures = el("div");
  const inLayers = measured.filter((row) => row.layer !== null);
  const outside = measured.filter((row) => row.layer === null);

  async function show() {
    const measure = new Map(measures).get(choice.value);
    figures.replaceChildren();
    for (const [some, spec, title] of [
      [inLayers, heatmapSpec, null], [outside, barsSpec, "Tensors that stand in no layer"]]) {
      const cells = cellsOf(some, measure);
      if (!cells.length) continue;
      const { types, left } = typesOf(cells, measure);
      const figure = el("figure");
      const rest = left ? "The " + types.length + " worst of " + count(types.length + left)
        + " types; the table has all." : "";
      if (title || rest) figures.append(el("p", { class: "note" }, [title, rest].filter(Boolean).join(". ")));
      figures.append(figure);
      const drawn = chartCells(cells, types, measure);
      const view = await draw(figure, measure.title + (title ? "" : " by layer and type")
        + "; the table below has the numbers", spec(drawn, types, measure, width()));
      if (spec === heatmapSpec) {
        figure.after(said);
        walk(figure, view, drawn, types, said, search);
      }
      view.addEventListener("click", (event, item) => {
        if (item && item.datum && item.datum.key) goTo(item.datum, types, search);
      });
    }
  }
  choice.addEventListener("change", show);
  later.unshift(show);
  section.append(
    el("p", { class: "note" }, inLayers.length
      ? "A cell is the worst tensor of its layer and type. Click on one, or press Enter, "
        + "to see its tensors in the table; the arrow keys go from cell to cell."
      : "Click on a bar to see its tensors in the table."),
    el("div", { class: "tools" }, el("label", {}, "Colour", choice)), figures);
  return section;
}

/** What the heat map of a survey can show: the error of each candidate. */
function surveyMeasures() {
  return report.candidates.map((candidate) => [candidate, {
    title: "RMS error of " + shown(candidate) + ", %", span: 2, text: digits,
    of: (row) => row.errors[candidate]?.relative_rms,
  }]).filter(([candidate]) => measured.some((row) => row.errors[candidate]?.noise));
}

/** Shows the tensors of a cell in the table. */
function goTo(cell, types, search) {
  const layer = cell.layer === null ? "" : "layer:" + cell.layer + " ";
  search(layer + types[cell.row].toLowerCase().split(/\s+/).join(" "));
  document.getElementById("tensors").scrollIntoView();
  document.getElementById("query").focus({ preventScroll: true });
}

/** The keyboard in a heat map: arrows go from cell to cell, Enter shows the tensors. */
function walk(figure, view, cells, types, said, search) {
  const layers = [...new Set(cells.map((cell) => cell.layer))].sort((a, b) => a - b);
  const at = new Map(cells.map((cell) => [layers.indexOf(cell.layer) + "/" + cell.row, cell]));
  const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  let current = null;
  const go = (cell) => {
    current = cell;
    view.signal("chosen", cell ? cell.key : null).run();
    said.textContent = cell ? "Layer " + cell.layer + ", " + short(types[cell.row]) + ": "
      + Object.entries(cell.tip).map((pair) => pair.join(" ")).join(", ") : "";
  };
  figure.setAttribute("tabindex", 0);
  figure.setAttribute("aria-label", "Heat map; arrow keys go from cell to cell, Enter shows its tensors");
  figure.setAttribute("role", "group");
  figure.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && current) return goTo(current, types, search);
    if (!moves[event.key]) return;
    event.preventDefault();
    if (!current) return go(cells[0]);
    const [right, down] = moves[event.key];
    let [x, y] = [layers.indexOf(current.layer) + right, current.row + down];
    while (x >= 0 && x < layers.length && y >= 0 && y < types.length) {
      const next = at.get(x + "/" + y);
      if (next) return go(next);
      [x, y] = [x + right, y + down];
    }
  });
  figure.addEventListener("blur", () => go(null));
}

/** An earlier run beside this one; null without one. */
function beforeSection(later, width) {
  const before = page.before;
  if (!before) return null;
  const both = rows.filter((row) => row.change !== null);
  const change = (now, then, text, higherIsBetter) => {
    if (now === null || then === null || now === undefined || then === undefined) return el("td", {}, "");
    const kind = now === then ? null : (now > then) === higherIsBetter ? "better" : "worse";
    return el("td", { class: kind }, (now > then ? "+" : now < then ? "\u2212" : "") + text(Math.abs(now - then)));
  };
  const total = report.total;
  const now = total.stats;
  const lines = [
    ["Size of the tensors that differ", before.total.bytes_after, total.bytes_after, size, false],
    ["SQNR, dB", before.total.sqnr, now && now.sqnr, (value) => value.toFixed(2), true],
    ["RMS error, %", before.total.relative_rms, now && now.relative_rms, digits, false],
    ["Largest error", before.total.max_abs_error, now && now.max_abs_error, digits, false],
  ];
  const figure = el("figure");
  const most = [...both].sort((a, b) => Math.abs(b.change) - Math.abs(a.change)).slice(0, 1500);
  if (most.length) later.push(() => draw(figure, "SQNR before and after", changeSpec(most, width())));
  const better = both.filter((row) => row.change > 0).length;
  const worse = both.filter((row) => row.change < 0).length;
  const missing = before.tensors.filter((one) => one === null).length;
  return el("section", { "aria-labelledby": "before" },
    el("h2", { id: "before" }, "Before and after"),
    el("p", { class: "note" }, "Before: the report " + shown(before.path) + (before.target ? ", of " + shown(before.target) : "")
      + ". After: this run. " + counted(better, "tensor") + " better, " + count(worse) + " worse, "
      + count(both.length - better - worse) + " alike" + (missing ? "; " + counted(missing, "tensor") + " not in the earlier report" : "") + "."),
    el("div", { class: "scroll" }, el("table", {},
      el("thead", {}, el("tr", {}, ["", "Before", "After", "Change"].map((title) =>
        el("th", { scope: "col", style: "padding:.4rem .6rem", class: title ? null : "text" }, title)))),
      el("tbody", {}, lines.map(([title, then, value, text, higher]) => el("tr", {},
        el("th", { scope: "row", class: "text" }, title), el("td", {}, then === null ? "" : text(then)),
        el("td", {}, value === null || value === undefined ? "" : text(value)), change(value, then, text, higher)))))),
    most.length < both.length ? el("p", { class: "note" }, "Drawn: the 1,500 tensors that changed most.") : null,
    figure);
}

function changeSpec(some, width) {
  const [low, high] = extent(some.flatMap((row) => [row.was, row.sqnr]));
  const scale = { domain: [low, high], zero: false, nice: false, padding: 8 };
  const axis = (field, title) => ({ field, type: "quantitative", title, scale });
  const values = some.map((row) => ({
    was: row.was, now: row.sqnr, kind: row.change > 0 ? "better" : row.change < 0 ? "worse" : "alike",
    tip: { Tensor: short(row.name, 160), Before: decibels(row.was) + " dB", After: decibels(row.sqnr) + " dB" },
  }));
  const side = Math.max(220, Math.min(380, width - 220));
  return {
    width: side,
    height: side,
    layer: [
      {
        data: { values: [{ at: low }, { at: high }] },
        mark: { type: "line", color: "var(--muted)", strokeDash: [4, 4], strokeWidth: 1 },
        encoding: { x: axis("at", "SQNR before, dB"), y: axis("at", "SQNR after, dB") },
      },
      {
        data: { values },
        mark: { type: "point", filled: true, size: 40, opacity: 0.75, tooltip: { content: "data" } },
        encoding: {
          x: axis("was", "SQNR before, dB"),
          y: axis("now", "SQNR after, dB"),
          color: {
            field: "kind", type: "nominal", legend: { title: null },
            scale: { domain: ["better", "worse", "alike"], range: ["var(--better)", "var(--worse)", "var(--muted)"] },
          },
          shape: {
            field: "kind", type: "nominal", legend: { title: null },
            scale: { domain: ["better", "worse", "alike"], range: ["triangle-up", "triangle-down", "circle"] },
          },
        },
      },
    ],
  };
}

/** Members of an option that are shown one by one. */
const MOST_MEMBERS = 8;

/** How many of some values are alike: formats of a plan. */
function tally(values) {
  const counts = new Map();
  for (const value of values.map((one) => typeof one === "string" ? one : JSON.stringify(one))) {
    counts.set(value, (counts.get(value) ?? 0) + 1);
  }
  const most = [...counts].sort((a, b) => b[1] - a[1]).slice(0, MOST_MEMBERS);
  return count(values.length) + " entries: "
    + most.map(([value, many]) => count(many) + " " + short(value)).join(", ")
    + (counts.size > most.length ? ", \u2026" : "");
}

/** How the report came about. */
function originSection() {
  const option = (value) => {
    if (value === null || (Array.isArray(value) && !value.length)) return "none";
    if (value === true || value === false) return value ? "yes" : "no";
    if (typeof value === "object" && !Array.isArray(value) && Object.keys(value).length > MOST_MEMBERS) {
      return tally(Object.values(value));
    }
    return short(typeof value === "string" ? value : JSON.stringify(value), 2000);
  };
  const entries = (pairs) => Object.entries(pairs).flatMap(([term, value]) =>
    [el("dt", {}, shown(term)), el("dd", {}, option(value))]);
  return el("section", { "aria-labelledby": "origin" },
    el("h2", { id: "origin" }, "How it was made"),
    el("p", {}, el("code", {}, shown(page.command))),
    el("h3", {}, "Versions"), el("dl", { class: "origin" }, entries(page.versions)),
    el("h3", {}, "Options"), el("dl", { class: "origin" }, entries(report.options)));
}

const later = [];
const width = () => main.clientWidth;
const main = document.getElementById("page");
const table = tableSection();
const target = report.target ?? report.options.against ?? report.options.other;
main.replaceChildren(...[
  el("header", {}, el("h1", {}, shown(page.title)),
    el("p", { class: "path" }, shown(report.source) + (target ? (page.kind === "verify" ? " against " : " \u2192 ") + shown(target) : "")),
    el("p", { class: "note" }, "Written by fp4kit " + page.versions.fp4kit + ", " + page.created
      + (report.seconds ? ", after " + digits(report.seconds) + " s of work" : ""))),
  el("section", { "aria-label": "Summary" },
    el("ul", { class: "summary" }, page.summary.map((text) => el("li", {}, shown(text)))), tiles()),
  lines("faults", "Faults", report.faults),
  lines("warnings", "Warnings", [...(report.warnings ?? []), ...(report.notes ?? [])]),
  beforeSection(later, width),
  layersSection(later, width, table.search),
  worstSection(later),
  candidatesSection(later, width),
  table.section,
  originSection(),
].filter(Boolean));
const frontier = frontierSection(later, width);
if (frontier) main.querySelector("header + section").after(frontier);
document.addEventListener("keydown", (event) => { if (event.key === "Escape") showTip(null); });

// A picture at a time, so that the page answers between two.
(async () => {
  for (const drawOne of later) {
    await drawOne();
    await new Promise((done) => setTimeout(done));
  }
  document.documentElement.dataset.drawn = "yes";
})();
