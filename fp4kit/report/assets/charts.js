// Charts: Vega-Lite specifications, drawn as SVG. Colours are variables of the style sheet, so that
// dark and light and paper need no second drawing.

const FONT = 'system-ui, "Segoe UI", "DejaVu Sans", sans-serif';
const CONFIG = {
  background: "transparent",
  font: FONT,
  view: { stroke: null },
  axis: {
    labelColor: "var(--ink)", titleColor: "var(--muted)", titleFontWeight: "normal",
    domainColor: "var(--line)", tickColor: "var(--line)", gridColor: "var(--grid)",
    labelFontSize: 11, titleFontSize: 12,
  },
  legend: {
    labelColor: "var(--ink)", titleColor: "var(--muted)", titleFontWeight: "normal",
    labelFontSize: 11, titleFontSize: 12,
  },
};

const tip = document.getElementById("tip");

/** Shows pairs of terms and values beside the pointer, or nothing. */
function showTip(value, x, y) {
  tip.hidden = !value;
  if (!value) return;
  tip.replaceChildren(...Object.entries(value).map(([term, text]) =>
    el("div", {}, el("b", {}, shown(term)), shown(text))));
  const box = tip.getBoundingClientRect();
  tip.style.left = Math.max(4, Math.min(x + 14, innerWidth - box.width - 4)) + "px";
  tip.style.top = (y + 18 + box.height > innerHeight ? Math.max(4, y - box.height - 10) : y + 18)
    + "px";
}

/** Draws a chart in a figure; the promise gives its view. */
async function draw(place, label, spec) {
  const { view } = await vegaEmbed(place, { ...spec, autosize: "pad" }, {
    mode: "vega-lite",
    renderer: "svg",
    actions: false,
    defaultStyle: false,
    ast: true, // expressions are interpreted: the page's policy forbids to make code of text
    config: CONFIG,
    tooltip: (handler, event, item, value) => 
      showTip(value ? item.datum.tip : null, event.clientX, event.clientY),
  });
  const drawn = place.querySelector("svg");
  drawn.setAttribute("role", "img");
  drawn.setAttribute("aria-label", label);
  return view;
}

/**
 * What a heat map can show of a tensor. `low`: the lowest of a cell is its worst. `span`: what
 * differs by less has no colours that differ much, so that ordinary tensors raise no alarm.
 */
const MEASURES = {
  sqnr: { title: "SQNR, dB", low: true, span: 2, text: decibels, of: (row) => row.sqnr },
  rms: { title: "RMS error, %", span: 2, text: digits, of: (row) => row.rms },
  atMax: { title: "codes at max, %", text: percent, of: (row) => row.atMax, share: true, span: 0.05 },
  flushed: { title: "block scales flushed to 0, %", text: percent, of: (row) => row.flushed, share: true, span: 0.05 },
  subnormal: { title: "block scales subnormal, %", text: percent, of: (row) => row.subnormal, share: true, span: 0.05 },
  change: { title: "change of SQNR, dB", low: true, span: 1, text: (value) => value.toFixed(2), of: (row) => row.change },
};

/** Types that a chart has rows for: those with the worst values. */
const MOST_TYPES = 40;

/** One cell for each layer and type, with the worst of its tensors. */
function cellsOf(some, measure) {
  const cells = new Map();
  for (const row of some) {
    const value = measure.of(row);
    if (value === null || value === undefined) continue;
    const key = row.layer + "/" + row.type;
    const cell = cells.get(key);
    if (!cell) {
      cells.set(key, { key, layer: row.layer, type: row.type, value, tensors: 1, worst: row });
      continue;
    }
    cell.tensors += 1;
    if (measure.low ? value < cell.value : value > cell.value) {
      cell.value = value;
      cell.worst = row;
    }
  }
  return [...cells.values()];
}

/** The types of some cells in the order of the file, and how many were left out. */
function typesOf(cells, measure) {
  const worst = new Map();
  for (const cell of cells) {
    const value = measure.low ? cell.value : -cell.value;
    worst.set(cell.type, Math.min(worst.get(cell.type) ?? Infinity, value));
  }
  const kept = new Set([...worst.keys()].sort((a, b) => worst.get(a) - worst.get(b))
    .slice(0, MOST_TYPES));
  return { types: page.types.filter((type) => kept.has(type)), left: worst.size - kept.size };
}

/** What a pointer on a cell tells. */
function cellTip(cell, measure) {
  const said = { Tensor: short(cell.worst.name, 160) };
  said[measure.title] = measure.text(cell.value);
  if (cell.tensors > 1) said.Note = "the worst of " + count(cell.tensors) + " tensors";
  return said;
}

