// One stream a browser: the visible tab that holds a lock has it, and tells the others. A tab gives
// it up when it is hidden, so that nobody has one while all are. Without locks each tab has its own.
const NAME = "conveyor-dashboard";
const RETRY = 2000;

// Tests tell tabs to be hidden by this event, as browsers without windows hide none.
const SEAM = "conveyor:visibility";

export function watchRuns(address, onRun) {
  const latest = new Map();
  const channel = "BroadcastChannel" in window ? new BroadcastChannel(NAME) : null;
  const canShare = channel !== null && "locks" in navigator;
  let source = null;
  let giveUp = null;
  let isHidden = document.hidden;

  function take(run) {
    latest.delete(run.run_id);
    latest.set(run.run_id, run);
    if (latest.size > 200) latest.delete(latest.keys().next().value);
    onRun(run);
  }

  function open() {
    source = new EventSource(address);
    source.addEventListener("run", (event) => {
      const run = JSON.parse(event.data);
      take(run);
      channel?.postMessage({ run });
    });
    source.addEventListener("error", () => {
      // The browser tries again by itself, except after an answer that is no stream.
      if (source?.readyState !== EventSource.CLOSED) return;
      close();
      setTimeout(() => isHidden || source || (canShare && !giveUp) || open(), RETRY);
    });
  }

  function close() {
    source?.close();
    source = null;
  }

  function share() {
    const ending = new AbortController();
    let end;
    const ended = new Promise((resolve) => (end = resolve));
    giveUp = () => {
      giveUp = null;
      close();
      ending.abort();
      end();
    };
    const mine = giveUp;
    navigator.locks
      .request(NAME, { signal: ending.signal }, () => {
        if (giveUp !== mine) return undefined;
        open();
        return ended;
      })
      .catch((error) => {
        if (error.name !== "AbortError") throw error;
      });
  }

  function begin() {
    if (!canShare) return open();
    share();
    channel.postMessage({ hello: true });
  }

  function seen(hidden) {
    if (hidden === isHidden) return;
    isHidden = hidden;
    if (!hidden) begin();
    else if (canShare) giveUp?.();
    else close();
  }

  channel?.addEventListener("message", ({ data }) => {
    if (data.run) take(data.run);
    else if (source !== null) for (const run of latest.values()) channel.postMessage({ run });
  });
  document.addEventListener("visibilitychange", () => seen(document.hidden));
  document.addEventListener(SEAM, (event) => seen(event.detail === "hidden"));
  window.addEventListener("pagehide", () => seen(true));
  window.addEventListener("pageshow", (event) => event.persisted && seen(document.hidden));
  if (!isHidden) begin();
}
