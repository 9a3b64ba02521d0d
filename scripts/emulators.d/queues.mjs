// SQS on loopback, with a clock that a test can move.
//
// The emulator's own program listens on every address; its library does not have to. All its
// deadlines (visibility, delay) are compared with Date.now(), so that moving it moves time.
// POST /_clock/advance/MILLISECONDS moves it on; nothing moves it back.
//
// POST /_names/block/PREFIX keeps queues of such names from being made, as SQS does for a minute with
// the name of a deleted queue; POST /_names/free/PREFIX ends that.
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

const blocked = new Set();
app.post("/_names/block/:prefix", async ({ params }) => ({ blocked: [...blocked.add(params.prefix)] }));
app.post("/_names/free/:prefix", async ({ params }) => ({ freed: blocked.delete(params.prefix) }));
app.addHook("preHandler", async (request, reply) => {
  if (request.headers["x-amz-target"] !== "AmazonSQS.CreateQueue") return;
  if (![...blocked].some((prefix) => request.body.QueueName.startsWith(prefix))) return;
  const code = "QueueDeletedRecently";
  reply.code(400).header("content-type", "application/x-amz-json-1.0");
  reply.header("x-amzn-query-error", `AWS.SimpleQueueService.${code};Sender`);
  return reply.send({ __type: `com.amazonaws.sqs#${code}`, message: "You must wait 60 seconds." });
});
await app.listen({ port: Number(process.argv[2]), host: "127.0.0.1" });
console.log("ready");
process.on("SIGTERM", () => process.exit(0));
