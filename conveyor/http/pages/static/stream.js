// One stream a browser: the visible tab that holds a lock has it, and tells the others. A tab gives
// it up when it is hidden, so that nobody has one while all are. Without locks each tab has its own.
const NAME = "conveyor-dashboard";
const RETRY = 2000;
const PATIENCE = 3000; // after which readers are told that there is no connection
const MOST = 16; // runs that the server takes by name, beside those that changed last

// Tests tell tabs to be hidden by this event, as browsers without windows hide none.
const SEAM = "conveyor:visibility";

// `mine` names the run that this page is about, if it is about one.
export function watchRuns(address, mine, { onRun, onDown }) {
  const latest = new Map();
  const wanted = new Set(mine ? [mine] : []); // the runs that tabs are about
  let alarm = null;
  let isDown = false;
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

  function hear(value) {
    if (value === isDown) return;
    isDown = value;
    onDown(value);
  }

  function fails(value) {
    clearTimeout(alarm);
    alarm = null;
    if (value !== isDown) channel?.postMessage({ down: value });
    hear(value);
  }

  // Whoever has the stream is told of the runs of the other tabs, and asks for them by name.
  function want(name) {
    if (!name || wanted.has(name)) return;
    wanted.add(name);
    const others = [...wanted].filter((one) => one !== mine);
    if (wanted.size > MOST) wanted.delete(others[0]);
    if (source === null) return;
    close();
    open();
  }

  function open() {
    const query = new URLSearchParams([...wanted].map((name) => ["run", name]));
    source = new EventSource(wanted.size ? `${address}?${query}` : address);
    source.addEventListener("open", () => fails(false));
    source.addEventListener("run", (event) => {
      const run = JSON.parse(event.data);
      take(run);
      channel?.postMessage({ run });
    });
    source.addEventListener("error", () => {
      alarm ??= setTimeout(() => fails(true), PATIENCE);
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
      clearTimeout(alarm);
      alarm = null;
      wanted.clear();
      if (mine) wanted.add(mine);
      ending.abort();
      end();
    };
    const own = giveUp;
    navigator.locks
      .request(NAME, { signal: ending.signal }, () => {
        if (giveUp !== own) return undefined;
        open();
        channel.postMessage({ asks: true });
        return ended;
      })
      .catch((error) => {
        if (error.name !== "AbortError") throw error;
      });
  }

  function begin() {
    if (!canShare) return open();
    share();
    channel.postMessage({ wants: mine, hello: true });
  }

  function seen(hidden) {
    if (hidden === isHidden) return;
    isHidden = hidden;
    if (!hidden) begin();
    else if (canShare) giveUp?.();
    else close();
  }

  channel?.addEventListener("message", ({ data }) => {
    if (data.run) return take(data.run);
    if (data.down !== undefined) return hear(data.down);
    if (data.asks) return isHidden || channel.postMessage({ wants: mine });
    if (source === null) return undefined;
    if (data.hello) for (const run of latest.values()) channel.postMessage({ run });
    if (data.hello) channel.postMessage({ down: isDown });
    return want(data.wants);
  });
  document.addEventListener("visibilitychange", () => seen(document.hidden));
  document.addEventListener(SEAM, (event) => seen(event.detail === "hidden"));
  window.addEventListener("pagehide", () => seen(true));
  window.addEventListener("pageshow", (event) => event.persisted && seen(document.hidden));
  if (!isHidden) begin();
}
