// Numbers as people read them, and the ticks of an axis.

let data = null;
const missing = "–";

function isKnown(value) { return value !== null && value !== undefined; }

function decimals(value, digits) {
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

function formatSeconds(value) {
  if (!isKnown(value)) return missing;
  const size = Math.abs(value);
  if (size === 0) return "0 s";
  if (size < 1e-3) return `${decimals(value * 1e6, size < 1e-5 ? 1 : 0)} µs`;
  if (size < 1) return `${decimals(value * 1e3, size < 0.1 ? 1 : 0)} ms`;
  if (size < 120) return `${decimals(value, size < 10 ? 2 : 1)} s`;
  return size < 7200 ? `${decimals(value / 60, 1)} min` : `${decimals(value / 3600, 1)} h`;
}

function formatBytes(value) {
  if (!isKnown(value)) return missing;
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let index = 0;
  while (Math.abs(value) >= 1024 && index < units.length - 1) { value /= 1024; index += 1; }
  return `${decimals(value, index === 0 || value >= 100 ? 0 : 1)} ${units[index]}`;
}

function formatCount(value) {
  if (!isKnown(value)) return missing;
  const size = Math.abs(value);
  for (const [limit, suffix] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e4, "k"]]) {
    const unit = suffix === "k" ? 1e3 : limit;
    if (size >= limit) return `${decimals(value / unit, size / unit >= 100 || value % unit === 0 ? 0 : 1)}${suffix}`;
  }
  return value.toLocaleString("en", { maximumFractionDigits: size < 10 ? 2 : 0 });
}

function formatPercent(value) {
  if (!isKnown(value)) return missing;
  return `${decimals(value * 100, Math.abs(value) < 0.0995 ? 1 : 0)}%`;
}

function formatPercentTick(value) { return `${(value * 100).toLocaleString("en", { maximumFractionDigits: 1 })}%`; }
function formatTimes(value) { return isKnown(value) ? `${decimals(value, 2)}×` : missing; }
function formatTimesTick(value) { return `${value.toLocaleString("en", { minimumFractionDigits: 2, maximumFractionDigits: 4 })}×`; }
function formatLoss(value) { return isKnown(value) ? decimals(value, 3) : missing; }
function formatWhole(value) { return isKnown(value) ? Math.round(value).toLocaleString("en") : missing; }

// About `count` round numbers that span [low, high]; whole ones for steps.
function roundTicks(low, high, count, isWhole = false) {
  const rough = Math.max((high - low) / Math.max(1, count), isWhole ? 1 : 0);
  if (!(rough > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = (isWhole && power === 1 ? [1, 2, 5, 10] : [1, 2, 2.5, 5, 10]).map((each) => each * power).find((each) => each >= rough * 0.999);
  const ticks = [];
  for (let index = Math.ceil(low / step - 1e-9); index * step <= high + step * 1e-9; index += 1) {
    ticks.push(Number((index * step).toPrecision(12)));
  }
  // One tick alone says nothing about the scale.
  return ticks.length < 2 && count < 8 && !isWhole ? roundTicks(low, high, count + 1) : ticks;
}

function countFormatter(high) {
  const [unit, suffix] = [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e4, "k"]].find(([limit]) => high >= limit) ?? [1, ""];
  const divisor = suffix === "k" ? 1e3 : unit;
  return (value) => (value ? `${(value / divisor).toLocaleString("en", { maximumFractionDigits: 3 })}${suffix}` : "0");
}

// Tick labels of one axis share a unit, so that "500 ms, 1.00 s, 1.50 s" does not happen.
function secondsFormatter(high) {
  const [unit, suffix] = high < 1e-3 ? [1e-6, "µs"] : high < 1 ? [1e-3, "ms"] : high < 300 ? [1, "s"] : [60, "min"];
  return (value) => `${(value / unit).toLocaleString("en", { maximumFractionDigits: 3 })} ${suffix}`;
}