/** Cells as data of a chart: labels and finished text, numbers only where they are finite. */
function chartCells(cells, types, measure) {
  const place = new Map(types.map((type, index) => [type, index]));
  return cells.filter((cell) => place.has(cell.type)).map((cell) => ({
    key: cell.key,
    layer: cell.layer,
    row: place.get(cell.type),
    state: Number.isFinite(cell.value) ? "number" : cell.value > 0 ? "exact" : "overflow",
    value: Number.isFinite(cell.value) ? cell.value * (measure.share ? 100 : 1) : null,
    tip: cellTip(cell, measure),
  }));
}

/** Extent that a colour scale or axis can be drawn over, also for one value. */
function extent(values) {
  const finite = values.filter(Number.isFinite);
  if (!finite.length) return [0, 1];
  const low = Math.min(...finite);
  const high = Math.max(...finite);
  return low < high ? [low, high] : [low - 0.5, high + 0.5];
}

/** The worst in red, the best in blue, so that the worst catch the eye on white and on black. */
const COLOURS = ["#b5123f", "#e8663c", "#f5b971", "#e6e3d3", "#9cc3dd", "#4a8fc2", "#1f5c99"];

/** The extent of what is worth a colour of its own: beyond the best tenth all are good, and what is
 * common is not bad, also where some tensors have a wider format. */
function colourExtent(cells, measure) {
  const span = measure.span * (measure.share ? 100 : 1);
  const finite = cells.map((cell) => cell.value).filter(Number.isFinite).sort((a, b) => a - b);
  if (!finite.length) return [0, 1];
  const tenth = Math.floor((finite.length - 1) / 10);
  const middle = finite[Math.floor(finite.length / 2)];
  if (measure.low) {
    const good = Math.min(finite[finite.length - 1 - tenth], middle + span);
    return [Math.min(finite[0], middle - span), good];
  }
  const good = Math.max(finite[tenth], middle - span);
  return [good, Math.max(finite[finite.length - 1], middle + span)];
}

/** Labels of rows that are numbers: names would be sorted, cut and perhaps taken as markup. */
function rowAxis(types) {
  return {
    field: "row", type: "ordinal", title: null, sort: types.map((_, index) => index),
    axis: { labelExpr: "labels[datum.value]", labelLimit: 330, ticks: false, domain: false },
  };
}

/** Rows and columns of rectangles: error by layer and type. */
function heatmapSpec(cells, types, measure, width) {
  const layers = [...new Set(cells.map((cell) => cell.layer))].sort((a, b) => a - b);
  const step = Math.max(5, Math.min(40, Math.floor((width - 430) / layers.length)));
  const special = [
    { test: "datum.state === 'overflow'", value: "var(--zero)" },
    { test: "datum.state === 'exact'", value: "var(--grid)" },
  ];
  return {
    data: { values: cells },
    params: [
      { name: "labels", value: types.map((type) => short(type, 52)) },
      { name: "chosen", value: null },
    ],
    mark: { type: "rect", tooltip: { content: "data" }, strokeWidth: 2, cursor: "pointer" },
    width: { step },
    height: { step: types.length > 20 ? 16 : 20 },
    encoding: {
      x: {
        field: "layer", type: "ordinal", title: "Layer", sort: layers,
        axis: { labelAngle: 0, labelOverlap: true, ticks: false, domain: false },
      },
      y: rowAxis(types),
      color: {
        condition: special,
        field: "value", type: "quantitative",
        scale: {
          range: measure.low ? COLOURS : [...COLOURS].reverse(), interpolate: "lab", clamp: true,
          domain: colourExtent(cells, measure),
        },
        legend: { title: measure.title, format: ".3~g", gradientLength: Math.max(90, Math.min(200, types.length * 16)) },
      },
      stroke: { condition: { test: "datum.key === chosen", value: "var(--ink)" }, value: null },
    },
  };
}

/** A bar for each type: of tensors that stand in no layer. */
function barsSpec(cells, types, measure, width) {
  const [low, high] = extent(cells.map((cell) => cell.value));
  return {
    data: { values: cells.map((cell) => ({ ...cell, drawn: cell.value ?? (cell.state === "exact" ? high : 0) })) },
    params: [{ name: "labels", value: types.map((type) => short(type, 52)) }],
    mark: { type: "bar", height: 11, tooltip: { content: "data" } },
    width: Math.max(160, Math.min(420, width - 430)),
    height: { step: 20 },
    encoding: {
      x: {
        field: "drawn", type: "quantitative", title: measure.title,
        scale: { domain: [Math.min(0, low), high], nice: true }, axis: { tickCount: 6 },
      },
      y: rowAxis(types),
      color: {
        condition: [
          { test: "datum.state === 'overflow'", value: "var(--zero)" },
          { test: "datum.state === 'exact'", value: "var(--line)" },
        ],
        value: "var(--accent)",
      },
    },
  };
}
