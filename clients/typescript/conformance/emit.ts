/** Observations, one JSON object a line. */

/** Writes one observation, seen by the harness at once. */
export function emit(observation: Readonly<Record<string, unknown>>): void {
  process.stdout.write(`${JSON.stringify(observation, asNumber)}\n`);
}

/** A 64-bit number as a JSON number, which JSON.stringify refuses to write. Those of the cases are small. */
function asNumber(_key: string, value: unknown): unknown {
  return typeof value === "bigint" ? Number(value) : value;
}
