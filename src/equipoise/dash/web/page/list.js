// The list of runs: what each is doing, its loss, one sentence; two or more are compared.

const chosen = new Set();

function listView(view) {
  const strip = element("div", { id: "strip" });
  const head = element("header", {}, element("h1", {}, "Runs"), element("p", { class: "eyebrow", id: "count" }));
  const cards = element("div", { class: "runs-list", id: "cards" });
  const bar = element("div", { class: "compare", hidden: true });
  view.replaceChildren(head, strip, cards, bar);
  const known = new Map();
  const showBar = () => {
    const ids = [...chosen].filter((id) => known.has(id));
    bar.hidden = ids.length === 0;
    bar.replaceChildren(
      element("span", {}, ids.length === 1 ? "1 run chosen; choose another to compare." : `${ids.length} runs chosen`),
      ids.length > 1 ? element("a", { class: "button", href: `#/runs/${ids.join(",")}` }, "Compare") : null,
      element("button", { type: "button", onclick: () => { chosen.clear(); document.querySelectorAll(".card input").forEach((box) => { box.checked = false; }); showBar(); } }, "Clear"),
    );
  };
  const choose = (id, box) => {
    if (box.checked && chosen.size >= 8) { box.checked = false; return; }
    if (box.checked) chosen.add(id); else chosen.delete(id);
    showBar();
  };
  return {
    path: "/api/runs",
    show({ runs, left_out: leftOut }) {
      document.title = `${runs.filter((run) => run.state === "running").length} running · equipoise`;
      const running = runs.filter((run) => run.state === "running").length;
      const words = runs.length ? `${runs.length} run${runs.length === 1 ? "" : "s"}, ${running} running` : "";
      document.getElementById("count").textContent = leftOut ? `${words}; ${formatWhole(leftOut)} more are not shown` : words;
      if (!runs.length) {
        known.clear();
        cards.replaceChildren(element("p", { class: "empty" }, "No run yet. One that ", element("code", {}, "equipoise train run.toml"), " starts appears here by itself."));
        return;
      }
      cards.querySelector(".empty")?.remove();
      const ids = new Set(runs.map((run) => run.id));
      for (const [id, { node }] of known) if (!ids.has(id)) { node.remove(); known.delete(id); chosen.delete(id); }
      runs.forEach((run, index) => {
        const text = JSON.stringify(run);
        const before = known.get(run.id);
        let node = before?.node;
        if (before?.text !== text) {
          node = card(run, choose);
          const hadFocus = before?.node.contains(document.activeElement) && document.activeElement.tagName;
          before?.node.replaceWith(node);
          if (hadFocus) node.querySelector(hadFocus.toLowerCase())?.focus();
          known.set(run.id, { node, text });
        }
        if (cards.children[index] !== node) cards.insertBefore(node, cards.children[index] ?? null);
      });
      showBar();
    },
    async also() { if (hasServing) await showStrip(strip); },
  };
}

function card(run, choose) {
  const box = element("input", { type: "checkbox", "aria-label": `choose ${run.label}`, onchange: () => choose(run.id, box) });
  box.checked = chosen.has(run.id);
  const progress = isKnown(run.steps) ? Math.min(1, run.step / run.steps) : null;
  const facts = [
    ["step", isKnown(run.steps) ? `${formatWhole(run.step)} / ${formatWhole(run.steps)}` : formatWhole(run.step)],
    ["loss", formatLoss(run.loss)],
    ["a step", formatSeconds(run.step_s)],
    ["tokens/s", formatCount(run.tokens_per_s)],
  ];
  return element(
    "article", { class: `card ${run.state}`, "data-id": run.id },
    element("div", { class: "top" }, element("h2", {}, element("a", { href: `#/run/${run.id}` }, run.label)), pill(run.state, isKnown(run.left_s) ? `, ${formatAbout(run.left_s)} left` : ""), element("label", { class: "pick" }, box)),
    element("div", { class: "spark" }, spark(run.spark)),
    element("dl", { class: "facts" }, ...facts.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value)))),
    element("p", { class: "said" }, ["fault", "silent", "unreadable", "reading"].includes(run.state) ? run.state_sentence : run.sentence || run.state_sentence),
    run.about ? element("p", { class: "about" }, run.about) : null,
    progress === null || run.state !== "running" ? null : bar(progress),
  );
}

function bar(share) {
  const svg = shape("svg", { class: "progress", viewBox: "0 0 100 2", preserveAspectRatio: "none", "aria-hidden": "true" });
  svg.append(shape("rect", { width: 100, height: 2, fill: "var(--grid)" }), shape("rect", { width: 100 * share, height: 2, fill: "var(--by-work)" }));
  return svg;
}

// The loss as a small line, its spikes ringed.
function spark({ x, y, spikes }) {
  const width = 260, height = 56, room = 5;
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": y.length ? `loss, from ${formatLoss(y[0])} to ${formatLoss(y.at(-1))}` : "no loss yet" });
  if (!y.length) return svg;
  const [low, high] = extent([...y, ...spikes.map((each) => each[1])], { fromZero: false, room: 0 });
  const [first, last] = [x[0], Math.max(x.at(-1), ...spikes.map((each) => each[0]))];
  // Medians leave a spike out: the line passes through it all the same.
  const line = [...x.map((at, index) => [at, y[index]]), ...spikes].sort((one, other) => one[0] - other[0]);
  const toX = (at) => room + ((at - first) / (last - first || 1)) * (width - 2 * room);
  const toY = (value) => height - room - ((value - low) / (high - low || 1)) * (height - 2 * room);
  const points = line.map(([at, value]) => `${toX(at).toFixed(1)},${toY(value).toFixed(1)}`);
  if (points.length === 1) points.push(`${width - room},${toY(y[0]).toFixed(1)}`);
  svg.append(shape("polyline", { points: points.join(" "), fill: "none", stroke: "var(--by-work)", "stroke-width": 1.6, "stroke-linejoin": "round", "vector-effect": "non-scaling-stroke" }));
  // Dots are lines without length, so that stretching the picture leaves them round.
  for (const [at, value] of spikes) svg.append(shape("path", { class: "spike", d: `M${toX(at).toFixed(1)} ${toY(value).toFixed(1)}h0`, stroke: "var(--fault)", "stroke-width": 7, "stroke-linecap": "round", "vector-effect": "non-scaling-stroke" }));
  return svg;
}
