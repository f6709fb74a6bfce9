// Put the page together: every figure in its order, then the words.

take(JSON.parse(document.getElementById("data").textContent));
for (const note of data.notes) {
  document.getElementById("notes").append(element("li", { class: note.kind }, note.text));
}
runsTable();
planFigure();
data.runbooks.forEach(runbookFigure);
histogramFigure();
workFigure();
if (hasFewRanks) skewFigure();
timelineFigure();
if (!hasFewRanks) skewFigure();
expertsFigure();
stepsFigure();
busyErrorFigure();
waitFigure();
seriesFigure("throughput", "Tokens per second", "tokens_per_s", formatCount, "Tokens a second, all ranks together, at each step of each run.", { axis: countFormatter });
seriesFigure("mfu", "Model FLOP utilisation", "mfu", formatPercent, "Share of the machine's peak FLOP/s that the model's own FLOP come to, at each step.", { axis: () => formatPercentTick });
lossFigure();
heldOutFigures();
memoryFigure();
configurationFigure();
environmentFigure();

settleRows();

const words = (pairs) => pairs.flatMap(([word, ...meaning]) => [element("dt", {}, word), element("dd", {}, ...meaning)]);
document.getElementById("footer").append(
  element("dl", { class: "origins" }, ...words(data.origins.map((origin) => [
    origin.label,
    element("code", {}, origin.command),
    [origin.date, origin.version, origin.machine].filter((part) => part).join(" · "),
  ]))),
  element("dl", {}, ...words([
    ["skew", "fullest rank ÷ mean rank, in compute seconds of one step; 1.00× is perfectly even"],
    ["waiting", "a rank stands where ranks meet: another has more work, a message is on its way, or another program has the core; even packing gives back the first alone"],
    ["uneven work", "the fullest rank's compute seconds less the mean rank's, over the step's: what even packing gives back"],
    ["MFU", "FLOP that the model needs, per second, over the machine's peak"],
    ["means", "leave out the first step of each session, which pays for warming up"],
  ])),
);
window.reportFigures = figuresDrawn;
window.reportReady = true;
