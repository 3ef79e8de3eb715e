// The data: `page.report` is what the command gives as JSON, the rest is what only a page needs.

const page = JSON.parse(document.getElementById("data").textContent);
const report = page.report;
const isSurvey = page.kind === "survey";

/** SQNR of an entry: Infinity where it is exact, -Infinity where not finite, null if unmeasured. */
function sqnrOf(entry) {
  if (!entry.stats) return null;
  if (entry.exact) return Infinity;
  return entry.stats.sqnr === null ? -Infinity : entry.stats.sqnr;
}

/** The same of an entry of an earlier run. */
function sqnrBefore(entry) {
  if (!entry) return null;
  if (entry.exact) return Infinity;
  return entry.overflow ? -Infinity : entry.sqnr;
}

/** A tensor as the charts and the table take it; `index` is its place in the file. */
function rowOf(tensor, index) {
  const [layer, type] = page.places[index];
  const row = {
    index,
    layer,
    name: tensor.name,
    label: shown(tensor.name),
    type: page.types[type],
    shape: tensor.shape.join("\u00d7") || "scalar",
    elements: tensor.shape.reduce((all, one) => all * one, 1),
    dtype: tensor.dtype,
  };
  if (isSurvey && !tensor.errors) {
    return { ...row, before: tensor.nbytes, errors: {}, sqnrs: {}, choice: "",
      what: "keep: " + tensor.reason };
  }
  if (isSurvey) {
    const sqnrs = {};
    for (const [name, error] of Object.entries(tensor.errors)) {
      sqnrs[name] = error.sqnr === null ? Infinity : error.sqnr;
    }
    return { ...row, before: tensor.bytes, errors: tensor.errors, sqnrs,
      what: "", choice: choices.get(tensor.name) ?? "" };
  }
  const stats = tensor.stats;
  const old = page.before ? page.before.tensors[index] : null;
  const sqnr = sqnrOf(tensor);
  const was = sqnrBefore(old);
  return {
    ...row,
    format: tensor.format ?? "",
    what: tensor.action + (tensor.reason ? ": " + tensor.reason : ""),
    before: tensor.bytes_before,
    after: tensor.bytes_after,
    sqnr,
    rms: stats ? stats.relative_rms : null,
    largest: stats ? stats.max_abs_error : null,
    atMax: stats ? stats.saturated : null,
    flushed: stats ? stats.scale_underflow : null,
    subnormal: stats ? stats.scale_subnormal : null,
    was,
    change: Number.isFinite(sqnr) && Number.isFinite(was) && sqnr !== null && was !== null
      ? sqnr - was : null,
  };
}

/** Tensor to the candidate that a survey chose. */
const choices = new Map();
if (isSurvey) {
  for (const group of report.groups) {
    if (group.choice !== null) for (const name of group.members) choices.set(name, group.choice);
  }
}
const rows = [...report.tensors, ...(isSurvey ? report.kept : [])].map(rowOf);
/** Rows with an error; plain tensors that are equal in both files are not worth a picture. */
const measured = isSurvey ? rows.filter((row) => !row.what)
  : rows.filter((row) => row.sqnr !== null && (row.format || row.sqnr !== Infinity));
