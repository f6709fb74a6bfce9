// The figures: what each draws of the data, and the numbers of its table.

let names = [];
// Figures of one run open at one that packs by something.
let firstRun = 0;
// With few ranks their bars share a row with the skew of every step.
let hasFewRanks = true;

// Take what the figures draw. The first run of a policy has the policy's colour; others, colours
// that no policy has.
function take(pageData) {
  data = pageData;
  const taken = new Set();
  let spare = 0;
  for (const run of data.runs) {
    const isFirst = ["by-work", "in-order", "by-tokens"].includes(run.policy) && !taken.has(run.policy);
    run.color = isFirst ? `var(--${run.policy})` : `var(--other-${spare++ % 3})`;
    taken.add(run.policy);
  }
  names = data.runs.map((run) => run.label);
  firstRun = Math.max(0, data.runs.findIndex((run) => !run.is_in_order));
  hasFewRanks = data.runs.every((run) => run.ranks_drawn.length <= 8);
}

function extent(values, { fromZero = true, room = 0.06 } = {}) {
  let low = Infinity, high = -Infinity;
  for (const value of values) if (isKnown(value)) { low = Math.min(low, value); high = Math.max(high, value); }
  if (low === Infinity) return [0, 1];
  if (fromZero) low = Math.min(0, low);
  const span = high - low || Math.abs(high) || 1;
  return [fromZero && low === 0 ? 0 : low - span * room, high + span * room];
}

function nearest(values, wanted) {
  let low = 0, high = values.length - 1;
  while (high - low > 1) { const middle = (low + high) >> 1; if (values[middle] < wanted) low = middle; else high = middle; }
  return Math.abs(values[low] - wanted) <= Math.abs(values[high] - wanted) ? low : high;
}

function sampledHint(figure, lines) {
  const most = Math.max(...lines.map((line) => line.steps_a_point));
  if (most > 1) figure.hint(`A point is the median of up to ${formatWhole(most)} steps; the band around it reaches from their lowest to their highest.`);
}

// lines: [{name, color, dashed, thick, x, y}]
// events: [{kind, text, at}], where something happened on the x axis.
function drawLines(figure, lines, { x, y, height = 250, xTitle = "step", label, events = [] }) {
  const [xLow, xHigh] = [Math.min(...lines.map((line) => line.x[0] ?? Infinity)), Math.max(...lines.map((line) => line.x.at(-1) ?? -Infinity))];
  const [low, high] = extent(lines.flatMap((line) => [...(line.low ?? line.y), ...(line.high ?? line.y), ...(line.spikes?.y ?? [])]), y);
  return keepDrawn(figure.body, (width) => {
    const f = frame(figure.body, width, {
      height, label,
      x: { low: xLow, high: xHigh, isWhole: true, format: x?.axis?.(xHigh) ?? formatWhole, title: xTitle },
      y: { low, high, format: y.axis ? y.axis(high) : y.format, isWhole: y.isWhole },
    });
    for (const { kind, text, at } of events.filter((each) => each.at >= xLow && each.at <= xHigh)) {
      const mark = kind === "evaluation"
        ? shape("path", { class: "event evaluation", d: `M${f.toX(at)} ${f.bottom - 9} l4 4.5 l-4 4.5 l-4 -4.5 z` })
        : shape("line", { class: `event ${kind}`, x1: f.toX(at), x2: f.toX(at), y1: f.top, y2: f.bottom });
      mark.append(shape("title", {}, text));
      f.svg.append(mark);
    }
    for (const line of lines.filter((each) => each.low && !each.dashed)) {
      const edge = (values) => line.x.map((at, index) => `${f.toX(at).toFixed(1)},${f.toY(values[index]).toFixed(1)}`);
      f.svg.append(shape("polygon", { points: [...edge(line.high), ...edge(line.low).reverse()].join(" "), fill: line.color, "fill-opacity": 0.16 }));
    }
    for (const line of lines) {
      line.spikes?.x.forEach((at, index) => f.svg.append(shape("circle", { class: "spike", cx: f.toX(at), cy: f.toY(line.spikes.y[index]), r: 6, fill: "none", stroke: "var(--fault)", "stroke-width": 2 })));
      const points = line.x.map((at, index) => `${f.toX(at).toFixed(1)},${f.toY(line.y[index]).toFixed(1)}`);
      if (points.length === 1) {
        const [cx, cy] = points[0].split(",");
        f.svg.append(shape("circle", { cx, cy, r: 3, fill: line.color }));
      }
      f.svg.append(shape("polyline", {
        points: points.join(" "), fill: "none", stroke: line.color, "stroke-width": line.thick ? 5 : 1.8,
        "stroke-opacity": line.thick ? 0.35 : 1, "stroke-linejoin": "round", "stroke-dasharray": line.dashed ? "5 4" : null,
      }));
    }
    track(f, (px) => {
      const wanted = xLow + ((px - f.left) / (f.right - f.left)) * (xHigh - xLow);
      const at = lines[0].x[nearest(lines[0].x, wanted)];
      return {
        x: f.toX(at),
        title: `${xTitle} ${(x?.format ?? formatWhole)(at)}`.trim(),
        rows: lines.map((line) => {
          const index = nearest(line.x, at);
          return [line.name, y.format(line.y[index]) + (line.low ? ` (${y.format(line.low[index])} to ${y.format(line.high[index])})` : "")];
        }),
      };
    });
  });
}

