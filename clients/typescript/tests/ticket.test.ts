import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import { test } from "node:test";

import { digestOfInputs, digestOfText, digestOfTokens } from "../src/ticket.js";

interface Vectors {
  readonly prompt_digests: readonly {
    readonly text?: string;
    readonly token_ids?: number[];
    readonly digests?: string[];
    readonly digest: string;
  }[];
}

test("prompt digests are those of every language", async () => {
  const path = new URL("../../hashes.json", import.meta.url);
  const vectors = JSON.parse(await readFile(path, "utf8")) as Vectors;
  assert.ok(vectors.prompt_digests.length > 3);
  for (const { text, token_ids, digests = [], digest } of vectors.prompt_digests) {
    const made =
      text !== undefined
        ? digestOfText(text)
        : token_ids !== undefined
          ? digestOfTokens(token_ids)
          : digestOfInputs(digests.map((part) => Buffer.from(part, "hex")));
    assert.equal(made.toString("hex"), digest);
  }
});
