// Which view is shown, and the beat that keeps it new.

const BEAT_MS = 1000, LOST_MS = 3000, HASTE_MS = 30;
const hasRuns = document.body.dataset.runs === "yes";
const trouble = document.getElementById("trouble");
let shown = null, turn = 0;

function open() {
  const [, where = "", what = ""] = location.hash.split("/");
  const view = document.getElementById("view");
  forget();
  hideTooltip();
  if (where === "run" || where === "runs") shown = runView(view, what.split(",").filter(Boolean));
  else if (hasServing && (where === "serving" || !hasRuns)) shown = servingView(view);
  else shown = listView(view);
  const isServing = where === "serving" || !hasRuns;
  const links = [...(hasRuns ? [["Runs", "#/", !isServing]] : []), ...(hasServing ? [["Serving", "#/serving", isServing]] : [])];
  document.getElementById("nav").replaceChildren(
    element("span", { class: "brand" }, "equipoise"),
    ...links.map(([word, href, isHere]) => element("a", { href, "aria-current": isHere ? "page" : null }, word)),
  );
  turn += 1;
  beat(turn);
}

async function beat(mine) {
  let wait = BEAT_MS;
  try {
    const { status, isNew, value } = await ask(shown.path);
    if (mine !== turn) return;
    if (status === 404) shown.gone?.();
    else if (isNew && value.error) throw new Error(value.error);
    else if (isNew) {
      shown.show(value);
      if (value.is_behind) wait = HASTE_MS;
    }
    await shown.also?.();
    trouble.hidden = true;
    window.dashboardBeats = (window.dashboardBeats ?? 0) + 1;
    window.reportReady = true;
  } catch (error) {
    if (mine !== turn) return;
    // Whatever a browser calls it, an answer that does not come is one of these two.
    const isLost = error instanceof TypeError && /fetch|network|load/i.test(error.message) || error.name === "TimeoutError" || error.name === "AbortError";
    if (!isLost) console.error(error);
    trouble.textContent = isLost ? "The dashboard does not answer: it was ended, or this device is offline. What you see is its last answer." : `The page cannot show the answer: ${error.message}`;
    trouble.hidden = false;
    forget();
    wait = LOST_MS;
  }
  if (mine !== turn) return;
  // A page that nobody looks at asks nothing.
  if (document.hidden) await new Promise((go) => document.addEventListener("visibilitychange", go, { once: true }));
  setTimeout(() => { if (mine === turn) beat(mine); }, wait);
}

window.addEventListener("hashchange", () => { window.scrollTo(0, 0); open(); });
open();