function runLines(name, styled = () => ({})) {
  return data.runs
    .map((run, index) => ({ name: run.label, color: run.color, ...run.lines[name], ...styled(run, index) }))
    .filter((line) => line.y.length > 0);
}

function lineTable(figure, lines, headings, formats) {
  addTable(figure, headings, () => {
    const rows = new Map();
    lines.forEach((line, column) => line.x.forEach((at, index) => {
      if (!rows.has(at)) rows.set(at, Array(lines.length).fill(null));
      rows.get(at)[column] = line.y[index];
    }));
    return [...rows].sort((a, b) => a[0] - b[0]).map(([at, values]) => [formats[0](at), ...values.map(formats[1])]);
  });
}

function histogramFigure() {
  const histogram = data.histogram;
  if (!histogram) return;
  const figure = addFigure({ id: "lengths", title: "How long the documents are", marks: ["measured"], wide: true });
  const share = (counts) => { const sum = counts.reduce((a, b) => a + b, 0) || 1; return counts.map((count) => count / sum); };
  const sides = [
    { name: "share of documents", values: share(histogram.documents), color: "var(--documents)" },
    { name: "share of tokens", values: share(histogram.tokens), color: "var(--tokens)" },
  ];
  // A first bin from 0 has no beginning on a logarithmic axis: it is drawn an octave wide.
  const edges = histogram.edges.map((edge, index) => (edge > 0 ? edge : histogram.edges[index + 1] / 2));
  figure.legend.append(...sides.map((side) => key("bar", side.color, side.name)));
  const label = "Histogram of document lengths on a logarithmic axis: share of documents and share of tokens in each bin.";
  const range = (bin) => `${formatWhole(histogram.edges[bin])} to ${formatWhole(histogram.edges[bin + 1])} tokens`;
  keepDrawn(figure.body, (width) => {
    const wanted = Math.max(1, Math.ceil(edges.length / (width / 64)));
    const f = frame(figure.body, width, {
      height: 260, label,
      x: { low: edges[0], high: edges.at(-1), log: true, format: (edge) => formatCount(histogram.edges[edges.indexOf(edge)]), title: "tokens of a document", ticks: edges.filter((_, index) => index % wanted === 0) },
      y: { low: 0, high: Math.max(...sides.flatMap((side) => side.values)) * 1.14, format: formatPercentTick },
      left: 48,
    });
    sides.forEach((side, order) => side.values.forEach((value, bin) => {
      const from = f.toX(edges[bin]), wide = f.toX(edges[bin + 1]) - from;
      const bar = Math.max(1, wide * 0.4);
      f.svg.append(shape("rect", {
        x: from + wide * 0.1 + order * bar, y: f.toY(value), width: bar, height: Math.max(0, f.bottom - f.toY(value)), fill: side.color, rx: Math.min(1.5, bar / 4),
      }));
    }));
    const window_ = histogram.context_tokens;
    if (isKnown(window_) && window_ > edges[0] && window_ < edges.at(-1)) {
      const at = f.toX(window_), before = at > width / 2;
      f.svg.append(
        shape("line", { x1: at, x2: at, y1: f.top, y2: f.bottom, stroke: "var(--ink)", "stroke-dasharray": "3 3" }),
        shape("text", { x: at + (before ? -8 : 8), y: f.top + 11, "text-anchor": before ? "end" : "start" }, `window, ${formatWhole(window_)}`),
      );
    }
    track(f, (px) => {
      const bin = edges.findIndex((edge, index) => index + 1 < edges.length && px < f.toX(edges[index + 1]));
      if (bin < 0) return null;
      return { title: range(bin), rows: sides.map((side) => [side.name, formatPercent(side.values[bin])]) };
    });
  });
  const total = `${formatWhole(histogram.total_documents)} documents, ${formatWhole(histogram.total_tokens)} tokens; the longest has ${formatWhole(histogram.longest_tokens)}.`;
  const shared = histogram.is_shared ? "" : ` This is the corpus of ${names[0]}; the other runs read another.`;
  figure.hint(total + shared);
  addTable(figure, ["tokens of a document", "documents", "tokens", "share of documents", "share of tokens"], () => histogram.documents.map((count, bin) => [
    range(bin), formatWhole(count), formatWhole(histogram.tokens[bin]), ...sides.map((side) => formatPercent(side.values[bin])),
  ]));
}

