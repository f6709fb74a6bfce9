// The timeline: a lane for each rank, a box for each span; zoom and pan over the run's time.
//
// The lower part of a rank's lane is what was predicted: of a pipeline's rank each instruction, of
// another its compute and the rest of the step.
//
// All times are µs from the run's first span that the page holds. Between steps that the
// page does not hold there are gaps, drawn as such: time is never closed up.

const spanColors = ["forward", "backward", "backward-input", "backward-weight", "reduce", "optimizer", "plan", "batch", "save", "load", "measure", "compute", "rest"];
const spanWords = { wait: "waiting", compute: "predicted compute", rest: "predicted rest of a step" };
const waitName = "wait";
const MEASURED_SHARE = 0.62;

// Depth of each span among the spans of its lane that contain it. One that begins a little
// before its forerunner ends was rounded, not nested: nested means more than half inside.
function depths(lane) {
  const open = [];
  return lane.t.map((start, index) => {
    while (open.length && open.at(-1) <= start + lane.d[index] / 2) open.pop();
    open.push(start + lane.d[index]);
    return open.length - 1;
  });
}

class Timeline {
  constructor(canvas, status) {
    this.canvas = canvas;
    this.status = status;
    this.pen = canvas.getContext("2d");
    this.left = 58;
    this.axis = 26;
    this.pointers = new Map();
    this.listen();
  }

  // Show another run; the step and the zoom stay where both runs have them.
  show(run, step) {
    this.run = run;
    this.timeline = run.timeline;
    for (const lane of this.timeline.ranks) lane.depth ??= depths(lane);
    this.end = Math.max(1, ...this.timeline.steps.map((each) => each.to));
    this.goTo(step);
  }

  stepAt(time) {
    const { steps } = this.timeline;
    let last = 0;
    for (let index = 0; index < steps.length; index += 1) if (steps[index].from <= time) last = index;
    return last;
  }

  goTo(index) {
    const { steps } = this.timeline;
    this.chosen = Math.max(0, Math.min(steps.length - 1, index));
    const { from, to } = steps[this.chosen];
    const room = (to - from) * 0.04;
    this.look(from - room, to + room);
    this.gone = [this.from, this.to];
  }

  // Whether the newest step is looked at, just as it was first shown.
  get isNewest() {
    return this.chosen === this.timeline.steps.length - 1 && this.gone[0] === this.from && this.gone[1] === this.to;
  }

  look(from, to) {
    const least = 20, most = this.end * 1.1;
    let span = Math.max(least, Math.min(most, to - from));
    const middle = (from + to) / 2;
    from = middle - span / 2;
    // Half a view past either end is as far as it goes.
    from = Math.max(-span / 2, Math.min(this.end - span / 2, from));
    this.from = from;
    this.to = from + span;
    this.draw();
  }

  zoom(factor, px = (this.left + this.width) / 2) {
    const at = this.timeAt(px);
    this.look(at - (at - this.from) * factor, at + (this.to - at) * factor);
  }

  pan(share) { const by = (this.to - this.from) * share; this.look(this.from + by, this.to + by); }

  timeAt(px) { return this.from + ((px - this.left) / (this.width - this.left)) * (this.to - this.from); }
  xOf(time) { return this.left + ((time - this.from) / (this.to - this.from)) * (this.width - this.left); }

  laneHeight() {
    const lanes = this.timeline.ranks.length;
    return Math.max(9, Math.min(46, Math.floor(520 / lanes)));
  }

  resize(width) { this.width = width; this.draw(); }

  draw() {
    if (!this.width || !this.run) return;
    const lane = this.laneHeight();
    const height = this.axis + this.timeline.ranks.length * lane + 4;
    const dense = window.devicePixelRatio || 1;
    const { canvas, pen } = this;
    const wide = Math.round(this.width * dense), high = Math.round(height * dense);
    if (canvas.width !== wide || canvas.height !== high) {
      canvas.width = wide;
      canvas.height = high;
      canvas.style.height = `${height}px`;
    }
    const style = getComputedStyle(document.documentElement);
    this.ink = (name) => style.getPropertyValue(`--${name}`).trim();
    pen.setTransform(dense, 0, 0, dense, 0, 0);
    pen.clearRect(0, 0, this.width, height);
    pen.font = "12px system-ui, sans-serif";
    pen.textBaseline = "middle";
    this.drawAxis(height);
    pen.save();
    pen.beginPath();
    pen.rect(this.left, this.axis, this.width - this.left, height);
    pen.clip();
    this.drawGaps(height);
    this.timeline.ranks.forEach((rank, row) => this.drawLane(rank, this.axis + row * lane, lane));
    this.drawStepEdges(height);
    pen.restore();
    this.drawRankNames(lane);
    this.tell();
  }

