// The page of one run, or of several on the same axes.

function runView(view, ids) {
  const head = element("header", { id: "head" });
  const log = element("section", { id: "events" });
  const figures = element("div", { id: "figures" });
  view.replaceChildren(head, log, figures);
  let timeline = null;
  return {
    path: `/api/run?${ids.map((id) => `id=${encodeURIComponent(id)}`).join("&")}`,
    show({ live, data: drawn }) {
      document.title = `${live.map((run) => `${run.label}, step ${formatWhole(run.step)}`).join(" · ")} · equipoise`;
      const pointer = hovered();
      if (drawn.runs) {
        take(drawn);
        // Runs that have not started are in the head only.
        const started = live.filter((run) => isKnown(run.steps) || run.about);
        data.runs.forEach((run, index) => {
          run.events = started[index]?.events ?? [];
          // Where all runs are one policy's, the first keeps the policy's colour.
          run.about = started[index]?.about ?? run.about;
        });
      }
      if (live.length === 1) headOfOne(head, live[0]); else headOfMany(head, live, drawn);
      showEvents(log, live);
      if (!drawn.runs) { figures.replaceChildren(element("p", { class: "empty" }, "Figures appear with the first step.")); return; }
      figures.querySelector(".empty")?.remove();
      drawnLast = null;
      if (!timeline?.refresh()) timeline = timelineFigure({ isLive: true });
      else drawnLast = document.getElementById("timeline");
      lossFigure();
      stepTimeFigure();
      if (live.some((run) => run.is_thinned)) thinnedHint(live);
      skewFigure();
      expertsFigure();
      waitFigure();
      seriesFigure("throughput", "Tokens per second", "tokens_per_s", formatCount, "Tokens a second, all ranks together, at each step of each run.", { axis: countFormatter });
      heldOutFigures();
      memoryFigure();
      planFigure();
      settleRows();
      pointer();
    },
    gone() {
      head.replaceChildren(element("h1", {}, "This run is no longer there."), element("p", {}, "Its folder was moved or deleted, or it is a link to another dashboard. ", element("a", { href: "#/" }, "All runs")));
      log.replaceChildren();
      figures.replaceChildren();
    },
  };
}

// What the pointer showed a tooltip of is shown again when the figure was drawn anew.
let pointerAt = null;
document.addEventListener("pointermove", (event) => { if (event.isTrusted) pointerAt = event.pointerType === "mouse" ? event : null; }, { passive: true });
function hovered() {
  const at = pointerAt, was = !tooltip.hidden;
  if (was) hideTooltip();
  return () => {
    if (!at || !was) return;
    const { clientX, clientY } = at;
    document.elementFromPoint(clientX, clientY)?.dispatchEvent(new PointerEvent("pointermove", { clientX, clientY, bubbles: true, pointerType: "mouse" }));
  };
}

function stepTimeFigure() {
  const lines = [
    ...runLines("predicted_step_s", (run) => ({ name: names.length > 1 ? `${run.label}, predicted` : "predicted", dashed: true })),
    ...runLines("measured_step_s", (run) => ({ name: names.length > 1 ? `${run.label}, measured` : "measured" })),
  ];
  const figure = liveLines("step-time", "Time of a step", lines, {
    format: formatSeconds, axis: secondsFormatter, fromZero: true, marks: ["predicted", "measured"],
    label: "Seconds of each step, predicted before it ran and measured.",
  });
  if (!figure) return;
  sampledHint(figure, lines);
  figure.node.querySelector(".finding").textContent = data.findings.steps ?? "";
  lineTable(figure, lines, ["step", ...lines.map((line) => line.name)], [formatWhole, formatSeconds]);
}

function thinnedHint(live) {
  const { label, held_steps: held, step } = live.find((run) => run.is_thinned);
  const node = document.getElementById("step-time")?.querySelector(".hint");
  if (node) node.append(` Of ${label} the dashboard holds ${formatWhole(held)} of ${formatWhole(step)} steps: the newest, loss spikes, and others evenly chosen. equipoise report reads all.`);
}

function back() { return element("a", { class: "back", href: "#/" }, "← All runs"); }