function workFigure() {
  // One rank shares its work with nobody.
  if (!data.runs.some((run) => run.bars.step.length && run.summary.ranks > 1)) return;
  const figure = addFigure({ id: "work", title: "The work of each rank", marks: ["predicted", "measured"], wide: !hasFewRanks });
  let run, chosen, redraw = () => {};
  const show = () => {
    const { bars } = run;
    figure.legend.replaceChildren(
      key("bar", "var(--before)", `in order, predicted: ${formatTimes(bars.in_order_skew[chosen])} the mean`),
      key("bar", run.color, `${run.label}, predicted: ${formatTimes(bars.predicted_skew[chosen])}`),
      key("ring", "var(--ink)", `measured: ${formatTimes(bars.measured_skew[chosen])}`),
    );
    redraw();
  };
  const pickRun = (index) => {
    run = data.runs[index];
    chosen = run.bars.typical;
    figure.controls.querySelector("label")?.remove();
    if (run.bars.step.length > 1) addStepPicker(figure.controls, run.bars.step, chosen, (step) => { chosen = step; show(); });
    show();
  };
  addSwitch(figure.controls, names, firstRun, "run", pickRun);
  pickRun(firstRun);
  redraw = keepDrawn(figure.body, (width) => {
    const { bars } = run;
    const all = ["in_order_s", "predicted_s", "busy_s"].flatMap((side) => bars[side].flat());
    const [, high] = extent(all);
    const ranks = run.ranks_drawn;
    const every = Math.max(1, Math.ceil(ranks.length / (width / 56)));
    const f = frame(figure.body, width, {
      height: 280,
      label: `Bars of each rank's compute seconds at step ${bars.step[chosen]} of ${run.label}, beside an in-order pack of the same documents.`,
      x: { low: 0, high: ranks.length, format: (at) => (ranks.length > 24 ? ranks[at - 0.5] : `rank ${ranks[at - 0.5]}`), title: "", ticks: ranks.map((_, index) => index + 0.5).filter((_, index) => index % every === 0) },
      y: { low: 0, high, format: secondsFormatter(high) },
      left: 66, bottom: 28,
    });
    const slot = (f.right - f.left) / ranks.length;
    const bar = Math.min(64, slot * 0.36);
    ranks.forEach((rank, index) => {
      const middle = f.toX(index + 0.5);
      [[bars.in_order_s[chosen][index], middle - bar - 1, "var(--before)"], [bars.predicted_s[chosen][index], middle + 1, run.color]].forEach(([value, at, color]) => {
        if (isKnown(value)) f.svg.append(shape("rect", { x: at, y: f.toY(value), width: bar, height: f.bottom - f.toY(value), fill: color, rx: Math.min(2, bar / 6) }));
      });
      const busy = bars.busy_s[chosen][index];
      if (isKnown(busy)) f.svg.append(shape("circle", { cx: middle + 1 + bar / 2, cy: f.toY(busy), r: Math.max(2, Math.min(5, bar / 4)), fill: "var(--paper)", stroke: "var(--ink)", "stroke-width": 2 }));
    });
    track(f, (px) => {
      const index = Math.max(0, Math.min(ranks.length - 1, Math.floor((px - f.left) / slot)));
      return {
        title: `rank ${ranks[index]}, step ${bars.step[chosen]}`,
        rows: [
          ["in order, predicted", formatSeconds(bars.in_order_s[chosen][index])],
          [`${run.label}, predicted`, formatSeconds(bars.predicted_s[chosen][index])],
          ["measured", formatSeconds(bars.busy_s[chosen][index])],
          ["tokens", formatWhole(bars.tokens[chosen][index])],
          ["documents", formatWhole(bars.documents[chosen][index])],
        ],
      };
    });
  });
  figure.hint("Compute seconds of one step. The step shown first is the one of median in-order skew.");
  for (const { label, bars, ranks_drawn: ranks, timeline } of data.runs) {
    if (bars.step.length < bars.of) figure.hint(`Of ${label} the page holds ${bars.step.length} of ${formatWhole(bars.of)} steps.`);
    if (ranks.length < timeline.ranks_of) figure.hint(`Of ${label} the page holds ${ranks.length} of ${formatWhole(timeline.ranks_of)} ranks.`);
  }
  addTable(figure, ["run", "step", "rank", "in order, predicted", "predicted", "measured", "tokens"], () => data.runs.flatMap((each) => each.bars.step.flatMap((step, at) => each.ranks_drawn.map((rank, index) => [
    each.label, formatWhole(step), formatWhole(rank), formatSeconds(each.bars.in_order_s[at][index]), formatSeconds(each.bars.predicted_s[at][index]), formatSeconds(each.bars.busy_s[at][index]), formatWhole(each.bars.tokens[at][index]),
  ]))));
}

