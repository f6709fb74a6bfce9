// Elements, the tooltip, and the frame (scales, axes, grid) that every SVG figure stands in.

function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "style") Object.assign(node.style, value);
    else if (value === true) node.setAttribute(key, "");
    else if (value !== false && isKnown(value)) node.setAttribute(key, value);
  }
  node.append(...children.filter(isKnown));
  return node;
}

function shape(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes)) {
    // Colours are custom properties, which only a style resolves.
    if (key === "fill" || key === "stroke") node.style[key] = value;
    else if (isKnown(value)) node.setAttribute(key, value);
  }
  node.append(...children.filter(isKnown));
  return node;
}

const tooltip = document.getElementById("tooltip");

// rows: [[name, value], ...]; a title above them.
function showTooltip(pageX, pageY, title, rows) {
  tooltip.replaceChildren(
    element("b", {}, title),
    ...rows.map(([name, value]) => element("div", {}, element("span", {}, name), element("span", {}, value))),
  );
  tooltip.hidden = false;
  // Measured at the corner first: near the right edge it would be squeezed, or widen the page.
  tooltip.style.left = "0px";
  const { width, height } = tooltip.getBoundingClientRect();
  const right = document.documentElement.clientWidth + window.scrollX;
  let left = pageX + 14;
  if (left + width > right - 8) left = pageX - width - 14;
  tooltip.style.left = `${Math.max(8, Math.min(left, right - width - 8))}px`;
  tooltip.style.top = `${Math.max(window.scrollY + 8, pageY - height - 12)}px`;
}

function hideTooltip() { tooltip.hidden = true; }

let figuresDrawn = 0;
// The figure that the next one follows, on a page that draws its figures again and again; null at
// the first. Undefined where each is drawn once, below the others.
let drawnLast;

// A figure: heading, marks, finding, controls, body, and its numbers as a table.
function addFigure({ id, title, marks = [], wide = false }) {
  const controls = element("div", { class: "controls" });
  const legend = element("ul", { class: "legend" });
  const body = element("div", { class: "plot" });
  const hints = element("p", { class: "hint" });
  const heading = element("h2", { id: `${id}-title` }, title);
  const node = element(
    "figure",
    { id, class: wide ? "wide" : "", "aria-labelledby": `${id}-title` },
    element(
      "div",
      { class: "head" },
      heading,
      element("span", { class: "marks" }, ...marks.map((mark) => element("span", { class: `mark ${mark}` }, mark))),
    ),
    element("p", { class: "finding" }, data.findings[id] ?? ""),
    controls,
    legend,
    body,
    hints,
  );
  const before = document.getElementById(id);
  if (before) renew(before, node);
  else if (drawnLast) drawnLast.after(node);
  else if (drawnLast === null) document.getElementById("figures").prepend(node);
  else document.getElementById("figures").append(node);
  if (drawnLast !== undefined) drawnLast = node;
  figuresDrawn += before ? 0 : 1;
  return { node, controls, legend, body, title, hint: (text) => hints.append(hints.textContent ? ` ${text}` : text) };
}

// Put a figure with newer numbers in the place of one; a table that was open stays open.
function renew(before, node) {
  const hadFocus = before.querySelector("summary") === document.activeElement;
  if (before.classList.contains("alone")) node.classList.add("alone");
  before.replaceWith(node);
  if (!before.querySelector("details")?.open) return;
  // The table is added after the body, so it is opened when the figure is whole.
  queueMicrotask(() => {
    const details = node.querySelector("details");
    if (details) details.open = true;
    if (hadFocus) details?.querySelector("summary").focus();
  });
}

// A figure that would stand alone in its row, beside a hole, has the row to itself.
function settleRows() {
  let isSecond = false;
  const figures = [...document.querySelectorAll("#figures > figure")];
  figures.forEach((figure, index) => {
    if (figure.classList.contains("wide")) { isSecond = false; return; }
    const next = figures[index + 1];
    const isAlone = !isSecond && (!next || next.classList.contains("wide"));
    figure.classList.toggle("alone", isAlone);
    isSecond = !isSecond && !isAlone;
  });
}

// Draw now, and again whenever the width changes.
function keepDrawn(body, draw) {
  let width = 0;
  const redraw = () => { width = body.clientWidth; if (width > 0) draw(width); };
  const observer = new ResizeObserver(() => {
    if (!body.isConnected) observer.disconnect();
    else if (body.clientWidth !== width) redraw();
  });
  observer.observe(body);
  redraw();
  return redraw;
}