function headOfOne(head, run) {
  const of = isKnown(run.steps) ? `of ${formatWhole(run.steps)}` : "";
  const signed = isKnown(run.step_s) && isKnown(run.predicted_step_s) ? `predicted ${formatSeconds(run.predicted_step_s)}` : "";
  const memory = isKnown(run.forecast_bytes) ? `forecast ${formatBytes(run.forecast_bytes)}` : "fullest rank";
  const tiles = isKnown(run.loss) || run.step ? [
    tile("Step", formatWhole(run.step), [of, isKnown(run.left_s) ? `${formatAbout(run.left_s)} left` : ""].filter(Boolean).join(" · ")),
    tile("Loss", formatLoss(run.loss), isKnown(run.held_out_loss) ? `held out ${formatLoss(run.held_out_loss)}` : `${formatCount(run.tokens_seen)} tokens seen`),
    tile("A step takes", formatSeconds(run.step_s), signed),
    tile("Tokens a second", formatCount(run.tokens_per_s), "all ranks"),
    isKnown(run.skew) && data.runs[0].summary.ranks > 1 ? tile("Fullest rank", formatTimes(run.skew), "of the mean rank") : null,
    isKnown(run.wait_share) && data.runs[0].summary.ranks > 1 ? tile("Waiting", formatPercent(run.wait_share), "of the ranks' time") : null,
    tile("Peak memory", formatBytes(run.peak_memory_bytes), memory),
  ] : [];
  head.replaceChildren(
    back(),
    element("div", { class: "title" }, element("h1", {}, run.label), pill(run.state)),
    run.state_sentence ? element("p", { class: `state ${run.state}` }, run.state_sentence) : "",
    run.sentence ? element("p", { class: "sentence" }, run.sentence) : "",
    element("p", { class: "about" }, run.about, element("span", { class: "folder" }, run.folder)),
    isKnown(run.steps) && run.state === "running" ? bar(Math.min(1, run.step / run.steps)) : "",
    element("dl", { class: "tiles" }, ...tiles.filter(isKnown)),
  );
}

function headOfMany(head, live, drawn) {
  const wasScrolled = head.querySelector(".scroll")?.scrollLeft ?? 0;
  const colorOf = (run) => drawn.runs?.find((each) => each.label === run.label)?.color ?? "var(--line)";
  head.replaceChildren(
    back(),
    element("h1", {}, drawn.headline ?? "Runs side by side"),
    scrolled(element(
      "table", { class: "runs side" },
      element("thead", {}, element("tr", {}, ...["run", "state", "step", "loss", "a step", "predicted", "tokens/s", "waiting", "memory"].map((word, at) => element("th", { scope: "col", class: at > 1 ? "number" : at ? "doing" : "" }, word)))),
      element("tbody", {}, ...live.map((run) => element(
        "tr", {},
        element("th", { scope: "row" }, element("span", { class: "swatch", style: { background: colorOf(run) } }), element("a", { href: `#/run/${run.id}` }, run.label)),
        element("td", { class: "doing" }, pill(run.state)),
        ...[formatWhole(run.step), formatLoss(run.loss), formatSeconds(run.step_s), formatSeconds(run.predicted_step_s), formatCount(run.tokens_per_s), formatPercent(run.wait_share), formatBytes(run.peak_memory_bytes)].map((text) => element("td", { class: "number" }, text)),
      ))),
    )),
  );
  head.querySelector(".scroll").scrollLeft = wasScrolled;
}

const eventWords = { start: "start", evaluation: "evaluation", fault: "fault", stop: "stop" };

function showEvents(log, live) {
  const rows = live.flatMap((run) => run.events.map((event) => ({ ...event, run: run.label })));
  if (live.length > 1) rows.sort((one, other) => one.step - other.step);
  const text = JSON.stringify(rows);
  if (log.dataset.text === text) return;
  log.dataset.text = text;
  const isOpen = log.querySelector("details")?.open ?? false;
  const faults = rows.filter((row) => row.kind === "fault");
  // Faults stand above the figures, what went as it should below them.
  if (faults.length) document.getElementById("head").after(log); else document.getElementById("figures").after(log);
  const line = (row) => element(
    "li", { class: row.kind },
    element("span", { class: "when" }, `step ${formatWhole(row.step)}`), element("span", { class: "what" }, eventWords[row.kind] ?? row.kind),
    element("span", {}, live.length > 1 ? `${row.run}: ${row.text}` : row.text),
  );
  const newest = rows.slice(-3).reverse(), shown = [...new Set([...faults.slice(-3).reverse(), ...newest])];
  const others = rows.filter((row) => !shown.includes(row)).reverse();
  const details = others.length ? element("details", {}, element("summary", {}, `${others.length} earlier event${others.length === 1 ? "" : "s"}`), element("ul", {}, ...others.map(line))) : null;
  if (details) details.open = isOpen;
  log.replaceChildren(...(rows.length ? [element("h2", {}, "Events"), element("ul", {}, ...shown.map(line)), details].filter(isKnown) : []));
}