function skewFigure() {
  if (data.runs.every((run) => run.summary.ranks === 1)) return;
  const before = data.runs[firstRun].lines.in_order_skew;
  const lines = [
    ...(data.runs.some((run) => run.is_in_order) ? [] : [{ ...before, name: "in order, predicted", color: "var(--before-ink)", dashed: true }]),
    ...runLines("predicted_skew", (run) => ({ name: `${run.label}, predicted`, dashed: true })),
    ...runLines("measured_skew", (run) => ({ name: `${run.label}, measured` })),
  ].filter((line) => line.y.length > 0);
  if (!lines.length) return;
  const figure = addFigure({ id: "skew", title: "Skew at each step", marks: ["predicted", "measured"] });
  figure.legend.append(...lines.map((line) => key(line.dashed ? "dashes" : "line", line.color, line.name)));
  drawLines(figure, lines, { y: { fromZero: false, format: formatTimes, axis: () => formatTimesTick }, label: "Fullest rank over mean rank at each step, predicted and measured." });
  sampledHint(figure, lines);
  lineTable(figure, lines, ["step", ...lines.map((line) => line.name)], [formatWhole, formatTimes]);
}

function expertsFigure() {
  const lines = [
    ...runLines("experts_before", (run) => ({ name: `${run.label}, each expert on its own rank`, dashed: true })),
    ...runLines("experts_after", (run) => ({ name: `${run.label}, as computed` })),
  ];
  if (!lines.length) return;
  const figure = addFigure({ id: "experts", title: "Experts' rows on the fullest rank", marks: ["measured"] });
  figure.legend.append(...lines.map((line) => key(line.dashed ? "dashes" : "line", line.color, line.name)));
  drawLines(figure, lines, { y: { fromZero: false, format: formatTimes, axis: () => formatTimesTick }, label: "Experts' rows of the fullest rank over the mean at each step, means over layers: if each expert stayed on its own rank, and as they were computed." });
  figure.hint("Over the mean of the ranks that share them; means over layers.");
  sampledHint(figure, lines);
  lineTable(figure, lines, ["step", ...lines.map((line) => line.name)], [formatWhole, formatTimes]);
}

