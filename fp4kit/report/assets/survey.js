// Size against error: what each candidate alone gives, the mixtures between, and the one chosen.

/** What was chosen from: of a survey, or of a quantization within a budget. */
const choice = isSurvey ? report : page.choice;

/** What a pointer on a point tells. */
function pointTip(point, label) {
  const said = { Stored: label, "Bits a weight": digits(point.bits, 4),
    "Surveyed tensors": size(point.nbytes), "All tensors": size(point.total_nbytes),
    "Error, %": digits(point.error) };
  if (!point.label) {
    for (const [name, share] of Object.entries(point.weights)) {
      if (share > 0) said[name] = percent(share) + " % of weights";
    }
  }
  return said;
}

/** The ground of a text that stands on lines. */
const HALO = { stroke: "var(--paper)", strokeWidth: 3 };

function frontierSpec(width) {
  const points = [];
  const add = (point, group, text, rank) => points.push({
    bits: point.bits, error: point.error, group, text, rank, tip: pointTip(point, text || group),
  });
  choice.frontier.forEach((point) => add(point, "mixture", point.label, 0));
  // Names of neighbours in turn above and below, so that they do not meet.
  [...choice.uniform].sort((a, b) => a.bits - b.bits || a.error - b.error)
    .forEach((point, index) => add(point, "one for all", point.label, point.error ? index % 2 : 0));
  if (choice.chosen) add(choice.chosen, "chosen", "chosen", 2);
  const x = { field: "bits", type: "quantitative", title: "bits a weight", scale: { zero: false, padding: 20 } };
  const y = {
    field: "error", type: "quantitative",
    title: (choice.moments ? "output error" : "weight error") + ", relative RMS in %",
    scale: { zero: true },
  };
  const only = (group) => [{ filter: { field: "group", equal: group } }];
  const tooltip = { content: "data" };
  const named = (rank, dy) => ({
    transform: [{ filter: { and: [{ field: "group", equal: "one for all" }, { field: "rank", equal: rank }] } }],
    mark: { type: "text", dy, color: "var(--ink)", fontSize: 11, ...HALO },
    encoding: { text: { field: "text" } },
  });
  const mixtures = [
    { transform: only("mixture"), mark: { type: "line", color: "var(--accent)", interpolate: "step-after" } },
    { transform: only("mixture"), mark: { type: "point", filled: true, size: 22, color: "var(--accent)", tooltip } },
  ];
  const chosen = [
    {
      transform: only("chosen"),
      mark: { type: "point", shape: "diamond", filled: true, opacity: 1, size: 240, color: "var(--max)",
        stroke: "var(--paper)", strokeWidth: 1.5, tooltip },
    },
    {
      transform: only("chosen"),
      mark: { type: "text", dx: 12, align: "left", color: "var(--max)", fontWeight: "bold",
        fontSize: 12, ...HALO },
      encoding: { text: { field: "text" } },
    },
  ];
  return {
    data: { values: points },
    width: Math.max(260, Math.min(760, width - 90)),
    height: 300,
    encoding: { x, y },
    layer: [
      ...(choice.frontier.length ? mixtures : []),
      {
        transform: only("one for all"),
        mark: { type: "point", filled: true, opacity: 1, size: 60, color: "var(--muted)", tooltip },
      },
      ...(choice.uniform.length ? [named(0, -11)] : []),
      ...(choice.uniform.length > 1 ? [named(1, 14)] : []),
      ...(choice.chosen ? chosen : []),
    ],
  };
}

/** The section of size against error; null where nothing was surveyed. */
function frontierSection(later, width) {
  if (!choice) return null;
  const figure = el("figure");
  later.unshift(() => draw(figure, "Size against error of every candidate and mixture", frontierSpec(width())));
  return el("section", { "aria-labelledby": "frontier" },
    el("h2", { id: "frontier" }, "Size against error"),
    el("p", { class: "note" },
      "Grey: every surveyed tensor in one format. "
      + (choice.frontier.length ? "Blue: mixtures, a format for each fused group by the error that it saves per byte. " : "")
      + (choice.chosen ? "Orange: the chosen one. " : "No budget was given, so that nothing is chosen. ")
      + (choice.moments ? "The error is that of the layers' outputs." : "The error is that of the weights.")),
    figure);
}

/** The worst tensors of a survey: a point for each candidate. */
function candidatesSpec(some, width) {
  const labels = some.map((row) => short(row.name, 52));
  const values = some.flatMap((row, index) => Object.entries(row.errors).map(([name, error]) => ({
    row: index, candidate: name, error: error.relative_rms, chosen: row.choice === name,
    tip: { Tensor: short(row.name, 160), Candidate: name + (row.choice === name ? " (chosen)" : ""),
      "RMS error, %": digits(error.relative_rms), Bytes: size(error.nbytes) },
  })));
  return {
    data: { values },
    params: [{ name: "labels", value: labels }],
    width: Math.max(200, Math.min(620, width - 520)),
    height: { step: 24 },
    mark: { type: "point", filled: true, size: 75, opacity: 1, tooltip: { content: "data" } },
    encoding: {
      x: {
        field: "error", type: "quantitative", title: "RMS error of the weight, %",
        scale: { padding: 10, nice: false },
      },
      y: { ...rowAxis(labels), axis: { labelExpr: "labels[datum.value]", labelLimit: 330, grid: true, ticks: false } },
      color: {
        field: "candidate", type: "nominal", sort: report.candidates,
        scale: { domain: report.candidates, scheme: "tableau10" }, legend: { title: "candidate" },
      },
      shape: { field: "candidate", type: "nominal", scale: { domain: report.candidates } },
      stroke: { condition: { test: "datum.chosen", value: "var(--ink)" }, value: null },
      strokeWidth: { value: 2 },
    },
  };
}

/** The section of the worst tensors of a survey. */
function candidatesSection(later, width) {
  if (!isSurvey || !rows.length) return null;
  const error = (row) => row.errors[report.candidates[0]];
  const cost = (row) => error(row).output_noise ?? error(row).noise;
  const worst = rows.filter(error).sort((a, b) => cost(b) - cost(a)).slice(0, 10);
  if (!worst.length) return null;
  const figure = el("figure");
  later.push(() => draw(figure, "Errors of the worst tensors by candidate", candidatesSpec(worst, width())));
  return el("section", { "aria-labelledby": "candidates" },
    el("h2", { id: "candidates" }, worst.length === 1 ? "Worst tensor" : "Worst " + worst.length + " tensors"),
    el("p", { class: "note" }, "Those that " + shown(report.candidates[0])
      + " does most harm to." + (report.chosen ? " Ringed: the chosen candidate." : "")),
    figure);
}
