// Add to a page that is complete without scripts: the reader's time zone, keys, live numbers.
import { startKeys } from "./keys.js";
import { startLive } from "./live.js";
import { showTimes } from "./times.js";

showTimes(document);
startKeys();
if ("live" in document.body.dataset) startLive();
