// A server by its metrics: how soon tokens come, who is served, how full its cache is.

const hasServing = document.body.dataset.serving === "yes";
const servingColors = ["var(--by-work)", "var(--in-order)", "var(--by-tokens)", "var(--other-0)", "var(--other-1)", "var(--other-2)"];

function servingView(view) {
  const head = element("header", { id: "head" });
  const figures = element("div", { id: "figures" });
  view.replaceChildren(head, figures);
  return {
    path: "/api/serving",
    show(served) {
      const pointer = hovered();
      data = { findings: {}, runs: [] };
      const { url, sentence, columns, tenants } = served;
      const now = (name) => columns[name]?.at(-1) ?? null;
      document.title = `${formatWhole(now("running") ?? 0)} running · serving · equipoise`;
      head.replaceChildren(
        element("div", { class: "title" }, element("h1", {}, "Serving"), pill(sentence ? "lost" : "running")),
        element("p", { class: "about" }, url),
        sentence ? element("p", { class: "state silent" }, sentence) : "",
        element("dl", { class: sentence ? "tiles stale" : "tiles" }, ...servingTiles(now, tenants)),
      );
      drawnLast = null;
      servingFigures(served);
      settleRows();
      pointer();
    },
  };
}

function servingTiles(now, tenants) {
  const hits = now("prefix_queries_per_s") > 0 ? now("prefix_hits_per_s") / now("prefix_queries_per_s") : null;
  const tiles = [
    tile("First token (TTFT)", formatSeconds(now("first_token_p50_s")), `p99 ${formatSeconds(now("first_token_p99_s"))}`),
    tile("Between tokens", formatSeconds(now("next_token_p50_s")), `p99 ${formatSeconds(now("next_token_p99_s"))}`),
    tile("Running", formatWhole(now("running")), `${formatWhole(now("waiting"))} waiting`),
    tile("Tokens a second", formatCount(now("generation_tokens_per_s")), `${formatCount(now("prompt_tokens_per_s"))} of prompts`),
    tile("KV cache", formatPercent(now("kv_share")), "of its pages"),
    isKnown(hits) ? tile("Prefix hits", formatPercent(hits), "of prompt tokens") : null,
    isKnown(now("fairness_gap")) ? tile("Fairness gap", formatSeconds(now("fairness_gap")), "of service, between tenants that wait") : null,
    tenants.length > 1 ? tile("Tenants", formatWhole(tenants.length), isKnown(now("served_gap")) ? `${formatCount(now("served_gap"))} tokens/s apart` : "") : null,
  ];
  return tiles.filter(isKnown);
}

