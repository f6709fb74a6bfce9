// Guides that were run on the runs: each step a row, with lines from the steps that it came after.

function wrapped(text, width, font) {
  wrapped.pen ??= document.createElement("canvas").getContext("2d");
  wrapped.pen.font = font;
  const lines = [];
  for (let word of text.split(/\s+/)) {
    const longer = lines.length ? `${lines[lines.length - 1]} ${word}` : null;
    if (longer !== null && wrapped.pen.measureText(longer).width <= width) { lines[lines.length - 1] = longer; continue; }
    // A word that is longer than a line, such as a path, goes on in the next.
    while (word.length > 1 && wrapped.pen.measureText(word).width > width) {
      let count = word.length - 1;
      while (count > 1 && wrapped.pen.measureText(word.slice(0, count)).width > width) count -= 1;
      lines.push(word.slice(0, count));
      word = word.slice(count);
    }
    lines.push(word);
  }
  return lines;
}

function runbookMark(state, x, y) {
  const colors = { done: "var(--by-tokens)", stopped: "var(--in-order)", failed: "var(--fault)", skipped: "var(--line)" };
  if (state === "failed") return shape("path", { d: `M${x} ${y - 7} l7 7 l-7 7 l-7 -7 z`, fill: colors[state] });
  if (state === "skipped") return shape("circle", { cx: x, cy: y, r: 4, fill: "var(--paper)", stroke: colors[state], "stroke-width": 2 });
  if (state === "stopped") return shape("rect", { x: x - 5, y: y - 5, width: 10, height: 10, rx: 1.5, fill: colors[state] });
  return shape("circle", { cx: x, cy: y, r: 5.5, fill: colors[state] });
}

function runbookRows(step, width, family) {
  const rows = [];
  const add = (kind, text, size, weight = 400) => {
    if (text) for (const line of wrapped(text, width, `${weight} ${size}px ${family}`)) rows.push({ kind, line, height: size + 5 });
  };
  add("step", step.outcome ? `${step.name}: ${step.outcome}` : step.name, 14, step.state === "skipped" ? 400 : 600);
  if (step.state !== "skipped") {
    if (step.state !== "done") add("why", step.sentence, 13);
    add("numbers", step.numbers.slice(-4).map((each) => `${each.name} ${each.value}`).join(" · "), 12);
    add("conclusion", step.conclusion, 14);
    if (step.command) add("command", `${step.command_is}: ${step.command}`, 12);
  }
  return rows;
}

function runbookFigure(book) {
  const figure = addFigure({ id: book.id, title: data.runs.length > 1 ? `${book.title}, ${book.run}` : book.title, marks: ["measured"], wide: true });
  const states = [...new Set(book.steps.map((step) => step.state))];
  for (const [state, kind, color] of [["done", "dot", "var(--by-tokens)"], ["stopped", "bar", "var(--in-order)"], ["failed", "diamond", "var(--fault)"], ["skipped", "ring", "var(--line)"]]) {
    if (states.includes(state)) figure.legend.append(key(kind, color, state));
  }
  const family = getComputedStyle(document.body).fontFamily;
  keepDrawn(figure.body, (width) => {
    const gap = width < 560 ? 12 : 18, left = 9, edge = left + book.lanes * gap + 8;
    const svg = shape("svg", { role: "img", "aria-label": `${book.title}: ${book.steps.map((step) => `${step.name} ${step.state}`).join(", ")}` });
    const lines = shape("g"), marks = shape("g"), words = shape("g");
    const tops = [], laneX = (index) => left + book.steps[index].lane * gap;
    let y = 4;
    book.steps.forEach((step, index) => {
      tops.push(y + 10);
      marks.append(runbookMark(step.state, laneX(index), y + 10));
      const rows = runbookRows(step, width - edge - 4, family);
      for (const row of rows) {
        words.append(shape("text", { x: edge, y: y + 15, class: `runbook-${row.kind}${step.state === "skipped" ? " is-skipped" : ""}` }, row.line));
        y += row.height;
      }
      y += step.state === "skipped" ? 6 : 12;
    });
    // Lines that were taken lie above the others.
    for (const line of [...book.edges].sort((one, other) => one.is_taken - other.is_taken)) {
      const [x1, y1, x2, y2] = [laneX(line.from), tops[line.from], laneX(line.to), tops[line.to]];
      const bend = Math.min(14, y2 - y1);
      lines.append(shape("path", {
        d: x1 === x2 ? `M${x1} ${y1} V${y2}` : `M${x1} ${y1} V${y2 - bend} C${x1} ${y2} ${x1} ${y2} ${x2} ${y2}`,
        fill: "none", stroke: line.is_taken ? "var(--soft)" : "var(--line)", "stroke-width": line.is_taken ? 2 : 1.2,
      }));
    }
    svg.setAttribute("width", width);
    svg.setAttribute("height", y);
    svg.append(lines, marks, words);
    figure.body.replaceChildren(svg);
  });
  figure.hint(book.note);
  addTable(figure, ["step", "state", "number", "value", "events", "asked", "lines"], () => book.steps.flatMap((step) => (
    step.numbers.length ? step.numbers : [{ name: missing, value: missing, events: 0, asked: step.sentence || step.command || missing, lines: "" }]
  ).map((each) => [step.name, step.state, each.name, each.value, formatWhole(each.events), each.asked, each.lines || missing])));
}