  drawAxis(height) {
    const { pen } = this;
    const span = this.to - this.from;
    const chosen = this.timeline.steps[this.chosen];
    // Seconds count from the start of the chosen step.
    const format = secondsFormatter(Math.max(span, Math.abs(this.to - chosen.from)) / 1e6);
    for (const tick of roundTicks(this.from - chosen.from, this.to - chosen.from, Math.max(2, (this.width - this.left) / 110))) {
      const x = this.xOf(tick + chosen.from);
      if (x < this.left - 1) continue;
      pen.fillStyle = this.ink("grid");
      pen.fillRect(Math.round(x), this.axis, 1, height - this.axis);
      pen.fillStyle = this.ink("soft");
      const text = format(tick / 1e6);
      const half = pen.measureText(text).width / 2;
      pen.textAlign = "center";
      pen.fillText(text, Math.max(this.left + half, Math.min(this.width - half, x)), this.axis / 2);
    }
  }

  drawGaps(height) {
    const { pen } = this;
    const { steps } = this.timeline;
    steps.forEach((step, index) => {
      if (!step.is_before_gap || index + 1 === steps.length) return;
      const from = Math.max(this.left, this.xOf(step.to)), to = Math.min(this.width, this.xOf(steps[index + 1].from));
      if (to - from < 1) return;
      pen.fillStyle = this.ink("grid");
      pen.fillRect(from, this.axis, to - from, height);
      const text = `steps ${step.step + 1}–${steps[index + 1].step - 1} are not on this page`;
      if (pen.measureText(text).width + 16 > to - from) return;
      pen.fillStyle = this.ink("soft");
      pen.textAlign = "center";
      pen.fillText(text, (from + to) / 2, (this.axis + height) / 2);
    });
  }

  drawLane(rank, top, lane) {
    const gap = lane > 16 ? 4 : 1;
    if (!rank.predicted) {
      this.drawSpans(rank, rank.depth, top, lane, gap);
      return;
    }
    const measured = Math.round(lane * MEASURED_SHARE);
    this.drawSpans(rank, rank.depth, top, measured, gap / 2);
    this.pen.globalAlpha = 0.5;
    this.drawSpans(rank.predicted, null, top + measured - gap / 2, lane - measured, gap / 2);
    this.pen.globalAlpha = 1;
  }

  drawSpans(rank, depth, top, lane, gap) {
    let inked = -1;
    for (let index = 0; index < rank.t.length; index += 1) {
      const start = rank.t[index], stop = start + rank.d[index];
      if (stop < this.from || start > this.to) continue;
      const x = Math.max(this.left - 2, this.xOf(start)), right = Math.min(this.width + 2, this.xOf(stop));
      // Of spans narrower than half a pixel, one a pixel is enough.
      if (right - x < 0.5) {
        if (Math.floor(right) === inked) continue;
        inked = Math.floor(right);
      }
      const inset = depth ? Math.min(depth[index] * 4, lane / 3) : 0;
      this.drawSpan(this.timeline.names[rank.name[index]], x, top + gap / 2 + inset, Math.max(0.5, right - x), lane - gap - inset);
    }
  }