function key(kind, color, text) {
  const mark = shape("svg", { width: 22, height: 12, "aria-hidden": "true" });
  if (kind === "bar") mark.append(shape("rect", { x: 5, y: 0, width: 12, height: 12, rx: 2, fill: color }));
  else if (kind === "hatch") mark.append(
    shape("rect", { x: 5, y: 0, width: 12, height: 12, fill: "var(--wait)" }),
    shape("path", { d: "M5 6 L11 0 M5 12 L17 0 M11 12 L17 6", stroke: color, "stroke-width": 1, "stroke-opacity": 0.6 }),
  );
  else if (kind === "diamond") mark.append(shape("path", { d: "M11 1 l5 5 l-5 5 l-5 -5 z", fill: color }));
  else if (kind === "dot") mark.append(shape("circle", { cx: 11, cy: 6, r: 4, fill: color }));
  else if (kind === "ring") mark.append(shape("circle", { cx: 11, cy: 6, r: 4, fill: "var(--paper)", stroke: color, "stroke-width": 2 }));
  else mark.append(shape("line", { x1: 0, x2: 22, y1: 6, y2: 6, stroke: color, "stroke-width": 2, "stroke-dasharray": kind === "dashes" ? "5 4" : null }));
  return element("li", {}, mark, text);
}

// Buttons of which one is pressed. Absent where there is no choice.
function addSwitch(controls, names, chosen, label, choose) {
  if (names.length < 2) return;
  const group = element("div", { class: "switch", role: "group", "aria-label": label });
  const press = (index) => {
    [...group.children].forEach((button, other) => button.setAttribute("aria-pressed", String(other === index)));
  };
  names.forEach((name, index) => group.append(
    element("button", { type: "button", onclick: () => { press(index); choose(index); } }, name),
  ));
  press(chosen);
  controls.append(group);
}

// A step picker: a slider over the steps that the page holds.
function addStepPicker(controls, steps, chosen, pick) {
  const output = element("output", {});
  const slider = element("input", { type: "range", min: 0, max: steps.length - 1, "aria-label": "step" });
  const show = () => {
    output.textContent = `step ${formatWhole(steps[slider.value])}`;
    slider.setAttribute("aria-valuetext", output.textContent);
  };
  slider.value = chosen;
  slider.addEventListener("input", () => { show(); pick(Number(slider.value)); });
  show();
  controls.append(element("label", {}, slider, " ", output));
}

// Scales, grid and axes. x and y: {low, high, log, isWhole, format, title, ticks}.
function frame(body, width, { height, x, y, label, left = 58, bottom = 42, top = 10, right = 14 }) {
  const svg = shape("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  svg.append(shape("title", {}, label));
  const scale = (axis, from, to) => {
    const at = axis.log ? Math.log2 : (value) => value;
    const span = at(axis.high) - at(axis.low) || 1;
    return (value) => from + ((at(value) - at(axis.low)) / span) * (to - from);
  };
  const toX = scale(x, left, width - right);
  const toY = scale(y, height - bottom, top);
  const yTicks = y.ticks ?? roundTicks(y.low, y.high, Math.max(2, Math.floor((height - bottom - top) / 48)), y.isWhole);
  for (const tick of yTicks) {
    svg.append(
      shape("line", { class: "grid", x1: left, x2: width - right, y1: toY(tick), y2: toY(tick) }),
      shape("text", { x: left - 8, y: toY(tick) + 4, "text-anchor": "end" }, y.format(tick)),
    );
  }
  const xTicks = x.ticks ?? roundTicks(x.low, x.high, Math.max(2, Math.floor((width - left - right) / 90)), x.isWhole);
  for (const tick of xTicks) {
    svg.append(shape("text", { x: toX(tick), y: height - bottom + 18, "text-anchor": "middle" }, x.format(tick)));
  }
  svg.append(shape("line", { class: "base", x1: left, x2: width - right, y1: height - bottom, y2: height - bottom }));
  svg.append(shape("text", { class: "axis-title", x: width - right, y: height - 4, "text-anchor": "end" }, x.title));
  body.replaceChildren(svg);
  return { svg, toX, toY, left, right: width - right, top, bottom: height - bottom };
}

// An invisible sheet over a figure that reports where the pointer is.
function track({ svg, left, right, top, bottom }, at) {
  const sheet = shape("rect", { x: left, y: top, width: Math.max(0, right - left), height: bottom - top, fill: "transparent" });
  const cursor = shape("line", { class: "cursor", y1: top, y2: bottom, visibility: "hidden" });
  const leave = () => { cursor.setAttribute("visibility", "hidden"); hideTooltip(); };
  const move = (event) => {
    const box = svg.getBoundingClientRect();
    const hit = at(event.clientX - box.left, event.clientY - box.top);
    if (!hit) { leave(); return; }
    if (isKnown(hit.x)) {
      cursor.setAttribute("x1", hit.x);
      cursor.setAttribute("x2", hit.x);
      cursor.setAttribute("visibility", "visible");
    }
    showTooltip(event.pageX, event.pageY, hit.title, hit.rows);
  };
  sheet.addEventListener("pointermove", move);
  sheet.addEventListener("pointerdown", move);
  sheet.addEventListener("pointerleave", leave);
  svg.append(cursor, sheet);
}
