// What was planned beside what was measured, of runs that obeyed a plan.lock.

function planFigure() {
  const runs = data.runs.filter((run) => run.plan);
  if (!runs.length) return;
  const figure = addFigure({ id: "plan", title: "The plan beside the run", marks: ["predicted", "measured"], wide: true });
  const colors = { computing: "var(--span-backward)", optimizer: "var(--span-optimizer)", "messages and waiting": "var(--wait-ink)" };
  figure.legend.append(...Object.entries(colors).map(([part, color]) => key("bar", color, part)));
  const high = Math.max(...runs.flatMap(({ plan }) => [plan.step_s.planned, plan.step_s.measured ?? 0, plan.interval_s?.[1] ?? 0])) || 1;
  keepDrawn(figure.body, (width) => {
    const many = runs.length > 1;
    const group = many ? 84 : 60, right = 132;
    const svg = shape("svg", { width, height: runs.length * group, role: "img", "aria-label": "Seconds of a step by part, as planned above as measured." });
    const long = (seconds) => (Math.max(0, seconds) / high) * (width - right);
    runs.forEach(({ label, plan }, index) => {
      const top = index * group + (many ? 24 : 4);
      if (many) svg.append(shape("text", { x: 0, y: top - 10 }, label));
      ["planned", "measured"].forEach((side, row) => {
        const y = top + row * 24;
        let at = 0;
        for (const part of plan.parts) {
          if (!isKnown(part[side])) continue;
          const bar = shape("rect", { x: at, y, width: Math.max(0, long(part[side]) - 1), height: 18, fill: colors[part.name] });
          bar.append(shape("title", {}, `${part.name}, ${side}: ${formatSeconds(part[side])}`));
          svg.append(bar);
          at += long(part[side]);
        }
        const whole = plan.step_s[side];
        if (side === "planned" && plan.interval_s) {
          const [low, high] = plan.interval_s.map(long);
          const range = shape("path", { d: `M${low} ${y + 5}v8M${low} ${y + 9}H${high}M${high} ${y + 5}v8`, stroke: "var(--ink)", fill: "none" });
          range.append(shape("title", {}, `80% of such steps: ${plan.interval_s.map(formatSeconds).join(" to ")}`));
          svg.append(range);
          at = Math.max(at, high);
        }
        if (isKnown(whole)) svg.append(shape("text", { x: at + 8, y: y + 13 }, `${formatSeconds(whole)} ${side}`));
      });
    });
    figure.body.replaceChildren(svg);
  });
  for (const { label, plan } of runs) {
    const of = runs.length > 1 ? `${label}: ` : "";
    figure.hint(`${of}Measured is the median of ${formatWhole(plan.steps)} steps. Decided: ${Object.entries(plan.keys).map(([name, value]) => `${name} = ${value}`).join(", ")}.`);
  }
  const signed = (value) => (isKnown(value) ? `${value < 0 ? "−" : "+"}${formatPercent(Math.abs(value))}` : missing);
  addTable(figure, ["run", "what", "planned", "measured", "plan over measured"], () => runs.flatMap(({ label, plan }) => [
    ...(plan.interval_s ? [[label, "80% of such steps", plan.interval_s.map(formatSeconds).join(" to "), missing, missing]] : []),
    ...[plan.step_s, ...plan.parts].map((each) => [label, each.name, formatSeconds(each.planned), formatSeconds(each.measured), signed(each.error)]),
    [label, plan.memory_bytes.name, formatBytes(plan.memory_bytes.planned), formatBytes(plan.memory_bytes.measured), signed(plan.memory_bytes.error)],
    ...Object.entries(plan.terms).map(([term, seconds]) => [label, `planned: ${term}`, formatSeconds(seconds), missing, missing]),
  ]));
}