  drawSpan(name, x, y, width, height) {
    const { pen } = this;
    const room = width > 3 ? 0.75 : 0;
    if (name === waitName) {
      // Waiting is emptiness: pale, hatched, with nothing solid in it.
      pen.fillStyle = this.ink("wait");
      pen.fillRect(x, y, width - room, height);
      if (width > 6) {
        pen.save();
        pen.beginPath();
        pen.rect(x, y, width - room, height);
        pen.clip();
        pen.strokeStyle = this.ink("wait-ink");
        pen.globalAlpha = 0.35;
        pen.beginPath();
        const first = Math.floor(Math.max(x, 0) / 8) * 8 - height;
        for (let at = first; at < Math.min(x + width, this.width); at += 8) { pen.moveTo(at, y + height); pen.lineTo(at + height, y); }
        pen.stroke();
        pen.restore();
      }
    } else {
      pen.fillStyle = this.ink(spanColors.includes(name) ? `span-${name}` : "span-other");
      pen.fillRect(x, y, width - room, height);
    }
    if (height < 18) return;
    const from = Math.max(x, this.left), free = Math.min(x + width, this.width) - from - 12;
    if (free < 20 || pen.measureText(name).width > free) return;
    pen.textAlign = "left";
    pen.fillStyle = name === waitName ? this.ink("wait-ink") : textOn(pen.fillStyle);
    pen.fillText(name, from + 6, y + height / 2);
  }

  drawStepEdges(height) {
    const { pen } = this;
    for (const step of this.timeline.steps) {
      const x = this.xOf(step.from);
      if (x < this.left || x > this.width) continue;
      pen.fillStyle = this.ink("ink");
      pen.globalAlpha = (this.timeline.steps.length * (this.to - this.from)) / this.end > 40 ? 0.15 : 0.7;
      pen.fillRect(Math.round(x), this.axis, 1, height);
      pen.globalAlpha = 1;
    }
  }

  drawRankNames(lane) {
    const { pen } = this;
    pen.fillStyle = this.ink("soft");
    pen.textAlign = "left";
    const every = Math.max(1, Math.ceil(14 / lane));
    this.timeline.ranks.forEach((rank, row) => {
      if (row % every === 0) pen.fillText(lane > 14 ? `rank ${rank.rank}` : String(rank.rank), 0, this.axis + (row + 0.5) * lane);
    });
  }

  tell() {
    // A step that only shows its edge is not what is looked at.
    const least = (this.to - this.from) * 0.06;
    const seen = this.timeline.steps.filter((each) => Math.min(each.to, this.to) - Math.max(each.from, this.from) > Math.min(least, (each.to - each.from) / 2));
    const [from, to] = [seen[0] ?? this.timeline.steps[this.stepAt(this.from)], seen.at(-1) ?? this.timeline.steps[this.stepAt(this.to)]].map((each) => each.step);
    const steps = from === to ? `step ${formatWhole(from)}` : `steps ${formatWhole(from)} to ${formatWhole(to)}`;
    this.status.textContent = `${this.run.label}, ${steps}: ${formatSeconds((this.to - this.from) / 1e6)} shown`;
    Object.assign(this.canvas.dataset, { from: this.from, to: this.to, run: this.run.label });
    this.onlook?.();
  }

  // The innermost span under a point.
  spanAt(px, py) {
    const row = Math.floor((py - this.axis) / this.laneHeight());
    const rank = this.timeline.ranks[row];
    if (!rank || px < this.left) return null;
    const time = this.timeAt(px), slack = (this.to - this.from) / (this.width - this.left);
    const below = (py - this.axis) / this.laneHeight() - row;
    if (rank.predicted && below > MEASURED_SHARE) return this.predictedAt(rank, time, slack);
    let best = null;
    for (let index = 0; index < rank.t.length; index += 1) {
      const isUnder = rank.t[index] - slack <= time && time <= rank.t[index] + rank.d[index] + slack;
      if (isUnder && (best === null || rank.depth[index] > rank.depth[best] || (rank.depth[index] === rank.depth[best] && rank.t[index] <= time))) best = index;
    }
    if (best === null) return null;
    const rows = [["duration", formatSeconds(rank.d[best] / 1e6)], ["step", formatWhole(rank.step[best])]];
    if (isKnown(rank.micro_batch[best])) rows.push(["micro-batch", formatWhole(rank.micro_batch[best])]);
    return { title: `${this.timeline.names[rank.name[best]]} · rank ${rank.rank}`, rows };
  }

  predictedAt(rank, time, slack) {
    const { name, t, d, micro_batch: microBatch } = rank.predicted;
    const at = t.findIndex((start, index) => start - slack <= time && time <= start + d[index] + slack);
    if (at < 0) return null;
    const rows = [["predicted", formatSeconds(d[at] / 1e6)]];
    if (isKnown(microBatch[at])) rows.push(["micro-batch", formatWhole(microBatch[at])]);
    const span = this.timeline.names[name[at]];
    return { title: `${spanWords[span] ?? span} · rank ${rank.rank}`, rows };
  }