function waitFigure() {
  const waits = runLines("wait");
  if (!waits.length) return;
  const uneven = data.runs.every((run) => run.summary.ranks === 1) ? [] : runLines("uneven", () => ({ dashed: true }));
  const lines = [...waits, ...uneven.map((line) => ({ ...line, name: `${line.name}, uneven work` }))];
  const figure = addFigure({ id: "wait", title: "Time spent waiting", marks: ["measured"] });
  figure.legend.append(...lines.map((line) => key(line.dashed ? "dashes" : "line", line.color, line.name)));
  drawLines(figure, lines, { y: { format: formatPercent, axis: () => formatPercentTick }, label: "Share of the ranks' time that is waiting, at each step of each run, and what of it even work would give back." });
  sampledHint(figure, lines);
  lineTable(figure, lines, ["step", ...lines.map((line) => line.name)], [formatWhole, formatPercent]);
}

function stepsFigure() {
  const runs = data.runs.filter((run) => run.scatter.step.length);
  if (!runs.length) return;
  const figure = addFigure({ id: "steps", title: "Predicted beside measured", marks: ["predicted", "measured"] });
  figure.legend.append(...runs.map((run) => key("dot", run.color, run.label)), key("dashes", "var(--faint)", "predicted = measured"));
  // The scale is that of the steady steps: a first step of ten times the others says nothing here.
  const steady = runs.flatMap((run) => run.scatter.step.flatMap((_, index) => (run.scatter.is_steady[index] ? [run.scatter.measured_s[index], run.scatter.predicted_s[index]] : [])));
  const [low, high] = extent(steady, { fromZero: false });
  const isIn = (value) => value >= low && value <= high;
  const marks = runs.flatMap((run) => run.scatter.step.map((step, index) => ({ run, step, x: run.scatter.predicted_s[index], y: run.scatter.measured_s[index] })).filter((mark) => isIn(mark.x) && isIn(mark.y)));
  const outside = runs.reduce((sum, run) => sum + run.scatter.step.length, 0) - marks.length;
  keepDrawn(figure.body, (width) => {
    const f = frame(figure.body, width, {
      height: besideHeight, label: "Each dot is a step: predicted seconds across, measured seconds up; on the line they are equal.", left: 66,
      x: { low, high, format: secondsFormatter(high), title: "predicted" }, y: { low, high, format: secondsFormatter(high) },
    });
    f.svg.append(shape("line", { x1: f.toX(low), x2: f.toX(high), y1: f.toY(low), y2: f.toY(high), stroke: "var(--faint)", "stroke-dasharray": "5 4" }));
    f.svg.append(shape("text", { class: "axis-title", x: f.left + 6, y: f.top + 8 }, "measured"));
    for (const mark of marks) f.svg.append(shape("circle", { cx: f.toX(mark.x), cy: f.toY(mark.y), r: 4, fill: mark.run.color, "fill-opacity": 0.62 }));
    track(f, (px, py) => {
      let best = null, least = 24 ** 2;
      for (const mark of marks) {
        const far = (f.toX(mark.x) - px) ** 2 + (f.toY(mark.y) - py) ** 2;
        if (far < least) { least = far; best = mark; }
      }
      return best && { title: `${best.run.label}, step ${formatWhole(best.step)}`, rows: [["predicted", formatSeconds(best.x)], ["measured", formatSeconds(best.y)], ["off by", formatPercent(best.x / best.y - 1)]] };
    });
  });
  if (outside) figure.hint(`${formatWhole(outside)} step${outside > 1 ? "s lie" : " lies"} outside the axes; the first step of a session pays for warming up.`);
  addTable(figure, ["run", "step", "predicted", "measured", "off by"], () => runs.flatMap((run) => run.scatter.step.map((step, index) => {
    const [predicted, measured] = [run.scatter.predicted_s[index], run.scatter.measured_s[index]];
    return [run.label, formatWhole(step), formatSeconds(predicted), formatSeconds(measured), formatPercent(predicted / measured - 1)];
  })));
}

const besideHeight = 300, mostErrors = 10;

