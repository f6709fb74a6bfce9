// Ask the dashboard, and know whether what it answers is new.

const etags = new Map();

// {status, isNew, value}: the value is read only if it is new. Throws if nobody answers.
async function ask(path) {
  const answer = await fetch(path, { cache: "no-cache", signal: AbortSignal.timeout(20_000) });
  const etag = answer.headers.get("ETag");
  if (answer.ok && etag && etags.get(path) === etag) return { status: answer.status, isNew: false };
  const value = await answer.json();
  if (answer.ok) etags.set(path, etag);
  return { status: answer.status, isNew: true, value };
}

// The next answer counts as new: another view is shown.
function forget() { etags.clear(); }

function formatAbout(value) {
  if (!isKnown(value)) return missing;
  const units = [[86_400, "day"], [3600, "h"], [60, "min"], [1, "s"]];
  const [unit, word] = units.find(([size]) => value >= size) ?? [1, "s"];
  const count = Math.round(value / unit);
  return `${count} ${word}${word === "day" && count !== 1 ? "s" : ""}`;
}

// Name, value, and a smaller line below: the numbers at the head of a page.
function tile(name, value, below = "") {
  return element("div", { class: "tile" }, element("dt", {}, name), element("dd", {}, value, element("span", { class: "below" }, below)));
}

const stateWords = { running: "running", reading: "reading", finished: "finished", interrupted: "interrupted", fault: "ended by a fault", silent: "silent", lost: "no answer", unreadable: "not readable" };

function pill(state, more = "") { return element("span", { class: `pill ${state}` }, `${stateWords[state] ?? state}${more}`); }

// A figure of lines over one minute-by-minute axis or over steps; none without a point.
function liveLines(id, title, lines, { format, axis, isWhole = false, fromZero = true, xTitle, label, x, marks = ["measured"], wide = false }) {
  const drawn = lines.filter((line) => line.y.length > 0);
  if (!drawn.length) { document.getElementById(id)?.remove(); return null; }
  const figure = addFigure({ id, title, marks, wide });
  figure.legend.append(...drawn.map((line) => key(line.dashed ? "dashes" : "line", line.color, line.name)));
  drawLines(figure, drawn, { y: { format, axis, fromZero, isWhole }, xTitle, label, x });
  return figure;
}
