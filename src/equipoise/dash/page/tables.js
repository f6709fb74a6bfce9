// Tables: a figure's numbers, the runs side by side, configuration and environment.

// The rows are made when the table is first opened: a page of closed tables loads at once.
function addTable(figure, headings, makeRows) {
  const details = element("details", {}, element("summary", {}, "Numbers"));
  details.addEventListener("toggle", () => {
    if (details.open && details.childElementCount === 1) details.append(scrolled(table(headings, makeRows(), `${figure.title}, in numbers`)));
  });
  figure.node.append(details);
}

function scrolled(node) { return element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": node.caption?.textContent ?? "table" }, node); }

function table(headings, rows, caption) {
  const isNumber = (text) => /^[−+-]?[\d.,]+( ?[%×a-zA-Zµ]{1,3})?$|^–$/.test(text);
  const numeric = headings.map((_, column) => column > 0 && rows.every((row) => isNumber(row[column])));
  const hidden = { position: "absolute", width: "1px", height: "1px", overflow: "hidden", clipPath: "inset(50%)" };
  return element(
    "table", {},
    element("caption", { style: hidden }, caption),
    element("thead", {}, element("tr", {}, ...headings.map((heading, column) => element("th", { scope: "col", class: numeric[column] ? "number" : "" }, heading)))),
    element("tbody", {}, ...rows.map((row) => element("tr", {}, ...row.map((cell, column) => element("td", { class: numeric[column] ? "number" : "" }, cell))))),
  );
}

function runsTable() {
  const worst = (values) => { const known = values.filter(isKnown); return known.length ? Math.max(...known) : null; };
  // Of each row: its name, then what it shows of a run, one under the other.
  const rows = [
    ["Mean step time", ["measured", (one) => formatSeconds(one.step_s)], ["predicted", (one) => formatSeconds(one.predicted_step_s)]],
    ["Tokens per second", ["measured", (one) => formatCount(one.tokens_per_s)]],
    ["Model FLOP utilisation", ["measured", (one) => formatPercent(one.mfu)]],
    ["Fullest rank ÷ mean", ["measured", (one) => formatTimes(one.skew)], ["predicted", (one) => formatTimes(one.predicted_skew)], ["predicted, in order", (one) => formatTimes(one.in_order_skew)]],
    ["Time spent waiting", ["measured", (one) => formatPercent(one.wait_share)], ["of it, uneven work", (one) => formatPercent(one.uneven_share)]],
    ["Peak memory", ["measured", (one) => formatBytes(one.peak_memory_bytes)], ["predicted", (one) => formatBytes(one.forecast_bytes)]],
    ["Last loss", ["measured", (one) => formatLoss(one.loss)]],
    ["Packing a step", ["measured", (one) => formatSeconds(one.plan_s)]],
    ["Median error", ["step time", (one) => formatPercent(one.step_error)], ["worst rank's compute", (one) => formatPercent(worst(one.busy_error))]],
  ];
  if (data.runs.some((run) => run.plan)) {
    const of = (one) => data.runs.find((run) => run.summary === one).plan;
    rows[0].push(["planned", (one) => formatSeconds(of(one)?.step_s.planned)]);
    rows.find(([name]) => name === "Peak memory").push(["planned", (one) => formatBytes(of(one)?.memory_bytes.planned)]);
  }
  if (data.comparisons.length) {
    // A run that trained other documents, or on other ranks, is compared by tokens a second.
    const of = (one) => data.comparisons.find((each) => each.label === one.label);
    const isSame = data.comparisons.every((each) => each.is_same_documents);
    rows.unshift([`Speed over ${data.comparisons[0].baseline}`, ["measured", (one) => formatTimes(of(one)?.measured)], ["predicted", (one) => formatTimes(of(one)?.predicted)]]);
    if (data.comparisons.some((each) => isKnown(each.low))) {
      const interval = (low, high) => (isKnown(low) ? `${decimals(low, 2)}–${decimals(high, 2)}` : missing);
      rows[0].splice(2, 0, ["90% interval", (one) => interval(of(one)?.low, of(one)?.high)]);
      rows[0].push(["processor time", (one) => formatTimes(of(one)?.busy)]);
    }
    if (!isSame) rows.splice(1, 0, ["On the same documents", ["", (one) => (of(one) ? (of(one).is_same_documents ? "yes" : "no") : missing)]]);
  }
  const lines = ([name, ...shown]) => shown.map(([kind, format], index) => element(
    "tr", { class: index + 1 < shown.length ? "continues" : "" },
    index ? null : element("th", { scope: "row", rowspan: shown.length }, name),
    element("td", { class: "kind" }, kind),
    ...data.runs.map((run) => element("td", { class: "number" }, format(run.summary))),
  ));
  const swatch = (run) => element("span", { class: "swatch", style: { background: run.color } });
  document.getElementById("runs").append(scrolled(element(
    "table", { class: "runs" },
    element("thead", {}, element("tr", {}, element("td", { colspan: 2 }), ...data.runs.map((run) => element("th", { scope: "col", class: "number" }, swatch(run), run.label)))),
    element("tbody", {}, ...rows.flatMap(lines)),
  )));
  document.querySelector(".overview").classList.toggle("is-many", data.runs.length > 2);
  for (const run of data.runs) document.getElementById("about").append(
    element("dt", {}, swatch(run), run.label),
    element("dd", {}, `${run.about} · ${run.status}`, element("span", { class: "folder" }, run.summary.folder)),
  );
}

function settingsTable(headings, rows) {
  return element(
    "table", { class: "settings" },
    element("thead", {}, element("tr", {}, ...headings.map((heading) => element("th", { scope: "col" }, heading)))),
    element("tbody", {}, ...rows.map((row) => element("tr", { class: row.differs && data.runs.length > 1 ? "differs" : "" }, element("th", { scope: "row" }, element("code", {}, ...row.key.split(/(?<=[._])/).flatMap((part) => [part, element("wbr")]))), ...row.values.map((value, index) => element("td", {}, element("code", {}, typeof value === "number" ? formatBytes(value) : String(value ?? missing)), row.origins ? element("span", { class: "origin" }, row.origins[index]) : null))))),
  );
}

function configurationFigure() {
  const figure = addFigure({ id: "configuration", title: "Configuration", wide: data.runs.length > 2 });
  const said = data.configuration.filter((row) => !row.is_unsaid || row.differs);
  const silent = data.configuration.filter((row) => row.is_unsaid && !row.differs);
  const differing = data.configuration.filter((row) => row.differs && row.key !== "name").map((row) => row.key);
  const text = data.runs.length > 1
    ? (differing.length ? `The runs differ in ${differing.join(", ")}.` : "The runs are configured alike.")
    : "";
  figure.node.querySelector(".finding").textContent = `${text} Under each value is where it came from.`.trim();
  figure.body.append(scrolled(settingsTable(["key", ...names], said.length ? said : silent)));
  if (said.length && silent.length) figure.node.append(element("details", {}, element("summary", {}, `${silent.length} keys left at what the default or the preset says`), scrolled(settingsTable(["key", ...names], silent))));
}

function environmentFigure() {
  const figure = addFigure({ id: "environment", title: "Environment", wide: data.runs.length > 2 });
  figure.body.append(scrolled(settingsTable(["", ...names], data.environment)));
}