function busyErrorFigure() {
  const runs = data.runs.filter((run) => run.summary.busy_error.some(isKnown));
  if (!runs.length) return;
  const figure = addFigure({ id: "errors", title: "How far off the predictions are", marks: ["predicted", "measured"] });
  const groups = runs.flatMap((run) => [
    { name: `${run.label}, step`, value: run.summary.step_error, color: run.color },
    ...run.ranks_drawn.map((rank) => ({ name: `${run.label}, rank ${rank}`, value: run.summary.busy_error[rank], color: run.color, soft: true })),
  ]).filter((group) => isKnown(group.value));
  const steps = groups.filter((group) => !group.soft).slice(0, mostErrors);
  const ranks = groups.filter((group) => group.soft).sort((a, b) => b.value - a.value).slice(0, mostErrors - steps.length);
  const shown = groups.filter((group) => steps.includes(group) || ranks.includes(group));
  const [, high] = extent(shown.map((group) => group.value));
  keepDrawn(figure.body, (width) => {
    // As tall as the figure beside it, with bars no thicker than they need be.
    const row = Math.min(48, (besideHeight - 8) / shown.length), bar = Math.min(20, row - 6);
    const left = Math.min(190, width * 0.46), right = 56;
    const svg = shape("svg", { width, height: shown.length * row + 8, role: "img", "aria-label": "Bars of the median prediction error of step time and of each rank's compute." });
    shown.forEach((group, index) => {
      const middle = (index + 0.5) * row + 4, long = Math.max(1, (group.value / high) * (width - left - right));
      svg.append(
        shape("text", { x: left - 10, y: middle + 4, "text-anchor": "end" }, group.name),
        shape("rect", { x: left, y: middle - bar / 2, width: long, height: bar, rx: 2, fill: group.color, "fill-opacity": group.soft ? 0.45 : 1 }),
        shape("text", { x: left + long + 8, y: middle + 4 }, formatPercent(group.value)),
      );
    });
    figure.body.replaceChildren(svg);
  });
  figure.hint("Median over steps of |measured − predicted| ÷ measured: of the whole step, and of each rank's compute.");
  if (shown.length < groups.length) figure.hint(`The largest ${shown.length} of ${groups.length}.`);
  addTable(figure, ["what", "median error"], () => groups.map((group) => [group.name, formatPercent(group.value)]));
}

function seriesFigure(id, title, line, format, label, y = {}) {
  const lines = runLines(line);
  if (!lines.length) return;
  const figure = addFigure({ id, title, marks: ["measured"] });
  figure.legend.append(...lines.map((each) => key("line", each.color, each.name)));
  drawLines(figure, lines, { y: { format, ...y }, label });
  sampledHint(figure, lines);
  lineTable(figure, lines, ["step", ...lines.map((each) => each.name)], [formatWhole, format]);
}

function lossFigure() {
  // Runs on the same documents learn alike: the first is a broad band, so that the others show on it.
  const lines = runLines("loss", (_, index) => ({ thick: index === 0 && data.runs.length > 1 }));
  if (!lines.length) return;
  const figure = addFigure({ id: "loss", title: "Loss against tokens", marks: ["measured"], wide: !hasFewRanks });
  figure.legend.append(...lines.map((line) => key("line", line.color, line.name)));
  const events = data.runs.flatMap((run) => (run.events ?? []).map((event) => ({ ...event, at: event.tokens })));
  drawLines(figure, lines, { events, x: { format: formatCount, axis: countFormatter }, xTitle: "tokens seen", y: { fromZero: false, format: formatLoss, axis: () => (value) => value.toLocaleString("en", { maximumFractionDigits: 3 }) }, label: "Training loss of each run against tokens seen." });
  if (events.some((event) => event.kind === "evaluation")) figure.legend.append(key("diamond", "var(--by-tokens)", "evaluation"));
  if (events.some((event) => event.kind === "fault")) figure.legend.append(key("line", "var(--fault)", "fault"));
  if (lines.some((line) => line.spikes.x.length)) {
    figure.legend.append(key("ring", "var(--fault)", "spike"));
    figure.hint("A spike lies more than 6 times the usual scatter above the median of the 16 steps before it; the scatter is the median distance from such a median, times 1.4826.");
  }
  sampledHint(figure, lines);
  lineTable(figure, lines, ["tokens seen", ...lines.map((line) => line.name)], [formatWhole, formatLoss]);
}

