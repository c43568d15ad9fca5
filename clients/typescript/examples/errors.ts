import { Client, DragomanError } from "dragoman";

const client = new Client();
try {
  await client.complete("Hello", { model: "no-such-model", signal: AbortSignal.timeout(5000) });
} catch (error) {
  if (!(error instanceof DragomanError)) {
    throw error;
  }
  console.log(error.reason, error.retryable, error.message, error.remedy);
}
await client.close();
