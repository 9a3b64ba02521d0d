// SQS on loopback, with a clock that a test can move.
//
// The emulator's own program listens on every address; its library does not have to. All its
// deadlines (visibility, delay) are compared with Date.now(), so that moving it moves time.
// POST /_clock/advance/MILLISECONDS moves it on; nothing moves it back.
import { buildApp } from "fauxqs";

const { SqsStore } = await import(new URL("sqs/sqsStore.js", import.meta.resolve("fauxqs")).href);

const now = Date.now.bind(Date);
let ahead = 0;
Date.now = () => now() + ahead;

const sqsStore = new SqsStore();
// With an empty host, queue URLs have the address that a request came to.
sqsStore.host = "";
const app = buildApp({ logger: false, stores: { sqsStore } });
app.post("/_clock/advance/:milliseconds", async (request) => {
  const milliseconds = Number(request.params.milliseconds);
  if (!Number.isFinite(milliseconds) || milliseconds < 0) {
    throw Object.assign(new Error("not a number of milliseconds"), { statusCode: 400 });
  }
  ahead += milliseconds;
  return { ahead };
});
await app.listen({ port: Number(process.argv[2]), host: "127.0.0.1" });
console.log("ready");
process.on("SIGTERM", () => process.exit(0));
