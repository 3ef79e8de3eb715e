// Cards of the worst tensors: shares, and the histograms of their codes and block scales.

const KINDS = {
  normal: { color: "var(--accent)", text: "normal" },
  max: { color: "var(--max)", text: "at max: the largest magnitude" },
  subnormal: { color: "var(--subnormal)", text: "subnormal: fewer significant bits" },
  zero: { color: "var(--zero)", text: "0: of a block scale, the block is flushed" },
};

/** Bars of how often each code or scale occurs. */
function histogramSpec(found, title, unit) {
  const values = found.bars.map((bar, index) => {
    const share = bar.count / Math.max(found.count, 1);
    return {
      index, kind: bar.kind, share: 100 * share,
      tip: { [title]: raised(bar.label), Share: percent(share) + " %", Count: count(bar.count) },
    };
  });
  return {
    data: { values },
    params: [{ name: "labels", value: found.bars.map((bar) => raised(bar.label)) }],
    mark: { type: "bar", tooltip: { content: "data" } },
    width: Math.min(210, 34 * values.length), // a few bars are no wall
    height: 100,
    encoding: {
      x: {
        field: "index", type: "ordinal", title,
        axis: {
          labelExpr: "labels[datum.value]", labelOverlap: "greedy", labelSeparation: 4,
          labelAngle: 0, ticks: false, labelFontSize: 10,
        },
        scale: { paddingInner: 0.12 },
      },
      y: {
        field: "share", type: "quantitative", title: unit,
        axis: { tickCount: 4, labelFontSize: 10 },
      },
      color: {
        field: "kind", type: "nominal", legend: null,
        scale: {
          domain: Object.keys(KINDS), range: Object.values(KINDS).map((kind) => kind.color),
        },
      },
    },
  };
}

/** Share of the bars of a kind, in percent with its unit. */
function shareOf(found, kind) {
  const counted = found.bars.filter((bar) => bar.kind === kind)
    .reduce((all, bar) => all + bar.count, 0);
  return percent(counted / Math.max(found.count, 1)) + " %";
}

/** A card, and what draws its pictures later. */
function cardOf(found, row) {
  const { codes, scales } = found;
  const facts = [];
  if (row.sqnr !== null) facts.push(["SQNR", decibels(row.sqnr) + (Number.isFinite(row.sqnr) ? " dB" : "")]);
  if (row.rms !== null) facts.push(["RMS error", digits(row.rms) + " %"]);
  facts.push(["format", row.format], ["shape", row.shape]);
  facts.push(["codes at max", shareOf(codes, "max")], ["codes 0", shareOf(codes, "zero")]);
  if (scales.count > 1) {
    const flushed = row.flushed === null ? shareOf(scales, "zero") : percent(row.flushed) + " %";
    facts.push(["scales flushed", flushed], ["subnormal", shareOf(scales, "subnormal")]);
    if (scales.bars.some((bar) => bar.kind === "max")) facts.push(["at max", shareOf(scales, "max")]);
  }
  if (found.second_level !== null) facts.push(["second level", digits(found.second_level, 4)]);
  const pictures = [
    [el("figure"), "Codes of " + row.label, histogramSpec(codes, "code (" + codes.type + ")", "% of codes")],
  ];
  if (scales.count > 1) {
    pictures.push([el("figure"), "Block scales of " + row.label,
      histogramSpec(scales, "block scale (" + scales.type + ")", "% of scales")]);
  }
  const card = el("article", { class: "card" },
    el("h3", {}, foldable(row.name)), terms("facts", facts),
    el("div", { class: "pair" }, pictures.map(([figure]) => figure)),
    scales.count > 1 ? null : el("p", { class: "note" }, "One scale for the whole tensor."));
  const drawAll = async () => {
    for (const [figure, label, spec] of pictures) await draw(figure, label, spec);
  };
  return [card, drawAll];
}

/** The section of the worst tensors; null without any. */
function worstSection(later) {
  if (!page.worst.length) return null;
  const byName = new Map(rows.map((row) => [row.name, row]));
  const cards = page.worst.map((found) => cardOf(found, byName.get(found.name)));
  later.push(...cards.map(([, drawAll]) => drawAll));
  const many = page.worst.length;
  const title = (measured.length ? "Worst " : "Largest ") + (many === 1 ? "tensor" : many + " tensors");
  return el("section", { "aria-labelledby": "worst" },
    el("h2", { id: "worst" }, title),
    el("p", { class: "note" },
      "What is stored of them, read again. Codes and block scales are counted by value; 8-bit ones "
      + "by magnitude, from a power of two up to the next. The largest element of a block belongs "
      + "at max: such codes are not clipped. "
      + "A block whose scale is flushed to 0 has lost all of its values."),
    el("ul", { class: "key" }, Object.values(KINDS).map((kind) => {
      const swatch = el("span", { class: "swatch" });
      swatch.style.background = kind.color;
      return el("li", {}, swatch, kind.text);
    })),
    el("div", { class: "cards" }, cards.map(([card]) => card)));
}