function heldOutFigures() {
  const y = { fromZero: false, axis: () => (value) => value.toLocaleString("en", { maximumFractionDigits: 3 }) };
  seriesFigure("held-out", "Held-out loss", "held_out", formatLoss, "Loss on held-out documents before the first step and after later ones.", y);
  const lines = runLines("held_out_lengths");
  if (!lines.length) return;
  const figure = addFigure({ id: "held-out-lengths", title: "Held-out loss by length of document", marks: ["measured"] });
  const format = (power) => formatCount(2 ** power);
  figure.legend.append(...lines.map((line) => key("line", line.color, line.name)));
  drawLines(figure, lines, { x: { format, axis: () => format }, xTitle: "tokens of a document, at least", y: { format: formatLoss, ...y }, label: "Last held-out loss of each run by length of document." });
  figure.hint("Of the last evaluation. A document is at least as long as its mark says, and shorter than twice that.");
  lineTable(figure, lines, ["tokens, at least", ...lines.map((line) => line.name)], [format, formatLoss]);
}

function memoryFigure() {
  const runs = data.runs.filter((run) => isKnown(run.memory.forecast_bytes) || run.memory.peak_bytes.some(isKnown));
  if (!runs.length) return;
  const figure = addFigure({ id: "memory", title: "Memory of the fullest rank", marks: ["predicted", "measured"], wide: true });
  const terms = [...new Set(runs.flatMap((run) => Object.keys(run.memory.terms)))];
  // Shades of one hue, in the order of the legend: no other figure has it.
  const shade = (term) => Math.round((100 * terms.indexOf(term)) / Math.max(1, terms.length - 1));
  const colorOf = (term) => `color-mix(in oklab, var(--memory-last) ${shade(term)}%, var(--memory-first))`;
  figure.legend.append(...terms.map((term) => key("bar", colorOf(term), term.replaceAll("_", " "))));
  const peakOf = (run) => { const known = run.memory.peak_bytes.filter(isKnown); return known.length ? Math.max(...known) : null; };
  const high = Math.max(...runs.flatMap((run) => [run.memory.forecast_bytes ?? 0, peakOf(run) ?? 0])) || 1;
  keepDrawn(figure.body, (width) => {
    const group = 84, right = 132;
    const svg = shape("svg", { width, height: runs.length * group, role: "img", "aria-label": "Forecast memory, by what it is made of, above the measured peak of the fullest rank." });
    const long = (bytes) => (bytes / high) * (width - right);
    runs.forEach((run, index) => {
      const top = index * group;
      svg.append(shape("text", { x: 0, y: top + 14 }, run.label));
      let at = 0;
      for (const [term, bytes] of Object.entries(run.memory.terms)) {
        if (!isKnown(bytes)) continue;
        const bar = shape("rect", { x: at, y: top + 24, width: Math.max(0, long(bytes) - 1), height: 18, fill: colorOf(term) });
        bar.append(shape("title", {}, `${term.replaceAll("_", " ")}: ${formatBytes(bytes)}`));
        svg.append(bar);
        at += long(bytes);
      }
      const { forecast_bytes: forecast } = run.memory;
      if (isKnown(forecast)) svg.append(shape("text", { x: long(forecast) + 8, y: top + 37 }, `${formatBytes(forecast)} forecast`));
      const peak = peakOf(run);
      if (isKnown(peak)) svg.append(
        shape("rect", { x: 0, y: top + 46, width: Math.max(1, long(peak) - 1), height: 18, fill: "var(--ink)" }),
        shape("text", { x: long(peak) + 8, y: top + 59 }, `${formatBytes(peak)} measured`),
      );
    });
    figure.body.replaceChildren(svg);
  });
  figure.legend.append(key("bar", "var(--ink)", "measured peak"));
  addTable(figure, ["run", "what", "bytes", ""], () => runs.flatMap((run) => [
    ...Object.entries(run.memory.terms).map(([term, bytes]) => [run.label, `forecast: ${term.replaceAll("_", " ")}`, formatWhole(bytes), formatBytes(bytes)]),
    [run.label, "forecast: all", formatWhole(run.memory.forecast_bytes), formatBytes(run.memory.forecast_bytes)],
    ...run.ranks_drawn.map((rank, index) => [run.label, `measured peak: rank ${rank}`, formatWhole(run.memory.peak_bytes[index]), formatBytes(run.memory.peak_bytes[index])]),
  ]));
}
