import { Client } from "dragoman";

const client = new Client();
const prompt = [{ role: "user", content: "Hello!" }];
for await (const token of client.generate(prompt, { maxOutputTokens: 32 })) {
  process.stdout.write(token.text);
}
await client.close();