  listen() {
    const { canvas } = this;
    const place = (event) => { const box = canvas.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };
    canvas.addEventListener("wheel", (event) => {
      const [px] = place(event);
      if (Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey) {
        event.preventDefault();
        this.pan((event.deltaX || event.deltaY) / this.width);
      } else if (event.ctrlKey || event.metaKey || document.activeElement === canvas) {
        // A wheel that is only passing by scrolls the page.
        event.preventDefault();
        this.zoom(Math.exp(Math.max(-60, Math.min(60, event.deltaY)) * 0.006), px);
      }
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      this.pointers.set(event.pointerId, place(event));
      canvas.classList.add("is-dragged");
    });
    canvas.addEventListener("pointermove", (event) => {
      const now = place(event), before = this.pointers.get(event.pointerId);
      if (!before) {
        const span = this.spanAt(...now);
        if (span) showTooltip(event.pageX, event.pageY, span.title, span.rows); else hideTooltip();
        return;
      }
      hideTooltip();
      const other = [...this.pointers].find(([id]) => id !== event.pointerId)?.[1];
      if (other) {
        const was = Math.abs(before[0] - other[0]), is = Math.abs(now[0] - other[0]);
        if (was > 8 && is > 8) this.zoom(was / is, (now[0] + other[0]) / 2);
      } else {
        this.pan((before[0] - now[0]) / (this.width - this.left));
      }
      this.pointers.set(event.pointerId, now);
    });
    const release = (event) => {
      this.pointers.delete(event.pointerId);
      if (!this.pointers.size) canvas.classList.remove("is-dragged");
    };
    for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, release);
    canvas.addEventListener("pointerleave", hideTooltip);
    canvas.addEventListener("click", (event) => {
      const span = this.spanAt(...place(event));
      if (span) showTooltip(event.pageX, event.pageY, span.title, span.rows);
    });
    canvas.addEventListener("keydown", (event) => {
      const act = {
        ArrowLeft: () => this.pan(-0.2), ArrowRight: () => this.pan(0.2),
        "+": () => this.zoom(0.7), "=": () => this.zoom(0.7), "-": () => this.zoom(1 / 0.7),
        "[": () => this.goTo(this.chosen - 1), "]": () => this.goTo(this.chosen + 1),
        0: () => this.look(0, this.end), Home: () => this.goTo(0), End: () => this.goTo(this.timeline.steps.length - 1),
      }[event.key];
      if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      act();
    });
  }
}

// Black or white, whichever reads better on a #rrggbb colour.
function textOn(color) {
  const [red, green, blue] = [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16));
  return 0.299 * red + 0.587 * green + 0.114 * blue > 140 ? "#14161a" : "#ffffff";
}

