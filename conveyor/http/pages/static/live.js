// Keep the numbers of runs up to date. Everything is set as text, never as markup.
import { watchRuns } from "./stream.js";

const LIVE = ["running", "pending"];
const OLDER = "This page is older than its run. ";
const numbers = new Intl.NumberFormat("en-US");
const first = new Map(); // what each run had done when this page first heard of it

// As the server rounds: neither the first nor the last ones of many are rounded away.
function percent(part, whole) {
  const share = whole ? (100 * part) / whole : 0;
  const tenths = Math.floor(share * 10 + 0.5) / 10;
  if (share > 0 && share < 1) return `${Math.max(tenths, 0.1).toFixed(1)}%`;
  if (share > 99 && share < 100) return `${Math.min(tenths, 99.9).toFixed(1)}%`;
  return `${Math.floor(share + 0.5)}%`;
}

function duration(seconds) {
  if (seconds < 1) return "under 1 s";
  if (seconds < 60) return `${seconds.toFixed(0)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min ${Math.floor(seconds % 60)} s`;
  const hours = Math.floor(minutes / 60);
  if (hours < 24) return `${hours} h ${minutes % 60} min`;
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

function left(run) {
  if (state(run) !== "running") {
    first.delete(run.run_id);
    return "";
  }
  const now = performance.now();
  const { total, completed } = run.stats;
  const before = first.get(run.run_id) ?? { now, completed };
  first.set(run.run_id, before);
  const seconds = (now - before.now) / 1000;
  const done = completed - before.completed;
  if (completed === total) return "";
  if (seconds < 2 || done <= 0) return null;
  return `about ${duration(((total - completed) * seconds) / done)} left`;
}

function state(run) {
  return run.pause_state ? "paused" : run.status;
}

function waits(run) {
  const reason = run.waiting?.reason;
  return !reason || (reason === "paused" && run.pause_state) ? "" : `waits: ${reason.replaceAll("_", " ")}`;
}

function texts(run) {
  const { total, completed, successful, failed, spend } = run.stats;
  return {
    total: numbers.format(total),
    completed: numbers.format(completed),
    successful: numbers.format(successful),
    failed: numbers.format(failed),
    waiting: numbers.format(total - completed),
    percent: percent(completed, total),
    credits: numbers.format(spend.credits),
    cost: spend.cost.toFixed(2),
    state: state(run),
    left: left(run),
    waits: waits(run),
  };
}

function show(run) {
  const values = texts(run);
  let hasEnded = false;
  for (const element of document.querySelectorAll(`[data-run="${CSS.escape(run.run_id)}"]`)) {
    const name = element.dataset.value;
    const text = values[name];
    if (text === undefined || text === null || element.textContent === text) continue;
    if (name === "state") {
      element.className = `badge is-${text}`;
      hasEnded ||= !LIVE.includes(run.status);
    }
    element.textContent = text;
  }
  const whole = run.stats.total || 1;
  const good = (100 * run.stats.successful) / whole;
  for (const bar of document.querySelectorAll(`[data-bar="${CSS.escape(run.run_id)}"]`)) {
    bar.children[0].setAttribute("width", `${good}%`);
    bar.children[1].setAttribute("x", `${good}%`);
    bar.children[1].setAttribute("width", `${(100 * run.stats.failed) / whole}%`);
  }
  if (hasEnded) notice(`A run has ended: ${state(run)}. `);
  else if (document.body.dataset.live === `${run.job_id}/${run.run_id}`) compare(run);
  else if (isNew(run)) notice("A new run has begun. ");
}

// The waiting line and the buttons come with the page, for the state that the run had then.
function compare(run) {
  const found = `${state(run)} ${run.waiting?.reason ?? ""} ${run.outage?.shared ?? ""}`;
  if (found !== document.body.dataset.shown) notice(OLDER);
  else if (notices().textContent.startsWith(OLDER)) notices().hidden = true;
}

// An overview lists the runs that there were when it was made.
function isNew(run) {
  const { at } = document.body.dataset;
  if (at === undefined || Date.parse(run.created_at) <= Date.parse(at)) return false;
  return document.querySelector(`[data-run="${CSS.escape(run.run_id)}"]`) === null;
}

function notices() {
  return document.querySelector("[data-notice]");
}

// What a run is made of changes with its end: groups, shape, actions. They come with the page.
function notice(text) {
  const place = notices();
  if (!place.hidden && place.textContent.startsWith(text)) return;
  const link = document.createElement("a");
  link.href = location.href;
  link.textContent = "Show the page anew";
  place.replaceChildren(text, link);
  place.hidden = false;
}

export function startLive() {
  const offline = document.querySelector("[data-offline]");
  watchRuns("/dashboard/events", document.body.dataset.live, {
    onRun: show,
    onDown: (isDown) => (offline.hidden = !isDown),
  });
}