function servingFigures({ t, sentence, columns, tenants, tenants_left_out: leftOut, context }) {
  const minutes = t.map((at) => (at - t.at(-1)) / 60);
  const line = (name, values, color, more = {}) => {
    const at = (values ?? []).map((_, index) => index).filter((index) => isKnown(values[index]));
    return { name, color, x: at.map((index) => minutes[index]), y: at.map((index) => values[index]), steps_a_point: 1, ...more };
  };
  const minute = (value) => (Math.abs(value) < 0.05 ? (sentence ? "last answer" : "now") : `−${Math.abs(value).toLocaleString("en", { maximumFractionDigits: 1 })} min`);
  const over = { x: { format: minute, axis: () => minute }, xTitle: "" };
  const pair = (name) => [line("median", columns[`${name}_p50_s`], servingColors[0]), line("mean", columns[`${name}_mean_s`], servingColors[0], { dashed: true }), line("p99", columns[`${name}_p99_s`], servingColors[1])];
  liveLines("first-token", "Time to first token", pair("first_token"), { ...over, format: formatSeconds, axis: secondsFormatter, label: "Median, mean and 99th percentile of the time to the first token." });
  const next = liveLines("next-token", "Time between tokens", pair("next_token"), { ...over, format: formatSeconds, axis: secondsFormatter, label: "Median, mean and 99th percentile of the time between two tokens." });
  next?.hint("The mean over all tokens is the time per output token (TPOT).");
  liveLines("queue", "Requests", [line("running", columns.running, servingColors[0]), line("waiting", columns.waiting, servingColors[1])], { ...over, format: formatCount, axis: countFormatter, isWhole: true, label: "Requests that run and that wait." });
  liveLines("tokens", "Tokens per second", [line("generated", columns.generation_tokens_per_s, servingColors[0]), line("of prompts", columns.prompt_tokens_per_s, servingColors[2])], { ...over, format: formatCount, axis: countFormatter, label: "Tokens a second, generated and of prompts." });
  liveLines("kv", "KV cache in use", [line("in use", columns.kv_share, servingColors[0])], { ...over, format: formatPercent, axis: () => formatPercentTick, label: "Share of the cache's pages that requests hold." });
  const named = tenants.length > 1 || (tenants.length === 1 && tenants[0].name);
  if (named) {
    const shown = tenants.slice(0, servingColors.length).map((tenant, index) => line(tenant.name, tenant.line, servingColors[index]));
    const figure = liveLines("tenants", "What each tenant is served", shown, { ...over, format: formatCount, axis: countFormatter, label: "Tokens of prompts and answers a second, by tenant." });
    if (figure) {
      figure.hint("Tokens of prompts and answers a second, over the last minute.");
      if (tenants.length > shown.length) figure.hint(`The ${shown.length} that were served most of ${formatWhole(tenants.length + leftOut)}.`);
      addTable(figure, ["tenant", "tokens in all", "tokens/s now"], () => tenants.map((tenant) => [tenant.name, formatWhole(tenant.tokens), formatCount(tenant.tokens_per_s)]));
    }
  }
  const isTheirs = (columns.fairness_gap ?? []).some(isKnown);
  const gap = liveLines("fairness", "Fairness gap", [line("gap", isTheirs ? columns.fairness_gap : columns.served_gap, servingColors[3])], { ...over, format: isTheirs ? formatSeconds : formatCount, axis: isTheirs ? secondsFormatter : countFormatter, label: "How far tenants are apart in what they are served." });
  gap?.hint(isTheirs ? "Predicted seconds of service over the tenant's weight, between the tenants that wait, as the server counts them." : "Tokens a second of the tenant that was served most, less the one that was served least, over the last minute. Weights and queues are not in the metrics.");
  // Ticks are round in the unit that they are read in.
  const most = Math.max(0, ...context.flatMap((each) => each.line.filter(isKnown)));
  const unit = 1024 ** Math.max(0, Math.floor(Math.log2(most || 1) / 10));
  const bytes = (value) => `${formatBytes(value * unit)}/s`;
  const sent = liveLines("context", "Bytes of context parallelism", context.slice(0, servingColors.length).map((each, index) => line(each.name, each.line.map((value) => (isKnown(value) ? value / unit : value)), servingColors[index])), { ...over, format: bytes, axis: () => bytes, label: "Bytes a second that ranks send each other for attention, by variant." });
  if (sent) addTable(sent, ["variant", "bytes in all"], () => context.map((each) => [each.name, formatBytes(each.bytes)]));
  const swapped = columns.preemptions_by_swap_per_s;
  const preempted = swapped
    ? [line("preempted, swapped out", swapped, servingColors[2]), line("preempted, to be computed again", columns.preemptions_by_recompute_per_s, servingColors[1])]
    : [line("preempted", columns.preemptions_per_s, servingColors[1])];
  liveLines("trouble-rates", "Preempted and refused", [...preempted, line("refused", columns.rejections_per_s, servingColors[5])], { ...over, format: formatCount, axis: countFormatter, label: "Requests a second that lost their pages, and that were refused." });
}

// The server in one line above the runs.
async function showStrip(strip) {
  const { isNew, value } = await ask("/api/serving");
  if (!isNew) return;
  const now = (name) => value.columns[name]?.at(-1) ?? null;
  const words = value.sentence || [
    `${formatWhole(now("running"))} running, ${formatWhole(now("waiting"))} waiting`,
    `first token ${formatSeconds(now("first_token_p50_s"))}`,
    `${formatCount(now("generation_tokens_per_s"))} tokens/s`,
    `KV cache ${formatPercent(now("kv_share"))}`,
  ].join(" · ");
  strip.replaceChildren(element("a", { class: `serving ${value.sentence ? "silent" : "running"}`, href: "#/serving" }, element("b", {}, "Serving"), element("span", {}, words)));
}