// A live one opens at the newest step; its answer takes newer data, or says that it cannot.
function timelineFigure({ isLive = false } = {}) {
  let runs = data.runs.filter((run) => run.timeline.steps.length);
  if (!runs.length) return null;
  const hasPredicted = runs.some((run) => run.timeline.ranks.some((rank) => rank.predicted));
  const figure = addFigure({ id: "timeline", title: "What each rank did, and when", marks: hasPredicted ? ["measured", "predicted"] : ["measured"], wide: true });
  const present = [...new Set(runs.flatMap((run) => run.timeline.names))];
  const order = [...spanColors.slice(0, 4), waitName, ...spanColors.slice(4)];
  present.sort((a, b) => (order.indexOf(a) + 1 || 99) - (order.indexOf(b) + 1 || 99));
  figure.legend.append(...present.map((name) => (name === waitName ? key("hatch", "var(--wait-ink)", spanWords[name]) : key("bar", `var(--span-${spanColors.includes(name) ? name : "other"})`, spanWords[name] ?? name))));
  const canvas = element("canvas", {
    tabindex: "0", role: "application",
    "aria-label": "Timeline of ranks. Arrows move, plus and minus zoom, brackets go to the previous and next step, zero shows everything.",
  });
  const status = element("span", { "aria-live": "polite" });
  figure.body.append(canvas);
  const timeline = new Timeline(canvas, status);

  const picker = element("select", { "aria-label": "step", onchange: () => timeline.goTo(Number(picker.value)) });
  const fill = () => picker.replaceChildren(...timeline.timeline.steps.map((each, index) => element("option", { value: index }, `step ${formatWhole(each.step)}`)));
  timeline.onlook = () => { if (picker.childElementCount) picker.value = timeline.chosen; };
  // The same step of another run, in the same part of it and as close.
  const switchTo = (index) => {
    const { steps } = timeline.timeline;
    const was = steps[timeline.chosen];
    const [from, to] = [timeline.from - was.from, timeline.to - was.from];
    const next = runs[index].timeline.steps;
    const same = next.findIndex((each) => each.step >= was.step);
    picker.replaceChildren();
    timeline.show(runs[index], same < 0 ? next.length - 1 : same);
    fill();
    const start = next[timeline.chosen].from;
    timeline.look(start + from, start + to);
  };
  const first = Math.max(0, runs.findIndex((run) => !run.is_in_order));
  const last = (run) => run.timeline.steps.length - 1;
  let newest = runs;
  const follow = () => {
    const at = runs.indexOf(timeline.run);
    runs = newest;
    timeline.show(runs[at], last(runs[at]));
    fill();
    timeline.onlook();
  };
  addSwitch(figure.controls, runs.map((run) => run.label), first, "run", switchTo);
  const button = (text, label, act) => element("button", { type: "button", "aria-label": label, onclick: act }, text);
  figure.controls.append(
    picker,
    element(
      "div", { class: "switch", role: "group", "aria-label": "view" },
      button("−", "zoom out", () => timeline.zoom(1 / 0.6)), button("+", "zoom in", () => timeline.zoom(0.6)),
      button("‹", "previous step", () => timeline.goTo(timeline.chosen - 1)), button("›", "next step", () => timeline.goTo(timeline.chosen + 1)),
      button("all", "show all steps", () => timeline.look(0, timeline.end)),
      isLive ? button("newest", "follow the newest step", () => follow()) : null,
    ),
    status,
  );
  const { bars, timeline: held } = runs[first];
  timeline.show(runs[first], isLive ? last(runs[first]) : nearest(held.steps.map((each) => each.step), bars.step[bars.typical]));
  fill();
  timeline.onlook();
  keepDrawn(figure.body, (width) => timeline.resize(width));
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => timeline.draw());

  if (isLive) figure.hint("It follows the newest step; once moved, it stands still.");
  if (hasPredicted) figure.hint("Above as measured; below, paler, as predicted before the step ran.");
  figure.hint("Drag to move; pinch, Ctrl + wheel, or click and then the wheel, to zoom. Keys: ← → + − [ ] 0.");
  for (const { label, timeline: { steps, of, ranks, ranks_of: ranksOf } } of runs) {
    if (!isLive && steps.length < of) figure.hint(`Of ${label} the page holds ${steps.length} of ${formatWhole(of)} steps, evenly chosen, and the last ones; grey is where others were.`);
    if (ranks.length < ranksOf) figure.hint(`Of ${label} the page holds ${ranks.length} of ${formatWhole(ranksOf)} ranks, evenly chosen.`);
  }
  addTable(figure, ["run", "rank", "span", "count", "seconds in all"], () => runs.flatMap((run) => run.timeline.ranks.flatMap((rank) => run.timeline.names.map((name, index) => {
    const mine = rank.d.filter((_, at) => rank.name[at] === index);
    return [run.label, String(rank.rank), name, formatWhole(mine.length), formatSeconds(mine.reduce((a, b) => a + b, 0) / 1e6)];
  }).filter((row) => row[3] !== "0"))));
  return {
    refresh() {
      const next = data.runs.filter((run) => run.timeline.steps.length);
      const isSame = next.length === runs.length && next.every((run, at) => run.label === runs[at].label && run.timeline.ranks.length === runs[at].timeline.ranks.length);
      const isDrawn = next.every((run) => run.timeline.names.every((name) => present.includes(name)));
      if (!isSame || !isDrawn) return false;
      newest = next;
      if (timeline.isNewest) follow();
      return true;
    },
  };
}
