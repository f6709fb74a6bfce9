// Put the page together: every figure in its order, then the words.

for (const note of data.notes) {
  document.getElementById("notes").append(element("li", { class: note.kind }, note.text));
}
runsTable();
planFigure();
histogramFigure();
workFigure();
if (hasFewRanks) skewFigure();
timelineFigure();
if (!hasFewRanks) skewFigure();
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

document.getElementById("footer").append(element(
  "dl", {},
  ...[
    ["skew", "fullest rank ÷ mean rank, in compute seconds of one step; 1.00× is perfectly even"],
    ["waiting", "a rank has finished and another has not: time that even packing gives back"],
    ["MFU", "FLOP that the model needs, per second, over the machine's peak"],
    ["means", "leave out the first step of each session, which pays for warming up"],
  ].flatMap(([word, meaning]) => [element("dt", {}, word), element("dd", {}, meaning)]),
));
window.reportFigures = figuresDrawn;
window.reportReady = true;
